"""Triggers: what the triggerer waits for without a slot, a Java machine or a Spark session.

Rule 1: a look costs a few milliseconds and happens in a thread; between two looks nothing is held.
Rule 2: a watcher writes down how far it has come, and what it has not yet handed on, so that after a restart it goes on there:
an event may come twice, and none is lost.
Rule 3: a watcher says at most one thing in ``least_s``: what came meanwhile is in its next event.
"""

import asyncio
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

LOOK_S: Final = 2.0
_HERE: Final = "fleetpulse.orchestration.triggers"
_SHOWN: Final = 20  # alerts that an event carries; it says how many there were
_ANEW_S: Final = 30.0  # without a broker, before its address is read again
_DIGITS: Final = 20  # of a version in the name of its commit


class Reaching(BaseTrigger):
    """Fires when a number has been reached; what number, its kinds say.

    Args:
        home: the installation's folder.
        wanted: the number; any higher one will do.
        until_s: when to give up, seconds since the epoch.
        first_s: seconds before the first look.
        every_s: seconds between two looks.
    """

    def __init__(self, *, home: str, wanted: int, until_s: float, first_s: float = 0.0, every_s: float = LOOK_S) -> None:
        super().__init__()
        self.home, self.wanted, self.until_s, self.first_s, self.every_s = home, wanted, until_s, first_s, every_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what makes it anew."""
        told = {"home": self.home, "wanted": self.wanted, "until_s": self.until_s}
        return f"{_HERE}.{type(self).__name__}", {**told, "first_s": self.first_s, "every_s": self.every_s}

    @staticmethod
    @abstractmethod
    def look(home: str) -> int | None:
        """Return what is reached; None where nothing is."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until it is there, or the time is over; the event is ``{"reached", "wanted", "at"}``."""
        await asyncio.sleep(self.first_s)
        while True:
            at = await asyncio.to_thread(self.look, self.home)
            if (reached := at is not None and at >= self.wanted) or time.time() >= self.until_s:
                yield TriggerEvent({"reached": reached, "wanted": self.wanted, "at": at})
                return
            await asyncio.sleep(self.every_s)


class StreamAtBatch(Reaching):
    """Fires when the stream has committed a batch."""

    @staticmethod
    def look(home: str) -> int | None:
        """Return the newest batch that the current generation has committed; None before the first."""
        return batch_of(home)


class FrontierPast(Reaching):
    """Fires when all up to an instant of event time, epoch milliseconds, has been judged, and no verdict of it is held back."""

    @staticmethod
    def look(home: str) -> int | None:
        """Return up to which event time all is judged and written; None before the first."""
        return frontier_of(home)


class DeltaLogWatch(BaseEventTrigger):
    """Fires when a Delta table has got rows, by its log.

    Args:
        table: the table's folder.
        notes: the folder where it writes down how far it has come.
        name: of that note.
        home: the installation whose job is asked how far it has judged; empty: nobody is asked.
        part: fires for files below this folder of the table only, such as ``kind=late``; empty for all.
        least_s: seconds between two events.
        every_s: seconds between two looks.
    """

    def __init__(
        self,
        *,
        table: str,
        notes: str,
        name: str,
        home: str = "",
        part: str = "",
        least_s: float = 60.0,
        every_s: float = LOOK_S,
    ) -> None:
        super().__init__()
        self.home = home
        self.table, self.notes, self.name, self.part = table, notes, name, part
        self.least_s, self.every_s = least_s, every_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what makes it anew."""
        told = {"table": self.table, "notes": self.notes, "name": self.name, "home": self.home, "part": self.part}
        return f"{_HERE}.DeltaLogWatch", {**told, "least_s": self.least_s, "every_s": self.every_s}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look for ever; an event is ``{"table", "from_version", "version", "rows"}``, of the versions after the first.

        With a home it says how far the job has judged as well, see `judged_of`.
        """
        note, table = Path(self.notes) / f"watch-{self.name}.json", Path(self.table)
        at = await asyncio.to_thread(_position, note)
        if at is None:
            newest = await asyncio.to_thread(_newest, table)  # what was there before anybody watched is no news
            at = _Position(newest, newest, 0, 0.0)
            await asyncio.to_thread(_note, note, at)
        while True:  # each look reads on, also where nothing may be said: a log keeps its versions for minutes
            newest, rows = await asyncio.to_thread(_since, table, at.version, self.part)
            if newest != at.version:
                at = _Position(newest, at.from_version if at.rows or rows else newest, at.rows + rows, at.told_s)
                await asyncio.to_thread(_note, note, at)
            if at.rows and time.time() - at.told_s >= self.least_s:
                said = {"table": table.name, "from_version": at.from_version, "version": at.version, "rows": at.rows}
                judged = await asyncio.to_thread(judged_of, Path(self.home)) if self.home else {}
                yield TriggerEvent({**said, **judged})
                at = _Position(at.version, at.version, 0, time.time())
                await asyncio.to_thread(_note, note, at)
            await asyncio.sleep(self.every_s)


class AlertWatch(BaseEventTrigger):
    """Fires when something is published on a topic of the home's broker; the broker keeps what comes while nobody listens.

    Args:
        home: the installation's folder: the broker's address and the secret name of the session are there.
        topic: the subscription.
        least_s: seconds between two events.
        every_s: seconds between two looks, and between two tries to reach the broker.
    """

    def __init__(self, *, home: str, topic: str, least_s: float = 60.0, every_s: float = LOOK_S) -> None:
        super().__init__()
        self.home, self.topic, self.least_s, self.every_s = home, topic, least_s, every_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what makes it anew."""
        return f"{_HERE}.AlertWatch", {
            "home": self.home,
            "topic": self.topic,
            "least_s": self.least_s,
            "every_s": self.every_s,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Listen for ever; an event is ``{"count": n, "alerts": [{"topic", "payload"}, the newest few]}``."""
        from fleetpulse.io.mqtt.alerts import AlertLine

        told_s, up_s = 0.0, time.monotonic()
        line: AlertLine | None = None
        try:
            while True:
                line = line or await asyncio.to_thread(_reach, self.home, self.topic)
                if line is not None:
                    await asyncio.to_thread(line.drive, 0.1)
                if line is not None and line.waiting and time.time() - told_s >= self.least_s:
                    count = len(line.waiting)
                    shown = [{"topic": topic, "payload": payload} for topic, payload in line.newest(_SHOWN)]
                    yield TriggerEvent({"count": count, "alerts": shown})
                    told_s = time.time()
                    await asyncio.to_thread(line.acknowledge, count)
                up_s = time.monotonic() if line is None or line.up else up_s
                if line is not None and time.monotonic() - up_s > _ANEW_S:
                    line.close()  # the broker may have another address by now
                    line = None
                await asyncio.sleep(self.every_s)
        finally:
            if line is not None:
                line.close()


def judged_of(home: Path) -> dict[str, int]:
    """Return how far the job has judged; nothing before its first batch, or where that cannot be read: it is a note.

    Returns:
        ``batch``, and ``received_at_ms``, the watermark: up to which ``received_at`` it has judged (epoch milliseconds).
    """
    from fleetpulse.core.errors import FleetError
    from fleetpulse.io.checkpoints.checkpoint import judged_up_to
    from fleetpulse.io.home.home import Home

    try:
        reached = judged_up_to(Home(home).checkpoint)
    except (FleetError, OSError, ValueError):
        return {}
    return {"batch": reached[0], "received_at_ms": reached[1]} if reached else {}


def batch_of(home: str) -> int | None:
    """Return the newest batch that the current generation has committed; None before the first."""
    from fleetpulse.io.checkpoints.checkpoint import judged_up_to
    from fleetpulse.io.home.home import Home

    reached = judged_up_to(Home(Path(home)).checkpoint)
    return reached[0] if reached else None


def frontier_of(home: str) -> int | None:
    """Return up to which event time all is judged and written, epoch milliseconds; None before the first.

    A jitter holds verdicts about silence back: that much below the frontier all of them are there.
    """
    from fleetpulse.io.checkpoints.checkpoint import judged_up_to
    from fleetpulse.io.home.home import Home
    from fleetpulse.reports.judgements import frontier_ms

    opened = Home(Path(home))
    reached = judged_up_to(opened.checkpoint)
    frontier = frontier_ms(opened, reached[1] if reached[1] > 1 else None) if reached else None
    return None if frontier is None else opened.deployment().said_through_ms(frontier)


class _Position(NamedTuple):
    """How far a watcher of a log has come.

    Attributes:
        version: the newest that it has read.
        from_version: the newest that it has told of.
        rows: of those between, not told of yet.
        told_s: when it told last, in seconds of the epoch.
    """

    version: int
    from_version: int
    rows: int
    told_s: float


def _position(note: Path) -> _Position | None:
    try:
        found = json.loads(note.read_text())
        version = int(found["version"])
        return _Position(version, int(found.get("from_version", version)), int(found.get("rows", 0)), float(found["told_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(note: Path, at: _Position) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    fresh = note.with_name(f".{note.name}.new")
    fresh.write_text(json.dumps(at._asdict()))
    fresh.replace(note)


def _commits(table: Path) -> list[int]:
    names = (path.name.removesuffix(".json") for path in (table / "_delta_log").glob("*.json"))
    return sorted(int(name) for name in names if len(name) == _DIGITS and name.isdecimal())


def _newest(table: Path) -> int:
    return max(_commits(table), default=-1)


def _since(table: Path, seen: int, part: str) -> tuple[int, int]:
    """Return the newest version, and how many rows have come since one; what the log no longer has counts as a row."""
    from fleetpulse.io.delta.log import actions_of

    commits = _commits(table)
    newest = max(commits, default=-1)
    if newest < seen:  # the table was made anew
        seen = -1
    kept = [version for version in commits if version > seen]
    rows = newest - seen - len(kept)
    for version in kept:
        try:
            actions = actions_of(table / "_delta_log" / f"{version:0{_DIGITS}d}.json")
        except FileNotFoundError:
            rows += 1
            continue
        for added in (action.get("add") for action in actions):
            if added and added.get("dataChange", True) and added["path"].startswith(part):
                rows += json.loads(added.get("stats") or "{}").get("numRecords", 1)
    return newest, rows


def _reach(home: str, topic: str) -> Any:
    """Return a line to the home's broker; None where there is none yet."""
    from fleetpulse.core.errors import FleetError
    from fleetpulse.io.home.home import Home
    from fleetpulse.io.mqtt.address import load_address
    from fleetpulse.io.mqtt.alerts import AlertLine

    opened = Home(Path(home))
    try:
        address = load_address(opened.run("broker"))
        return AlertLine(address, opened.session("alerts"), topic)
    except (FleetError, OSError):
        return None
