"""The bridge: from the broker to segments, with an acknowledgement for what is on the disk."""

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from fleetpulse.io.broker import BrokerAddress
from fleetpulse.io.mqtt import Arrived, Receiver
from fleetpulse.io.process import Stop, write_status
from fleetpulse.io.segments import position, write_segment
from streaming.intake import Intake

_LOG: Final = structlog.get_logger("bridge")


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """How a bridge works.

    Attributes:
        segments_dir: where its segments go.
        commands_dir: the spool of operators' commands.
        status_path: its status file.
        address: the broker.
        bridge: its name; also the name of its session at the broker.
        replay: started for history: takes ``replay/#`` first.
        live_after_replay: goes live after the last line of history.
        subscriptions: topics that it takes when live.
        canary_interval_s: a canary each so many seconds.
        reconnect_grace_s: how long after a return devices may still be on their way back.
        flush_interval_s: the longest that a message waits for its segment.
        max_rows: rows at which a segment is written at once.
        max_bytes: bytes at which a segment is written at once; it bounds memory.
    """

    segments_dir: Path
    commands_dir: Path
    status_path: Path
    address: BrokerAddress
    bridge: str = "bridge-1"
    replay: bool = False
    live_after_replay: bool = True
    subscriptions: tuple[str, ...] = ("fleet/#",)
    canary_interval_s: float = 5.0
    reconnect_grace_s: float = 120.0
    flush_interval_s: float = 0.25
    max_rows: int = 5_000
    max_bytes: int = 16_000_000


@dataclass(slots=True)
class _Canary:
    """The canary that is on its way.

    Attributes:
        nonce: tells ours from others.
        sent_at: monotonic seconds; None where none is on its way.
        connection: number of the connection by which it was sent.
    """

    nonce: str = ""
    sent_at: float | None = None
    next_at: float = 0.0
    connection: int = 0


@dataclass(slots=True)
class _Reported:
    at: float = 0.0
    rows: int = 0


class Bridge:
    """One bridge; call `step` until it is to stop, then `close`."""

    def __init__(self, settings: BridgeSettings) -> None:
        self.settings = settings
        settings.segments_dir.mkdir(parents=True, exist_ok=True)
        settings.commands_dir.mkdir(parents=True, exist_ok=True)
        stands = position(settings.segments_dir)
        self.number = stands.number if stands else 0
        grace_ms = int(settings.reconnect_grace_s * 1000)
        self.intake = Intake(settings.bridge, stands, replay=settings.replay, grace_ms=grace_ms)
        self.receiver = Receiver(settings.address, f"fleetpulse-{settings.bridge}")
        self.canary = _Canary()
        self.problem: str | None = None
        self.rows = 0
        self._connection = 0
        self._flush_at = 0.0
        self._live = False
        self._taken: list[Path] = []
        self._reported = _Reported()
        self._rate = 0.0
        self._recover_spool()
        if self.intake.replaying:
            self.receiver.subscribe({"replay/#"})
        elif settings.live_after_replay or not settings.replay:
            self._go_live(played=False)

    @property
    def topic(self) -> str:
        """The topic of its canary."""
        return f"fleet/_/{self.settings.bridge}/tick"

    def step(self) -> None:
        """Receive, write, acknowledge: at most about a tenth of a second."""
        arrived = self.receiver.poll(0.05)
        self._notice_connection()
        for message in arrived:
            if not self._is_our_canary(message):
                self.intake.arrived(message, _now_ms())
        if self._live:
            self._spool()
            self._send_canary()
        self._flush_if_due()
        if self.settings.live_after_replay and self.intake.ended and not self._live and not self.intake.waiting_rows:
            self._go_live(played=True)
        self._report()

    def close(self) -> None:
        """Write what is there, acknowledge it, and leave the session to the broker."""
        self._flush()
        self.receiver.close()
        self._report(final=True)

    def _go_live(self, *, played: bool) -> None:
        self._live = True
        self.receiver.subscribe(set(self.settings.subscriptions))
        self.intake.go_live(_now_ms(), played=played)

    def _notice_connection(self) -> None:
        """After a lost connection: what was not acknowledged comes again, and the gap is said before it does."""
        if self.receiver.connections > self._connection:
            if self._connection > 0:
                self.intake.disconnected()
                if self._live:
                    self.intake.open_gap(_now_ms(), "broker")
            self._connection = self.receiver.connections
            self.canary = _Canary()

    def _is_our_canary(self, message: Arrived) -> bool:
        if message.topic != self.topic or self.canary.sent_at is None or message.payload != self.canary.nonce.encode():
            return False
        after_return = self.canary.connection == self._connection
        self.intake.canary_returned(_now_ms(), sent_after_return=after_return)
        self.receiver.ack([message.token])
        self.canary.sent_at = None
        return True

    def _send_canary(self) -> None:
        now = time.monotonic()
        overdue_s = 2 * self.settings.canary_interval_s + 5
        if self.canary.sent_at is not None and now - self.canary.sent_at > overdue_s:
            self.intake.open_gap(_now_ms(), "broker")
            self.canary.sent_at = None
        if self.receiver.connected and self.canary.sent_at is None and now >= self.canary.next_at:
            nonce = json.dumps({"bridge": self.settings.bridge, "nonce": secrets.token_hex(8)})
            next_at = now + self.settings.canary_interval_s
            self.canary = _Canary(nonce, now, next_at, self._connection)
            self.receiver.publish(self.topic, nonce.encode())

    def _recover_spool(self) -> None:
        """Put back what was taken for a segment that was never written; remove what was written."""
        for path in self.settings.commands_dir.glob("*.taken-*"):
            name, _, number = path.name.rpartition(".taken-")
            if number.isdecimal() and int(number) <= self.number:
                path.unlink(missing_ok=True)
            else:
                path.rename(path.with_name(name))

    def _spool(self) -> None:
        for path in sorted(self.settings.commands_dir.glob("[0-9]*.json")):
            try:
                content: Any = json.loads(path.read_text())
                commands = [(item["topic"], dict(item["payload"])) for item in ([content] if isinstance(content, dict) else content)]
            except (ValueError, TypeError, KeyError) as error:
                refused = self.settings.commands_dir / "refused"
                refused.mkdir(exist_ok=True)
                path.rename(refused / path.name)
                _LOG.error("a command file cannot be read; it lies in commands/refused", file=path.name, error=str(error))
                continue
            taken = path.with_name(f"{path.name}.taken-{self.number + 1}")
            path.rename(taken)
            self._taken.append(taken)
            for topic, payload in commands:
                self.intake.command(path.name, topic, payload, _now_ms())

    def _flush_if_due(self) -> None:
        settings, now = self.settings, time.monotonic()
        full = self.intake.waiting_rows >= settings.max_rows or self.intake.waiting_bytes >= settings.max_bytes
        if full or now >= self._flush_at:
            self._flush()
            self._flush_at = now + settings.flush_interval_s

    def _flush(self) -> None:
        """Write a segment, then acknowledge. On a full disk the rows stay in memory, and nothing more is read."""
        while self.intake.waiting_rows or self.intake.waiting_tokens:
            batch = self.intake.take()
            if batch.rows:
                try:
                    write_segment(
                        self.settings.segments_dir,
                        self.number + 1,
                        batch.to_table(),
                        bridge=self.settings.bridge,
                        last_canary_ms=self.intake.last_canary_ms,
                    )
                except OSError as error:
                    self.intake.put_back(batch)
                    self.problem = f"cannot write a segment: {error.strerror}"
                    _LOG.error("cannot write a segment; nothing is acknowledged until it can", error=error.strerror)
                    self._report(final=True)
                    time.sleep(1)
                    return
                self.number += 1
                self.rows += len(batch.rows)
                self.problem = None
                for taken in self._taken:
                    taken.unlink(missing_ok=True)
                self._taken.clear()
            self.receiver.ack(batch.tokens)

    def _report(self, *, final: bool = False) -> None:
        now = time.monotonic()
        if not final and now - self._reported.at < 0.5:
            return
        span = now - self._reported.at
        self._rate = (self.rows - self._reported.rows) / span if span > 0 else 0.0
        self._reported = _Reported(now, self.rows)
        intake = self.intake
        state = "live" if self._live else "replaying" if intake.replaying else "played"
        write_status(
            self.settings.status_path,
            {
                "pid": os.getpid(),
                "state": state,
                "connected": self.receiver.connected,
                "subscribed": self.receiver.subscribed,
                "rows": self.rows,
                "rate_per_s": round(self._rate, 1),
                "segment": self.number,
                "received_at_ms": intake.last_ms if intake.began else None,
                "recording": intake.recording,
                "line": intake.line,
                "last_canary_ms": intake.last_canary_ms,
                "gap_open": intake.gap_open,
                **intake.counts,
                "problem": self.problem or self.receiver.problem,
            },
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def run_bridge(settings: BridgeSettings, stop: Stop) -> None:
    """Run a bridge until stopped."""
    bridge = Bridge(settings)
    try:
        while not stop.is_set():
            bridge.step()
    finally:
        bridge.close()



