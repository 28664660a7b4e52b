"""The bridge: from the broker to segments, with an acknowledgement for what is on the disk. The rules are `BridgeSequencer`'s.

Rule 1: one thread; every wait is bounded, so that it stops within a second.
Rule 2: when memory or the disk is full it takes nothing in, and the broker keeps what comes.
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

from fleetpulse.core.messages.sparkplug import STATE, host_state
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.rows import BRIDGE
from fleetpulse.io.ingest.leases import Lease, kept_sites, read_lease, write_lease
from fleetpulse.io.ingest.segments import SegmentTakenError, commands_in, position, remove_leftovers, tail_of, write_segment
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived, Presence, Receiver, Token
from fleetpulse.io.system.fsync import no_room
from fleetpulse.io.system.process import Stop, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from streaming.bridge.clock import SET_FORWARD, GuardedClock
from streaming.bridge.command_reader import Spool
from streaming.bridge.rate_limit import RateLimiter
from streaming.bridge.sequencer import BridgeSequencer

_LOG: Final = structlog.get_logger("bridge")
HISTORY: Final = "replay/#"
POLL_S: Final = 0.05
GATHER_S: Final = 0.01  # what trickles in is taken in together: a step costs as much as ten messages
FEW: Final = 200
RETRY_S: Final = 1.0
STATUS_S: Final = 0.5
RATE_REPORTS: Final = 20  # the rate is that of ten seconds: a hundred devices send in some half seconds, and not in others
DEAF_S: Final = 30.0  # connected, our canaries sent, and nothing at all heard: the connection is dead
ROWS_IN_MEMORY: Final = 50_000


class MessageSource(Protocol):
    """Where messages come from: `Receiver` says what each of these does."""

    problem: str | None
    cause: str
    connections: int

    @property
    def connected(self) -> bool:
        """Whether messages reach us."""
        ...

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return what arrived."""
        ...

    def idle(self, timeout_s: float) -> None:
        """Take nothing in."""
        ...

    def ack(self, tokens: Iterable[Token | None]) -> None:
        """Acknowledge messages."""
        ...

    def publish(self, topic: str, payload: bytes) -> bool:
        """Send a canary."""
        ...

    def reconnect(self, why: str, cause: str = "broker") -> None:
        """Begin anew with what was not acknowledged."""
        ...

    def close(self, *, forget: bool = False) -> None:
        """Take leave."""
        ...


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """How a bridge works.

    Attributes:
        segments_dir: where its segments go.
        commands_dir: the spool of operators' commands; None for a bridge that takes none.
        status_path: its status file.
        address: the broker.
        session: client id of its session at the broker, see `Home.session`.
        replay_session: client id of the session in which it takes history.
        bridge: its name.
        replay: started for history: takes ``replay/#`` and nothing else until the line after its last is durable.
        live_after_replay: then goes live.
        subscriptions: topics that it takes when live.
        sparkplug_host: the id under which we are a host application of Sparkplug; empty for none.
        sites: the sites whose messages it takes where it is a further bridge; none where it takes the rest.
        takes_foreign: whether it takes topics of other formats, whose messages may be of any site.
        others: the segments' folders of the other bridges, by name; where there are any it says how far it is.
        line: makes what it receives by where that is not the broker: sessions, subscriptions and sites are not used then.
        canary_interval_s: a canary each so many seconds.
        reconnect_grace_s: how long after a return devices may still be on their way back.
        holds_back: whether verdicts are held back by a jitter.
        flood_limit: messages a second that a device may send in the long run; 0 for as many as it likes.
        identity: what identifies a device.
        flush_interval_s: the longest that a message waits for its segment.
        max_rows: rows at which a segment is written at once.
        max_buffer_bytes: bytes at which it is written at once, and above which nothing more is taken in.
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
    subscriptions: tuple[str, ...] = ("fleet/#",)
    sparkplug_host: str = ""
    sites: tuple[str, ...] = ()
    takes_foreign: bool = False
    others: Mapping[str, Path] = field(default_factory=dict[str, Path])
    line: Callable[[], MessageSource] | None = None
    canary_interval_s: float = 5.0
    reconnect_grace_s: float = 120.0
    holds_back: bool = False
    flood_limit: int = 0
    identity: DeviceIdentity = DeviceIdentity.ID
    flush_interval_s: float = 0.25
    max_rows: int = 5_000
    max_buffer_bytes: int = 64 * 1024 * 1024


class Bridge:
    """One bridge: call `step` until it is to stop, then `close`."""

    def __init__(self, settings: BridgeSettings) -> None:
        self.settings = settings
        settings.segments_dir.mkdir(parents=True, exist_ok=True)
        settings.status_path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(settings.segments_dir)
        self._stand()
        self.rows = 0
        self.problem: str | None = None
        self._wall = GuardedClock()
        self._was_up = False
        self._connections = 0
        self._flush_at_s = 0.0
        self._canary_at_s = 0.0
        self._heard_s = time.monotonic()
        self._report_at_s = 0.0
        self._kept = False  # the broker keeps our sites' messages for us
        self._reported: deque[tuple[float, int]] = deque(maxlen=RATE_REPORTS)
        self.receiver = self._receiver()

    def _stand(self) -> None:
        """Begin where the newest segment says."""
        settings = self.settings
        stands = position(settings.segments_dir)
        self.number, self._tail = (stands.number, stands.tail) if stands else (0, None)
        fenced = stands is not None and stands.fence
        ours = self.number - 1 if fenced else self.number
        named = None if stands is None or fenced else commands_in(settings.segments_dir, ours)
        self.spool = Spool(settings.commands_dir, ours, named) if settings.commands_dir else None
        # Canaries that do not go through a broker are ours while we live, and nobody can forge one.
        secret = secrets.token_bytes() if settings.line else (settings.address.password or "").encode()
        self.intake = BridgeSequencer(
            settings.bridge,
            stands,
            grace_ms=int(settings.reconnect_grace_s * 1000),
            interval_ms=int(settings.canary_interval_s * 1000),
            secret=secret,
            holds_back=settings.holds_back,
            floods=RateLimiter(settings.flood_limit, settings.identity),
            others=frozenset(settings.others),
            sites=frozenset(settings.sites),
            takes_foreign=settings.takes_foreign,
        )
        lease = read_lease(settings.segments_dir) if settings.others else None
        self.intake.promised_ms = lease.through_ms if lease else None

    def _receiver(self) -> MessageSource:
        settings = self.settings
        if not settings.replay or (self.intake.history.done and settings.live_after_replay):
            return self._listen()
        return Receiver(settings.address, settings.replay_session, (HISTORY,))

    def _listen(self) -> MessageSource:
        """Go live, in a session that remembers what came while no bridge ran."""
        self.intake.go_live(self._wall.now_ms())
        self._was_up, self._connections = False, 0
        if self.settings.line:
            return self.settings.line()
        presence = partial(_host_state, self.settings.sparkplug_host) if self.settings.sparkplug_host else None
        return Receiver(self.settings.address, self.settings.session, self.settings.subscriptions, presence=presence)

    @property
    def state(self) -> str:
        """``starting``, ``replaying``, ``played`` or ``live``."""
        if self.intake.live:
            return "live"
        if self.intake.history.done:
            return "played"
        return "replaying" if self._was_up else "starting"

    def step(self) -> None:
        """Receive, write, acknowledge: a moment, unless the disk is slow."""
        self._wall.now_ms()
        if self._wall.doubted or self._is_full():
            self.receiver.idle(POLL_S)
        else:
            arrived = self.receiver.poll(POLL_S)
            self._notice_loss()
            now_ms = self._wall.now_ms()
            self._notice_silence(now_ms)  # before what a line kept while we stood still
            self.intake.arrived_together(arrived, now_ms)
            if arrived:
                self._heard_s = time.monotonic()
                if len(arrived) < FEW:
                    time.sleep(GATHER_S)
        if self.intake.live and not self._wall.doubted:
            self._fly_canary()
        self._flush_if_due()
        self._maybe_listen()
        if time.monotonic() - self._report_at_s > STATUS_S:
            self.report()

    def _is_full(self) -> bool:
        waiting = self.intake.waiting
        return waiting.size_bytes > self.settings.max_buffer_bytes or len(waiting) > ROWS_IN_MEMORY

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
            self.receiver.reconnect("a line of history is missing; the broker must send it again")

    def _notice_silence(self, now_ms: int) -> None:
        if self.intake.overdue(now_ms) and not self.intake.gap_open:
            self.intake.open_gap(now_ms, "disk" if self.problem else "broker")
            if self.intake.gap_open:  # one that never listened has none to open
                _LOG.warning("no canary came back: a gap is open")

    def _fly_canary(self) -> None:
        now_s = time.monotonic()
        self._notice_silence(self._wall.now_ms())
        if not self.receiver.connected:
            return
        if now_s >= self._canary_at_s:
            self._canary_at_s = now_s + self.settings.canary_interval_s
            self.receiver.publish(self.intake.canary_topic, self.intake.canary(self._wall.now_ms()))
        if now_s - self._heard_s > max(DEAF_S, 3 * self.settings.canary_interval_s) and not self._is_full():
            self._heard_s = now_s
            self.receiver.reconnect("nothing was heard for long", "network")

    def _flush_if_due(self) -> None:
        waiting, now_s = self.intake.waiting, time.monotonic()
        large = len(waiting) >= self.settings.max_rows or waiting.size_bytes > self.settings.max_buffer_bytes
        if now_s >= self._flush_at_s or (large and self.problem is None):
            self._flush_at_s = now_s + (self.settings.flush_interval_s if self.flush() else RETRY_S)

    def flush(self) -> bool:
        """Write what waits as a segment and acknowledge it; return False where the disk refuses."""
        try:
            if self.intake.live and self.spool and not self._wall.doubted:
                for name, topic, payload in self.spool.take(self.number + 1):
                    self.intake.command(name, topic, payload, self._wall.now_ms())
            if self.intake.waiting:
                self._write()
        except SegmentTakenError as error:
            self._begin_anew(str(error))
            return True
        except OSError as error:
            words = "disk full" if no_room(error) else f"cannot write: {error.strerror}"
            if words != self.problem:
                _LOG.error("a segment cannot be written; nothing is acknowledged until it can", problem=words)
            self.problem = words
            return False
        self.problem = None
        self.receiver.ack(self.intake.written())
        if self.settings.others:
            self._beat()
        return True

    def _write(self) -> None:
        table = self.intake.waiting.table()
        if self.spool:
            self.spool.sync()
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
        if self.spool:
            self.spool.written()

    def _begin_anew(self, why: str) -> None:
        """We were given up: what was not written comes again, behind the segment that says so."""
        _LOG.warning("landing did not hear of us and went on; beginning anew", why=why)
        self.receiver.close()
        self._stand()
        self.receiver = self._receiver()

    def _beat(self, *, stopped: bool = False) -> None:
        """Say how far we are, and leave to other bridges what the broker keeps for them."""
        self._kept |= self.receiver.connected
        if not self.settings.sites and not self.settings.line:
            self.intake.share(kept_sites(self.settings.others.values()))
        self.intake.promise(self._wall.now_ms())
        through_ms = self.intake.promised_ms
        if through_ms is not None:
            sites = self.settings.sites if self._kept else ()
            write_lease(self.settings.segments_dir, Lease(through_ms, wall_clock_ms(), sites, stopped))

    def _maybe_listen(self) -> None:
        done = not self.intake.live and self.intake.history.done and not self.intake.waiting
        if done and self.settings.live_after_replay:
            self.receiver.close(forget=True)
            self.receiver = self._listen()
            _LOG.info("history was played; listening")

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
        """Write what is there, acknowledge it, and leave the session to the broker."""
        self.intake.stopping()
        self.flush()
        self.receiver.close()
        if self.settings.others:
            self._beat(stopped=True)
        self.report()


def _host_state(host: str) -> Presence:
    """Return what a host application of Sparkplug says of itself, see `core.sparkplug.host_state`."""
    at_ms = wall_clock_ms()
    return Presence(f"{STATE}{host}", host_state(at_ms, online=True), host_state(at_ms, online=False))


def run_bridge(settings: BridgeSettings, stop: Stop) -> None:
    """Run a bridge until stopped.

    Raises:
        FleetError: its newest segment cannot be read.
    """
    bridge = Bridge(settings)
    _LOG.info("bridge", state=bridge.state, segment=bridge.number)
    try:
        while not stop.is_set():
            bridge.step()
    finally:
        bridge.close()
        _LOG.info("bridge stopped", segment=bridge.number, rows=bridge.rows)
