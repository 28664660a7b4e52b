"""Publisher: follow the table ``judgements``, and publish the mode of each device, retained.

Rule 1: a change is published at least once, in order. A position in the home names the newest
version that was published; it is written after the broker acknowledged all messages. A repeated
message has the same content.
Rule 2: the retained marker at the broker names the last version published. If the broker lost
messages, publishing continues from the marker. If the marker does not belong to the position, or the
log lacks a version, the modes of all devices are published again.
Rule 3: memory and rate are bounded: all devices are published in parts, and new verdicts after
each part.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Final, Protocol

import structlog

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.verdicts import MARKER, PresentMode, discovery_topic, messages
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import PUBLISHER, Home
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.status_connection import StatusConnection
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.process import StopSignal, write_status
from fleetpulse.reports.present.modes import changed_modes, device_count, present_modes

_LOG: Final = structlog.get_logger("publisher")
RATE_PER_S: Final = 2_000  # messages a second, at most: brokers store retained messages on the disk
PART_DEVICES: Final = 10_000  # published between two reads of the log, which keeps its versions for minutes only
_BURST_S: Final = 1.0  # burst after a pause: the messages of this many seconds may be sent at once
_CHUNK: Final = 200  # messages between two waits for their acknowledgements
_VERSIONS: Final = 100  # read at a time
_POLL_S: Final = 1.0
_PUMP_S: Final = 0.2  # at most, between two checks of the stop signal
_STATUS_S: Final = 1.0  # between two writes of the status
_RETRY_S: Final = 5.0
_NO_LONGER_READABLE: Final = ("table-version-missing", "file-damaged")  # the log or a file was cleaned up


class MessagePublisher(Protocol):
    """Publisher of messages to a broker, such as `Publisher`."""

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Send a message."""
        ...

    def flush(self) -> None:
        """Wait until the broker has acknowledged every message."""
        ...


@dataclass(frozen=True, slots=True)
class Position:
    """Position of the publisher.

    Attributes:
        version: newest version of ``judgements`` whose changes are published.
        marked: version in the marker at the broker; no version after it, up to ``version``, has a
            change.
        token: random id in the marker, renewed each time all devices have been published.
        prefix: prefix of discovery topics.
    """

    version: int
    marked: int
    token: str
    prefix: str

    def marker(self) -> bytes:
        """Return the payload of the retained marker: token and version."""
        return json.dumps({"token": self.token, "version": self.marked}).encode()

    def continues_after(self, marker: bytes | None) -> int | None:
        """Return the version after which to publish; None if the marker does not belong to this position."""
        try:
            content = json.loads(marker or b"{}")
            token, version = content["token"], int(content["version"])
        except (ValueError, KeyError, TypeError):
            return None
        if token != self.token or version > self.marked:
            return None
        return self.version if version == self.marked else version


def load_position(home: Home) -> Position | None:
    """Read the position of a home's publisher; None if there is none, or it is invalid."""
    try:
        content = json.loads(home.publisher_position.read_text())
        return Position(int(content["version"]), int(content["marked"]), str(content["token"]), str(content["prefix"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class VerdictPublisher:
    """Publisher of a home's verdicts over one connection.

    Args:
        home: home of the verdicts.
        broker: publisher of messages to the broker.
        prefix: prefix of discovery topics; empty for no discovery.
        marker: retained marker of the broker; None if it has none.
        pace: function that waits after a number of messages.
    """

    def __init__(
        self,
        home: Home,
        broker: MessagePublisher,
        prefix: str,
        marker: bytes | None,
        pace: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.home, self.broker, self.prefix = home, broker, prefix
        self.published = 0
        self._pace, self._marker = pace, marker
        self._log = DeltaLog(home.table(JUDGEMENTS.name))
        self._parts: Iterator[tuple[int, int]] | None = None  # parts of all devices that remain; None if all are published
        self._position = known = load_position(home)
        self._former_prefix = known.prefix if known is not None and known.prefix != prefix else ""
        self._version = -1
        after = known.continues_after(marker) if known is not None and known.prefix == prefix else None
        if after is None or after > self._log.latest():
            self._begin_all()
        else:
            self._version = after

    @property
    def is_complete(self) -> bool:
        """Whether the broker has the modes of all devices."""
        return self._parts is None

    @property
    def version(self) -> int:
        """Newest version of ``judgements`` whose changes are published."""
        return self._version

    def _begin_all(self) -> None:
        self._version = self._log.latest()
        parts = 1 + device_count(self.home) // PART_DEVICES
        self._parts = ((part, parts) for part in range(parts))

    def step(self) -> None:
        """Publish a part of all devices, if parts remain, and then the new changes.

        Changes are published after each part, because the part may have been read before them.
        """
        if self._parts is not None:
            if (part := next(self._parts, None)) is None:
                self._parts = None
                self._save(Position(self._version, self._version, secrets.token_hex(8), self.prefix))
            else:
                self._publish(present_modes(self.home, *part))
        try:
            self._follow()
        except FleetError as error:
            if error.code not in _NO_LONGER_READABLE:
                raise
            _LOG.warning("publishing all devices: a version of judgements is no longer readable", reason=str(error))
            self._begin_all()

    def _follow(self) -> None:
        latest = self._log.latest()
        if latest < self._version:
            self._begin_all()  # the table was created again
            return
        while self._version < latest:
            through = min(latest, self._version + _VERSIONS)
            has_changes = self._publish(changed_modes(self.home, self._log, self._version + 1, through)) > 0
            self._version = through
            if self._parts is None and (known := self._position) is not None:
                self._save(Position(through, through if has_changes else known.marked, known.token, known.prefix))

    def _publish(self, devices: Iterable[PresentMode]) -> int:
        """Publish the messages about devices, and wait until all are acknowledged; return their number."""
        before, waiting = self.published, self._messages(devices)
        while chunk := list(islice(waiting, _CHUNK)):
            for topic, payload in chunk:
                self.broker.publish(topic, payload, retain=True)
            self.broker.flush()
            self.published += len(chunk)
            self._pace(len(chunk))
        return self.published - before

    def _messages(self, devices: Iterable[PresentMode]) -> Iterator[tuple[str, bytes]]:
        for device in devices:
            if self._former_prefix and self._parts is not None:
                yield discovery_topic(self._former_prefix, device.device_id), b""
            yield from messages(device, self.prefix)

    def _save(self, position: Position) -> None:
        is_marked = position.marker() == self._marker
        self.home.publisher_position.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.home.publisher_position, json.dumps(asdict(position)), sync=not is_marked)
        self._position = position
        if not is_marked:
            self.broker.publish(MARKER, position.marker(), retain=True)
            self.broker.flush()
            self._marker = position.marker()


def run_publisher(home: Home, prefix: str, stop: StopSignal) -> None:
    """Publish the verdicts of a home until stopped; connect again if the connection is lost.

    Args:
        home: home of the verdicts.
        prefix: prefix of discovery topics; empty for no discovery.
        stop: signal to end.
    """
    while not stop.is_set():
        _write_status(home, "connecting")
        try:
            _publish_over_one_connection(home, prefix, stop)
        except (FleetError, OSError) as error:
            if stop.is_set():
                return
            _LOG.warning("verdicts are not published; retrying", reason=str(error))
            _write_status(home, "waiting", problem=str(error))
            stop.wait(_RETRY_S)


def _publish_over_one_connection(home: Home, prefix: str, stop: StopSignal) -> None:
    address = load_address(home.run("broker"))  # a broker that was started again may have another port
    connection = StatusConnection(address, home.session(PUBLISHER))
    with Publisher(address, "", cancelled=stop.is_set, connection=connection) as broker:
        marker = connection.await_marker(stop.is_set)
        publisher = VerdictPublisher(home, broker, prefix, marker, _Pace(broker, stop))
        is_online, reported_s = False, 0.0
        while not stop.is_set():
            publisher.step()
            if publisher.is_complete and not is_online:
                connection.publish_online()
                is_online = True
            if time.monotonic() - reported_s >= _STATUS_S:
                state = "live" if publisher.is_complete else "publishing all devices"
                _write_status(home, state, published=publisher.published, version=publisher.version)
                reported_s = time.monotonic()
            next_s = time.monotonic() + (_POLL_S if publisher.is_complete else 0.0)
            while not stop.is_set() and time.monotonic() < next_s:
                broker.pump(_PUMP_S)


class _Pace:
    """Limit of the rate of messages.

    Args:
        broker: publisher of messages; a wait serves its connection.
        stop: signal that ends a wait.
    """

    def __init__(self, broker: Publisher, stop: StopSignal) -> None:
        self._broker, self._stop = broker, stop
        self._next_s = 0.0

    def __call__(self, count: int) -> None:
        """Wait until the next message may be sent.

        Raises:
            FleetError: the process is stopped.
        """
        self._next_s = max(self._next_s, time.monotonic() - _BURST_S) + count / RATE_PER_S
        while (rest_s := self._next_s - time.monotonic()) > 0:
            if self._stop.is_set():
                raise FleetError("publishing was stopped; the next start continues", code="publisher-stopped")
            self._broker.pump(min(rest_s, _PUMP_S))


def _write_status(home: Home, state: str, *, problem: str | None = None, **facts: int) -> None:
    write_status(home.run(PUBLISHER), {"pid": os.getpid(), "state": state, "problem": problem, **facts})
