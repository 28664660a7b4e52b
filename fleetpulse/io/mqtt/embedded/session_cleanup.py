"""Removal of abandoned sessions of the embedded broker.

NATS keeps a persistent session until its client requests a clean one, with a queue for each of its
filters. All clients share one limit of queues, and each queue makes each message costlier. So a client
that connects with many client ids could lock others out.

Rule 1: a session is removed only while its client is disconnected, and never if it belongs to fleetpulse.
Rule 2: a session without filters is removed, since it has no messages. Of the sessions of a device, the
`OF_DEVICE` newest remain; of those of all watchers and operators, the `OF_OTHERS` newest.
Rule 3: while the store of messages is more than half full, all sessions of disconnected watchers and
operators are removed. They keep every message, even after the bridge has read it, and would fill the store
until no device could publish.
Rule 4: if the store of retained messages is too full, some are removed, see `retained_cleanup`.
"""

import base64
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.messages.sparkplug import COMMANDS
from fleetpulse.core.presence.identities import DeviceIdentity, joined
from fleetpulse.core.rows import Kind
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi, broker_api
from fleetpulse.io.mqtt.embedded.retained_cleanup import RetainedCleaner
from fleetpulse.io.mqtt.embedded_sessions import session_prefix

OF_DEVICE: Final = 8  # disconnected sessions of a device that remain
OF_OTHERS: Final = 100
PERIOD_S: Final = 5.0
_MOST_RECORDS: Final = 20_000  # records read in one cycle
_MOST_REMOVALS: Final = 100  # in one cycle; after so many, the next cycle follows at once
_AT_ONCE: Final = 4  # concurrent removals; each waits for the disk
_SESSIONS: Final = "$MQTT_sess"
_MESSAGES: Final = "$MQTT_msgs"
_MISSING: Final = 404
_OTHERS: Final = ""
_SPARKPLUG: Final = "spBv1//0"  # NATS writes a dot as two slashes


@dataclass(frozen=True, slots=True)
class Session:
    """Session that the broker keeps.

    Attributes:
        client_id: its MQTT client id.
        sequence: number of its record; a session that connects again gets a greater one.
        owner: device or edge node whose commands it receives; empty for others; None without filters.
    """

    client_id: str
    sequence: int
    owner: str | None

    @classmethod
    def parse(cls, record: Mapping[str, Any], identity: DeviceIdentity) -> "Session":
        """Parse a record of NATS, a message of the stream `_SESSIONS`, by the identity scheme of devices."""
        content = json.loads(base64.b64decode(record["data"]))
        subjects: Collection[str] = content.get("subs") or ()
        owners = sorted(owner for owner in (_owner(subject, identity) for subject in subjects) if owner)
        return cls(str(content["id"]), int(record["seq"]), owners[0] if owners else _OTHERS if subjects else None)


def _owner(subject: str, identity: DeviceIdentity) -> str:
    """Return the device or edge node whose commands have a NATS subject; empty for any other subject."""
    levels = subject.split(".")
    if len(levels) == 4 and levels[0] == "fleet" and levels[3] == Kind.CONTROL.value:
        return joined(levels[1], levels[2]) if identity is DeviceIdentity.SITE_AND_ID else levels[2]
    if len(levels) > 3 and levels[0] == _SPARKPLUG and levels[2] in COMMANDS:
        return f"{levels[1]}/{levels[3]}"
    return _OTHERS


class Sessions:
    """Sessions that the broker keeps, by client id."""

    def __init__(self) -> None:
        self.read_through = 0  # sequence of the newest record that was read
        self._known: dict[str, Session] = {}

    def add(self, session: Session) -> None:
        """Add a session, or replace its earlier record."""
        self._known.pop(session.client_id, None)
        self._known[session.client_id] = session
        self.read_through = session.sequence

    def forget(self, session: Session) -> None:
        """Forget a session that the broker no longer keeps."""
        self._known.pop(session.client_id, None)

    def abandoned(self, connected: Collection[str], own: tuple[str, ...], *, crowded: bool = False) -> list[Session]:
        """Return the sessions to remove; those that keep all messages come first, as they slow down removals.

        Args:
            connected: client ids of all connections.
            own: beginnings of the client ids of fleetpulse's own sessions.
            crowded: whether the store of messages is more than half full.
        """
        kept, found = dict[str, int](), list[Session]()
        others = (one for one in reversed(self._known.values()) if not one.client_id.startswith(own))
        away = (one for one in others if one.client_id not in connected)
        for one in away:
            if one.owner is not None:
                kept[one.owner] = kept.get(one.owner, 0) + 1
                most = OF_DEVICE if one.owner else 0 if crowded else OF_OTHERS
                if kept[one.owner] <= most:
                    continue
            found.append(one)
        return sorted(found, key=lambda one: (one.owner != _OTHERS, one.sequence))


class SessionCleaner:
    """Thread that removes abandoned sessions of a running broker, and retained messages if their store fills up.

    Args:
        folder: folder of the broker; its files ``*.session`` have the client ids of fleetpulse's own
            sessions, or the secrets from which those are derived (`session_prefix`).
        pid: process id of the server.
        address: address with the broker's own user and password.
        end_session: function that connects with a client id and a clean session, which ends the session.
        identity: identity scheme of devices.
    """

    def __init__(
        self,
        folder: Path,
        pid: int,
        address: BrokerAddress,
        end_session: Callable[[str], None],
        identity: DeviceIdentity = DeviceIdentity.ID,
    ) -> None:
        self._folder, self._pid, self._address, self._end_session = folder, pid, address, end_session
        self._identity = identity
        self._sessions, self._retained = Sessions(), RetainedCleaner()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; wait up to `PERIOD_S` seconds for a removal that is under way."""
        self._stopped.set()
        self._thread.join(PERIOD_S)

    def _run(self) -> None:
        pause_s = PERIOD_S
        while not self._stopped.wait(pause_s):
            pause_s = PERIOD_S
            with suppress(OSError, ValueError, KeyError):  # the next cycle tries again
                if self.clean() >= _MOST_REMOVALS:
                    pause_s = 0.0

    def clean(self) -> int:
        """Remove abandoned sessions, and retained messages if their store fills up; return the total number.

        Raises:
            OSError: the server cannot be reached.
            ValueError: the server refused a request.
        """
        with broker_api(self._folder, self._pid, self._address) as ask, ThreadPoolExecutor(_AT_ONCE) as pool:
            for session in _new_sessions(ask, self._sessions.read_through + 1, self._identity):
                self._sessions.add(session)
            connected = {one["mqtt_client"] for one in ask.connections() if one.get("mqtt_client")}
            own = own_sessions(self._folder)
            listed = self._sessions.abandoned(connected, own, crowded=ask.use_of(_MESSAGES).is_crowded)[:_MOST_REMOVALS]
            exist = {one for one in listed if _record(ask, {"seq": one.sequence}) is not None}  # others ended, or connected again
            removals = {one: pool.submit(self._end_session, one.client_id) for one in listed if one in exist}
            for session in listed:
                if session in removals:
                    removals[session].result()
                self._sessions.forget(session)
            return len(listed) + self._retained.clean(ask)


def own_sessions(folder: Path) -> tuple[str, ...]:
    """Return the beginnings of the client ids of fleetpulse's own sessions, from files in a broker's folder."""
    secrets = [path.read_text() for path in folder.glob("*.session")]
    return (*secrets, *map(session_prefix, secrets))


def _new_sessions(ask: BrokerApi, sequence: int, identity: DeviceIdentity) -> Iterator[Session]:
    for _ in range(_MOST_RECORDS):
        record = _record(ask, {"seq": sequence, "next_by_subj": "$MQTT.sess.>"})
        if record is None:
            return
        session = Session.parse(record, identity)
        sequence = session.sequence + 1
        yield session


def _record(ask: BrokerApi, which: Mapping[str, Any]) -> dict[str, Any] | None:
    answer = ask(f"$JS.API.STREAM.MSG.GET.{_SESSIONS}", which)
    if error := answer.get("error"):
        if error.get("code") == _MISSING:
            return None
        raise ValueError(error["description"])
    return answer["message"]
