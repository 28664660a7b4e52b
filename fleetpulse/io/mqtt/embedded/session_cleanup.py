"""Removal of abandoned and lagging sessions of the embedded broker.

NATS keeps a persistent session until its client requests a clean one, with a queue for each of its
filters. All clients share one limit of queues, and each queue makes each message costlier. So a client
that connects with many client ids could lock others out.

Rule 1: a session is removed only while its client is disconnected, except by rule 4, and never if it belongs
to fleetpulse.
Rule 2: a session without filters is removed, since it has no messages. Of the sessions of a device, the
`OF_DEVICE` newest remain; of those of all watchers and operators, the `OF_OTHERS` newest.
Rule 3: while the store of messages is more than half full, all sessions of disconnected watchers and
operators are removed. They keep every message, even after the bridge has read it, and would fill the store
until no device could publish.
Rule 4: while the store of messages is more than half full, a session of a connected watcher or operator is
removed if more than `LEAST_LAG` of the messages wait for it. A clean session with its client id replaces it and
closes its connection. Otherwise one watcher that never acknowledges would fill the store. A session of a
device is never removed while it is connected: it gets only the messages that others send to the device.
Rule 5: if the store of retained messages is too full, some are removed, see `retained_cleanup`.
"""

import base64
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.sparkplug import COMMANDS
from fleetpulse.core.presence.identities import DeviceIdentity, joined
from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.commands import COMMAND
from fleetpulse.io.mqtt.acl import Role, grants
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi, broker_api
from fleetpulse.io.mqtt.embedded.retained_cleanup import RetainedCleaner
from fleetpulse.io.mqtt.embedded_sessions import session_prefix

OF_DEVICE: Final = 8  # disconnected sessions of a device that remain
OF_OTHERS: Final = 100
LEAST_LAG: Final = 0.01  # least share of the stored messages that wait for a session that is removed while connected
PERIOD_S: Final = 5.0
_MOST_RECORDS: Final = 20_000  # records read in one cycle
_MOST_REMOVALS: Final = 100  # in one cycle; after so many, the next cycle follows at once
_AT_ONCE: Final = 4  # concurrent removals; each waits for the disk
_SESSIONS: Final = "$MQTT_sess"
_MESSAGES: Final = "$MQTT_msgs"
_MISSING: Final = 404
_OTHERS: Final = ""
_SPARKPLUG: Final = "spBv1//0"  # NATS writes a dot as two slashes
_HOST: Final = "STATE"  # second level of the topics of a Sparkplug host, which only edge nodes may read


@dataclass(frozen=True, slots=True)
class Session:
    """Session that the broker keeps.

    Attributes:
        client_id: its MQTT client id.
        sequence: number of its record; a session that connects again gets a greater one.
        owner: device or edge node whose commands it receives; empty if it also receives other messages;
            None without filters.
    """

    client_id: str
    sequence: int
    owner: str | None

    @classmethod
    def parse(cls, record: Mapping[str, Any], identity: DeviceIdentity) -> "Session":
        """Parse a record of NATS, a message of the stream `_SESSIONS`, by the identity scheme of devices."""
        content = _content(record)
        subjects: Collection[str] = content.get("subs") or ()
        owners = [one for one in (_owner(subject, identity) for subject in subjects) if one is not None]
        owner = min(owners, default=_OTHERS) if subjects else None  # `_OTHERS` is less than any other
        return cls(str(content["id"]), int(record["seq"]), owner)


def _content(record: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(base64.b64decode(record["data"]))


def _owner(subject: str, identity: DeviceIdentity) -> str | None:
    """Return the device or edge node whose commands have a NATS subject.

    Returns:
        Device or edge node; None for the state of a Sparkplug host; `_OTHERS` for any other subject.
    """
    levels = subject.split(".")
    if len(levels) == 4 and levels[0] == "fleet" and levels[3] in (Kind.CONTROL.value, COMMAND):
        return joined(levels[1], levels[2]) if identity is DeviceIdentity.SITE_AND_ID else levels[2]
    if len(levels) > 3 and levels[0] == _SPARKPLUG and levels[2] in COMMANDS:
        return f"{levels[1]}/{levels[3]}"
    return None if levels[:2] == [_SPARKPLUG, _HOST] else _OTHERS


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

    def connected(self, users: Mapping[str, str], readers: Collection[str], own: tuple[str, ...]) -> list[Session]:
        """Return the sessions of connected watchers and operators.

        Args:
            users: user of each connection, by client id.
            readers: users that are watchers or operators.
            own: beginnings of the client ids of fleetpulse's own sessions.
        """
        known = (self._known[one] for one, user in users.items() if user in readers and one in self._known)
        return [one for one in known if not one.client_id.startswith(own)]


class SessionCleaner:
    """Thread that removes abandoned and lagging sessions of a running broker, and retained messages if their store fills up.

    Args:
        folder: folder of the broker; its files ``*.session`` have the client ids of fleetpulse's own
            sessions, or the secrets from which those are derived (`session_prefix`).
        pid: process id of the server.
        address: address with the broker's own user and password.
        end_session: function that connects with a client id and a clean session, which ends the session. It
            returns whether the broker accepted the connection.
        identity: identity scheme of devices.
    """

    def __init__(
        self,
        folder: Path,
        pid: int,
        address: BrokerAddress,
        end_session: Callable[[str], bool],
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
        """Remove abandoned and lagging sessions, and retained messages if their store fills up; return the total number.

        Raises:
            OSError: the server cannot be reached.
            ValueError: the server refused a request.
        """
        with broker_api(self._folder, self._pid, self._address) as ask, ThreadPoolExecutor(_AT_ONCE) as pool:
            for session in _new_sessions(ask, self._sessions.read_through + 1, self._identity):
                self._sessions.add(session)
            users = {one["mqtt_client"]: one.get("authorized_user", "") for one in ask.connections() if one.get("mqtt_client")}
            own, store = own_sessions(self._folder), ask.use_of(_MESSAGES)
            listed = self._sessions.abandoned(users, own, crowded=store.is_crowded)
            if store.is_crowded:
                known = self._sessions.connected(users, readers(self._folder), own)
                listed = [*lagging(ask, known, LEAST_LAG * store.messages), *listed]
            listed = listed[:_MOST_REMOVALS]
            exist = {one for one in listed if _record(ask, {"seq": one.sequence}) is not None}  # others ended, or connected again
            removals = {one: pool.submit(self._end_session, one.client_id) for one in listed if one in exist}
            for session in listed:
                if session not in removals or removals[session].result():
                    self._sessions.forget(session)
            return len(listed) + self._retained.clean(ask)


def own_sessions(folder: Path) -> tuple[str, ...]:
    """Return the beginnings of the client ids of fleetpulse's own sessions, from files in a broker's folder."""
    secrets = [path.read_text() for path in folder.glob("*.session")]
    return (*secrets, *map(session_prefix, secrets))


def readers(folder: Path) -> set[str]:
    """Return the logins of all watchers and operators, from the access grants in a broker's folder."""
    try:
        return {one.login for one in grants(folder) if one.role is not Role.DEVICE}
    except FleetError:
        return set()


def lagging(ask: BrokerApi, sessions: Iterable[Session], most: float) -> Iterator[Session]:
    """Yield the sessions for which more than ``most`` messages wait.

    A message waits until the client has acknowledged it. It counts once for each queue of the session.
    """
    for session in sessions:
        record = _record(ask, {"seq": session.sequence})
        queues = {} if record is None else _content(record).get("cons") or {}
        found = (ask(f"$JS.API.CONSUMER.INFO.{_MESSAGES}.{one['durable_name']}", {}) for one in queues.values())
        if sum(int(one.get("num_pending", 0)) + int(one.get("num_ack_pending", 0)) for one in found) > most:
            yield session


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
