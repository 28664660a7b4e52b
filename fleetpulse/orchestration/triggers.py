"""Airflow triggers that wait for batches, the frontier, Delta commits and alerts.

They hold no task slot, and need neither a JVM nor a Spark session.

Rule 1: a poll takes a few milliseconds and runs in a thread; between two polls, no thread is in use.
Rule 2: a watcher persists its position and the rows not yet reported. After a restart it resumes
from there: an event may be repeated, but none is lost.
Rule 3: a watcher emits at most one event per ``least_s``. Later rows are part of its next event.
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
_SHOWN: Final = 20  # alerts in one event, besides their total count
_RECONNECT_S: Final = 30.0  # time without a broker until its address is read again
_DIGITS: Final = 20  # digits of the version in the file name of a commit


class Reaching(BaseTrigger):
    """Trigger that fires when a number is reached; subclasses define the number.

    Args:
        home: home folder of the installation.
        wanted: number to reach or exceed.
        until_s: end of the wait, epoch seconds.
        first_s: seconds before the first poll.
        every_s: seconds between two polls.
    """

    def __init__(self, *, home: str, wanted: int, until_s: float, first_s: float = 0.0, every_s: float = LOOK_S) -> None:
        super().__init__()
        self.home, self.wanted, self.until_s, self.first_s, self.every_s = home, wanted, until_s, first_s, every_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments of the trigger."""
        arguments = {"home": self.home, "wanted": self.wanted, "until_s": self.until_s}
        return f"{_HERE}.{type(self).__name__}", {**arguments, "first_s": self.first_s, "every_s": self.every_s}

    @staticmethod
    @abstractmethod
    def look(home: str) -> int | None:
        """Return the number that the job has reached; None if there is none yet."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until the number is reached or the wait ends.

        The single event is ``{"reached", "wanted", "at"}``.
        """
        await asyncio.sleep(self.first_s)
        while True:
            at = await asyncio.to_thread(self.look, self.home)
            if (reached := at is not None and at >= self.wanted) or time.time() >= self.until_s:
                yield TriggerEvent({"reached": reached, "wanted": self.wanted, "at": at})
                return
            await asyncio.sleep(self.every_s)


class StreamAtBatch(Reaching):
    """Trigger that fires when the stream has committed a batch."""

    @staticmethod
    def look(home: str) -> int | None:
        """Return the newest batch of the current generation; None before the first."""
        return batch_of(home)


class FrontierPast(Reaching):
    """Trigger that fires when the frontier passes an instant, in epoch milliseconds.

    All verdicts up to that event time have then been written, even with a jitter.
    """

    @staticmethod
    def look(home: str) -> int | None:
        """Return the event time up to which verdicts are complete; None if unknown."""
        return frontier_of(home)


class DeltaLogWatch(BaseEventTrigger):
    """Trigger that fires when rows are added to a Delta table, according to its log.

    Args:
        table: folder of the table.
        notes: folder of the watcher's position file.
        name: name of the watcher, part of the position file's name.
        home: home folder of the installation whose job's progress an event includes; empty for
            none.
        part: folder in the table whose files count, such as ``kind=late``; empty for all files.
        least_s: minimum number of seconds between two events.
        every_s: seconds between two polls.
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
        """Return the class path and the arguments of the trigger."""
        arguments = {"table": self.table, "notes": self.notes, "name": self.name, "home": self.home, "part": self.part}
        return f"{_HERE}.DeltaLogWatch", {**arguments, "least_s": self.least_s, "every_s": self.every_s}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll forever; yield events ``{"table", "from_version", "version", "rows"}``.

        An event covers the versions after ``from_version``. With a home it includes the job's
        progress, see `judged_of`.
        """
        note, table = Path(self.notes) / f"watch-{self.name}.json", Path(self.table)
        at = await asyncio.to_thread(_position, note)
        if at is None:
            newest = await asyncio.to_thread(_newest, table)  # rows from before the first watch do not count
            at = _Position(newest, newest, 0, 0.0)
            await asyncio.to_thread(_note, note, at)
        while True:  # read on even if no event may be emitted: a log keeps its versions for minutes only
            newest, rows = await asyncio.to_thread(_since, table, at.version, self.part)
            if newest != at.version:
                at = _Position(newest, at.from_version if at.rows or rows else newest, at.rows + rows, at.emitted_s)
                await asyncio.to_thread(_note, note, at)
            if at.rows and time.time() - at.emitted_s >= self.least_s:
                event = {"table": table.name, "from_version": at.from_version, "version": at.version, "rows": at.rows}
                judged = await asyncio.to_thread(judged_of, Path(self.home)) if self.home else {}
                yield TriggerEvent({**event, **judged})
                at = _Position(at.version, at.version, 0, time.time())
                await asyncio.to_thread(_note, note, at)
            await asyncio.sleep(self.every_s)


class AlertWatch(BaseEventTrigger):
    """Trigger that fires when a message is published on a topic of the home's broker.

    The broker queues messages while no trigger is connected.

    Args:
        home: home folder of the installation, with the broker's address and the secret client id of
            the session.
        topic: topic filter of the subscription.
        least_s: minimum number of seconds between two events.
        every_s: seconds between two polls, and between two attempts to connect.
    """

    def __init__(self, *, home: str, topic: str, least_s: float = 60.0, every_s: float = LOOK_S) -> None:
        super().__init__()
        self.home, self.topic, self.least_s, self.every_s = home, topic, least_s, every_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments of the trigger."""
        return f"{_HERE}.AlertWatch", {
            "home": self.home,
            "topic": self.topic,
            "least_s": self.least_s,
            "every_s": self.every_s,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Listen forever; yield events ``{"count": n, "alerts": [...]}``.

        ``alerts`` contains the newest few, each as ``{"topic", "payload"}``.
        """
        from fleetpulse.io.mqtt.alerts import AlertSubscription

        emitted_s, up_s = 0.0, time.monotonic()
        line: AlertSubscription | None = None
        try:
            while True:
                line = line or await asyncio.to_thread(_reach, self.home, self.topic)
                if line is not None:
                    await asyncio.to_thread(line.run_once, 0.1)
                if line is not None and line.waiting and time.time() - emitted_s >= self.least_s:
                    count = len(line.waiting)
                    shown = [{"topic": topic, "payload": payload} for topic, payload in line.newest(_SHOWN)]
                    yield TriggerEvent({"count": count, "alerts": shown})
                    emitted_s = time.time()
                    await asyncio.to_thread(line.acknowledge, count)
                up_s = time.monotonic() if line is None or line.up else up_s
                if line is not None and time.monotonic() - up_s > _RECONNECT_S:
                    line.close()  # the broker's address may have changed
                    line = None
                await asyncio.sleep(self.every_s)
        finally:
            if line is not None:
                line.close()


def judged_of(home: Path) -> dict[str, int]:
    """Return the progress of the lifecycle job; empty before its first batch.

    It is empty on read errors, too: an event must not fail because its progress is missing.

    Returns:
        ``batch``, and ``received_at_ms``: the watermark, up to which the job has judged (epoch
        milliseconds).
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
    """Return the newest batch of the current generation; None before the first."""
    from fleetpulse.io.checkpoints.checkpoint import judged_up_to
    from fleetpulse.io.home.home import Home

    reached = judged_up_to(Home(Path(home)).checkpoint)
    return reached[0] if reached else None


def frontier_of(home: str) -> int | None:
    """Return the event time (epoch milliseconds) up to which all verdicts are written.

    A jitter delays verdicts about silence, so this instant lies behind the frontier by the jitter.
    None before the first batch.
    """
    from fleetpulse.io.checkpoints.checkpoint import judged_up_to
    from fleetpulse.io.home.home import Home
    from fleetpulse.reports.frontiers import frontier_ms

    opened = Home(Path(home))
    reached = judged_up_to(opened.checkpoint)
    frontier = frontier_ms(opened, reached[1] if reached[1] > 1 else None) if reached else None
    return None if frontier is None else opened.deployment().emitted_through_ms(frontier)


class _Position(NamedTuple):
    """Position of a log watcher.

    Attributes:
        version: newest version that was read.
        from_version: newest version that an event has covered.
        rows: number of rows in the versions between, which no event has covered yet.
        emitted_s: time of the last event, epoch seconds.
    """

    version: int
    from_version: int
    rows: int
    emitted_s: float


def _position(note: Path) -> _Position | None:
    try:
        found = json.loads(note.read_text())
        version = int(found["version"])
        return _Position(version, int(found.get("from_version", version)), int(found.get("rows", 0)), float(found["emitted_s"]))
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
    """Return the newest version, and the number of rows added after version ``seen``.

    Each version that the log no longer contains counts as one row.
    """
    from fleetpulse.io.delta.log import actions_of, appended_files, row_count

    commits = _commits(table)
    newest = max(commits, default=-1)
    if newest < seen:  # the table was created again
        seen = -1
    versions = [version for version in commits if version > seen]
    rows = newest - seen - len(versions)
    for version in versions:
        try:
            appended = appended_files(actions_of(table / "_delta_log" / f"{version:0{_DIGITS}d}.json"))
        except FileNotFoundError:
            rows += 1
            continue
        rows += sum(row_count(added, unknown=1) for added in appended if added["path"].startswith(part))
    return newest, rows


def _reach(home: str, topic: str) -> Any:
    """Connect to the home's broker; return None if its address is unknown yet."""
    from fleetpulse.core.errors import FleetError
    from fleetpulse.io.home.home import Home
    from fleetpulse.io.mqtt.address import load_address
    from fleetpulse.io.mqtt.alerts import AlertSubscription

    opened = Home(Path(home))
    try:
        address = load_address(opened.run("broker"))
        return AlertSubscription(address, opened.session("alerts"), topic)
    except (FleetError, OSError):
        return None
