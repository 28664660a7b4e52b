"""The bridge: write MQTT messages to segments, and acknowledge those on disk.

`BridgeSequencer` contains the rules; this module does the I/O.

Rule 1: one thread. Every wait is bounded, so that the bridge stops within a second.
Rule 2: if memory or the disk is full, the bridge receives nothing, and the broker queues the
messages.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import structlog

from fleetpulse.core.messages.mapping import NO_MAPPINGS, Mappings
from fleetpulse.core.messages.sparkplug import STATE, host_state
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.rows import BRIDGE
from fleetpulse.io.ingest.leases import Lease, kept_sites, read_lease, write_lease
from fleetpulse.io.ingest.segments import (
    BridgeFencedError,
    bridge_position,
    commands_in,
    remove_leftovers,
    tail_of,
    write_segment,
)
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded_sessions import EmbeddedSessions
from fleetpulse.io.mqtt.subscriber import AckToken, Arrived, Presence, Receiver
from fleetpulse.io.system.fsync import is_disk_full
from fleetpulse.io.system.process import StopSignal, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from streaming.bridge.clock import SET_FORWARD, GuardedClock
from streaming.bridge.command_delivery import CommandChannel, CommandDelivery
from streaming.bridge.command_reader import DELIVERY, Spool
from streaming.bridge.device_quota import FILE, DeviceQuota
from streaming.bridge.rate_limit import RateLimiter
from streaming.bridge.sequencer import BridgeSequencer

_LOG: Final = structlog.get_logger("bridge")
REPLAY_TOPICS: Final = "replay/#"
POLL_S: Final = 0.05
GATHER_S: Final = 0.01  # batches sparse messages: a step costs as much as ten messages
FEW: Final = 200
RETRY_S: Final = 1.0
STATUS_S: Final = 0.5
RATE_REPORTS: Final = 20  # the rate covers ten seconds: a small fleet does not send in every half second
SILENT_CONNECTION_S: Final = 30.0  # connected and canaries sent, but nothing received: the connection is dead
ROWS_IN_MEMORY: Final = 50_000
SESSIONS: Final = "sessions.json"  # in the folder of the segments


class MessageSource(Protocol):
    """Source of messages, see `Receiver` for the contract."""

    problem: str | None
    cause: str
    connections: int

    @property
    def connected(self) -> bool:
        """Whether messages are being received."""
        ...

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return the messages that arrived."""
        ...

    def idle(self, timeout_s: float) -> None:
        """Wait without receiving messages (backpressure)."""
        ...

    def ack(self, tokens: Iterable[AckToken | None]) -> None:
        """Acknowledge messages."""
        ...

    def publish(self, topic: str, payload: bytes) -> bool:
        """Send a canary."""
        ...

    def reconnect(self, why: str, cause: str = "broker") -> None:
        """Reconnect, so that unacknowledged messages are redelivered."""
        ...

    def close(self, *, forget: bool = False) -> None:
        """Disconnect; with ``forget``, end the session at the broker."""
        ...


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """Settings of a bridge.

    Attributes:
        segments_dir: folder of its segments.
        commands_dir: spool of operators' commands; None for a bridge that takes none.
        status_path: path of its status file.
        address: address of the broker.
        session: client id of its session at the broker, see `Home.session`; with the embedded broker,
            the secret from which the client ids of its sessions are derived.
        replay_session: client id of the session for history.
        bridge: name of the bridge.
        replay: whether it replays history first: it receives only ``replay/#`` until the end line
            of a recording is durable.
        live_after_replay: whether it goes live after that.
        embedded: whether the broker is the embedded one, at which each topic filter has a session, see
            `EmbeddedSessions`.
        subscriptions: topic filters when live.
        sparkplug_host: id of the Sparkplug host application; empty for none.
        sites: sites of a further bridge; empty for the bridge that takes all other sites.
        takes_foreign: whether it takes topics of other formats, whose messages may be of any site.
        mappings: mappings of the home, which find the sender of a topic of another format, and the
            number of rows of a message.
        others: segment folders of the other bridges by name; if there are any, the bridge writes a
            lease.
        source_factory: factory of a message source other than the broker; sessions, subscriptions and sites
            are then not used.
        canary_key: key that signs canaries, see `Home.canary_key`. The default is a random key: the
            bridge then does not recognise canaries of its earlier processes.
        canary_interval_s: seconds between two canaries.
        reconnect_grace_s: seconds after a coverage gap in which devices may still be reconnecting.
        holds_back: whether verdicts are delayed by a jitter.
        flood_limit: rows per second that the messages of a device may make in the long run; 0 for no
            limit.
        flood_bytes: bytes of payloads per second that a device may send in the long run; 0 for no
            limit.
        max_new_devices: number of new devices per hour that it accepts; 0 for no limit.
        identity: identity scheme of devices.
        flush_interval_s: longest time that a message waits for its segment.
        max_rows: number of rows at which a segment is written at once.
        max_buffer_bytes: bytes at which a segment is written at once; with more bytes, nothing is
            received.
    """

    segments_dir: Path
    commands_dir: Path | None
    status_path: Path
    address: BrokerAddress
    session: str
    replay_session: str = ""
    bridge: str = BRIDGE
    replay: bool = False
    live_after_replay: bool = True
    embedded: bool = False
    subscriptions: tuple[str, ...] = ("fleet/#",)
    sparkplug_host: str = ""
    sites: tuple[str, ...] = ()
    takes_foreign: bool = False
    mappings: Mappings = NO_MAPPINGS
    others: Mapping[str, Path] = field(default_factory=dict[str, Path])
    source_factory: Callable[[], MessageSource] | None = None
    canary_key: bytes = field(default_factory=secrets.token_bytes, repr=False)
    canary_interval_s: float = 5.0
    reconnect_grace_s: float = 120.0
    holds_back: bool = False
    flood_limit: int = 0
    flood_bytes: int = 0
    max_new_devices: int = 0
    identity: DeviceIdentity = DeviceIdentity.ID
    flush_interval_s: float = 0.25
    max_rows: int = 5_000
    max_buffer_bytes: int = 64 * 1024 * 1024


class Bridge:
    """One bridge: call `step` repeatedly, and `close` at the end."""

    def __init__(self, settings: BridgeSettings) -> None:
        self.settings = settings
        settings.segments_dir.mkdir(parents=True, exist_ok=True)
        settings.status_path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(settings.segments_dir)
        self.quota = DeviceQuota(settings.max_new_devices, settings.segments_dir / FILE, settings.identity)
        self._restore_position()
        self.rows = 0
        self.problem: str | None = None
        self._wall = GuardedClock()
        self._was_up = False
        self._connections = 0
        self._flush_at_s = 0.0
        self._canary_at_s = 0.0
        self._heard_s = time.monotonic()
        self._report_at_s = 0.0
        self._has_session = False  # the broker has a session that queues messages for this bridge's sites
        self._reported: deque[tuple[float, int]] = deque(maxlen=RATE_REPORTS)
        self.receiver = self._receiver()

    def _restore_position(self) -> None:
        """Restore the position from the newest segment."""
        settings = self.settings
        position = bridge_position(settings.segments_dir)
        self.number, self._tail = (position.number, position.tail) if position else (0, None)
        fenced = position is not None and position.fence
        own_number = self.number - 1 if fenced else self.number
        named = None if position is None or fenced else commands_in(settings.segments_dir, own_number)
        self.spool = Spool(settings.commands_dir, own_number, named) if settings.commands_dir else None
        self.delivery = CommandDelivery(settings.commands_dir / DELIVERY) if settings.commands_dir else None
        self.intake = BridgeSequencer(
            settings.bridge,
            position,
            grace_ms=int(settings.reconnect_grace_s * 1000),
            interval_ms=int(settings.canary_interval_s * 1000),
            secret=settings.canary_key,
            holds_back=settings.holds_back,
            floods=RateLimiter(settings.flood_limit, settings.identity, settings.flood_bytes, settings.mappings),
            quota=self.quota,
            others=frozenset(settings.others),
            sites=frozenset(settings.sites),
            takes_foreign=settings.takes_foreign,
            mappings=settings.mappings,
            takes_commands=settings.commands_dir is not None,
        )
        lease = read_lease(settings.segments_dir) if settings.others else None
        self.intake.promised_ms = lease.through_ms if lease else None

    def _receiver(self) -> MessageSource:
        settings = self.settings
        if not settings.replay or (self.intake.history.done and settings.live_after_replay):
            return self._listen()
        return Receiver(settings.address, settings.replay_session, (REPLAY_TOPICS,))

    def _listen(self) -> MessageSource:
        """Go live in a persistent session, for which the broker has queued messages."""
        self.intake.go_live(self._wall.now_ms())
        self._was_up, self._connections = False, 0
        settings = self.settings
        if settings.source_factory:
            return settings.source_factory()
        presence = partial(_host_state, settings.sparkplug_host) if settings.sparkplug_host else None
        session = settings.address, settings.session, settings.subscriptions
        if settings.embedded:
            return EmbeddedSessions(*session, settings.segments_dir / SESSIONS, presence=presence)
        return Receiver(*session, presence=presence)

    @property
    def state(self) -> str:
        """State of the bridge: ``starting``, ``replaying``, ``played`` or ``live``."""
        if self.intake.live:
            return "live"
        if self.intake.history.done:
            return "played"
        return "replaying" if self._was_up else "starting"

    def step(self) -> None:
        """Receive, write and acknowledge messages once; quick unless the disk is slow."""
        self._wall.now_ms()
        if self._wall.doubted or self._is_full():
            self.receiver.idle(POLL_S)
        else:
            arrived = self.receiver.poll(POLL_S)
            self._notice_loss()
            now_ms = self._wall.now_ms()
            self._notice_silence(now_ms)  # before messages are taken that queued up while this process was suspended
            self.intake.arrived_together(arrived, now_ms)
            if arrived:
                self._heard_s = time.monotonic()
                if len(arrived) < FEW:
                    time.sleep(GATHER_S)
        if self.intake.live and not self._wall.doubted:
            self._publish_canary()
        self._flush_if_due()
        self._deliver_commands()
        self._maybe_listen()
        if time.monotonic() - self._report_at_s > STATUS_S:
            self.report()

    def _is_full(self) -> bool:
        waiting, commands = self.intake.buffer, self.intake.program_commands
        size_bytes = waiting.size_bytes + commands.size_bytes
        return size_bytes > self.settings.max_buffer_bytes or len(waiting) + len(commands) > ROWS_IN_MEMORY

    def _notice_loss(self) -> None:
        up, connections = self.receiver.connected, self.receiver.connections
        if (self._was_up and not up) or (self._connections and connections > self._connections):
            if self._was_up:
                _LOG.warning("connection to the broker lost", why=self.receiver.problem)
            self.intake.lost(self._wall.now_ms(), self.receiver.cause)
        if up and not self._was_up:
            _LOG.info("connected", broker=str(self.receiver), connection=connections)
            self._canary_at_s, self._heard_s = 0.0, time.monotonic()
        self._was_up, self._connections = up, connections
        if self.intake.history.missing and up:
            self.receiver.reconnect("a line of history is missing; reconnecting for redelivery")

    def _notice_silence(self, now_ms: int) -> None:
        if self.intake.overdue(now_ms) and not self.intake.gap_open:
            self.intake.open_gap(now_ms, "disk" if self.problem else "broker")
            if self.intake.gap_open:  # a bridge that never listened has no gap to open
                _LOG.warning("no canary came back in time; coverage gap opened")

    def _publish_canary(self) -> None:
        now_s = time.monotonic()
        self._notice_silence(self._wall.now_ms())
        if not self.receiver.connected:
            return
        if now_s >= self._canary_at_s:
            self._canary_at_s = now_s + self.settings.canary_interval_s
            self.receiver.publish(self.intake.canary_topic, self.intake.canary(self._wall.now_ms()))
        if now_s - self._heard_s > max(SILENT_CONNECTION_S, 3 * self.settings.canary_interval_s) and not self._is_full():
            self._heard_s = now_s
            self.receiver.reconnect("nothing received for too long", "network")

    def _flush_if_due(self) -> None:
        waiting, now_s = self.intake.buffer, time.monotonic()
        large = len(waiting) >= self.settings.max_rows or waiting.size_bytes > self.settings.max_buffer_bytes
        if now_s >= self._flush_at_s or (large and self.problem is None):
            self._flush_at_s = now_s + (self.settings.flush_interval_s if self.flush() else RETRY_S)

    def flush(self) -> bool:
        """Write the buffered rows as a segment and acknowledge them.

        Returns:
            False if the disk refused the segment.
        """
        try:
            if self.intake.live and self.spool and not self._wall.doubted:
                self.intake.buffer.passed += self.intake.program_commands.save(self.spool.folder, self._wall.now_ms())
                for name, topic, payload in self.spool.take(self.number + 1):
                    self.intake.command(name, topic, payload, self._wall.now_ms())
            if self.intake.buffer:
                self._write()
        except BridgeFencedError as error:
            self._reconnect_after_fence(str(error))
            return True
        except OSError as error:
            problem = "disk full" if is_disk_full(error) else f"cannot write: {error.strerror}"
            if problem != self.problem:
                _LOG.error("cannot write a segment; no message is acknowledged until it is written", problem=problem)
            self.problem = problem
            return False
        self.problem = None
        self.receiver.ack(self.intake.written())
        if self.settings.others:
            self._renew_lease()
        return True

    def _write(self) -> None:
        table = self.intake.buffer.table()
        if self.spool:
            self.spool.sync()
        self.quota.save()
        write_segment(
            self.settings.segments_dir,
            self.number + 1,
            table,
            bridge=self.settings.bridge,
            last_canary_ms=self.intake.last_canary_ms,
            gap_open=self.intake.gap_open,
            played=self.intake.history.played,
            shared=self.intake.shared,
            left_open=self.intake.history.left_open,
            gap_rows=self.intake.history.gap_rows_at(self.intake.last_ms or 0),
            tail=self._tail,
        )
        self.number, self._tail = self.number + 1, tail_of(table, self._tail)
        self.rows += table.num_rows
        if self.spool and self.spool.written() and self.delivery:
            self.delivery.added()

    def _deliver_commands(self) -> None:
        if self.delivery and self.intake.live and isinstance(self.receiver, CommandChannel):
            if self.spool and self.spool.finish():
                self.delivery.added()
            self.delivery.step(self.receiver, time.monotonic())

    def _reconnect_after_fence(self, why: str) -> None:
        """Reconnect after landing fenced this bridge.

        The broker redelivers the messages that were not written; they follow the fence segment.
        """
        _LOG.warning("fenced by landing after a missed lease; reconnecting behind the fence", why=why)
        self.receiver.close()
        self._restore_position()
        self.receiver = self._receiver()

    def _renew_lease(self, *, stopped: bool = False) -> None:
        """Renew the lease, and hand sites over to the other bridges that serve them."""
        self._has_session |= self.receiver.connected
        if not self.settings.sites and not self.settings.source_factory:
            self.intake.share(kept_sites(self.settings.others.values()))
        self.intake.promise(self._wall.now_ms())
        through_ms = self.intake.promised_ms
        if through_ms is not None:
            sites = self.settings.sites if self._has_session else ()
            write_lease(self.settings.segments_dir, Lease(through_ms, wall_clock_ms(), sites, stopped))

    def _maybe_listen(self) -> None:
        done = not self.intake.live and self.intake.history.done and not self.intake.buffer
        if done and self.settings.live_after_replay:
            self.receiver.close(forget=True)
            self.receiver = self._listen()
            _LOG.info("history is complete; going live")

    def report(self) -> None:
        """Write the status file."""
        now_s, intake = time.monotonic(), self.intake
        self._reported.append((now_s, self.rows))
        since_s, since_rows = self._reported[0]
        rate = (self.rows - since_rows) / (now_s - since_s) if now_s > since_s else 0.0
        self._report_at_s = now_s
        recording = intake.history.recording if not intake.live else None
        status = {
            "pid": os.getpid(),
            "state": self.state,
            "connected": self.receiver.connected,
            "subscribed": self.receiver.connected,
            "rows": self.rows,
            "rate_per_s": round(rate, 1),
            "segment": self.number,
            "received_at_ms": intake.last_ms,
            "recording": recording,
            "line": intake.history.line if recording is not None and intake.history.line >= 0 else None,
            "held": intake.history.held,
            "gap_open": intake.gap_open,
            "last_canary_ms": intake.last_canary_ms,
            **intake.counts,
            "rejection": intake.rejection,
            "problem": self.problem or (SET_FORWARD if self._wall.doubted else self.receiver.problem),
        }
        write_status(self.settings.status_path, status)

    def close(self) -> None:
        """Write and acknowledge the buffered rows, and disconnect; the session persists."""
        self.intake.stopping()
        self.flush()
        self.receiver.close()
        if self.settings.others:
            self._renew_lease(stopped=True)
        self.report()


def _host_state(host: str) -> Presence:
    """Return the state messages of a Sparkplug host application, see `host_state`."""
    at_ms = wall_clock_ms()
    return Presence(f"{STATE}{host}", host_state(at_ms, online=True), host_state(at_ms, online=False))


def run_bridge(settings: BridgeSettings, stop: StopSignal) -> None:
    """Run a bridge until stopped.

    Raises:
        FleetError: the newest segment cannot be read.
    """
    bridge = Bridge(settings)
    _LOG.info("bridge", state=bridge.state, segment=bridge.number)
    try:
        while not stop.is_set():
            bridge.step()
    finally:
        bridge.close()
        _LOG.info("bridge stopped", segment=bridge.number, rows=bridge.rows)
