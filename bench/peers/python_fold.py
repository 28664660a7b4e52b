"""Fold of one device in plain Python, run by every Python peer.

Its results are equal to those of ``scala/Fold.scala``.

Rule 1: this module imports neither Spark, Flink nor this project's code: a peer shares no code with
the job that it is compared to.
Rule 2: instants are epoch milliseconds, durations milliseconds; ``NEVER`` means no instant. The
code of a heartbeat is empty.
"""

from typing import Any, Final, NamedTuple

NEVER: Final = -(2**63)
PROVISIONED, ONLINE, DEGRADED, FLAGGED, OFFLINE = range(5)
NAMES: Final = ("provisioned", "online", "degraded", "flagged", "offline")
_PRESENT: Final = (ONLINE, DEGRADED, FLAGGED)

State = tuple[Any, ...]  # the fields of `COLUMNS`, in their order
COLUMNS: Final = (  # state of a device: field name and Spark type
    ("mode", "int"),
    ("transitions", "long"),
    ("lastSeen", "long"),
    ("runtime", "long"),
    ("olderError", "long"),
    ("newerError", "long"),
    ("firstStep", "long"),
    ("secondStep", "long"),
    ("degradedUntil", "long"),
    ("flaggedUntil", "long"),
    ("timer", "long"),
    ("times", "array<long>"),
    ("seqs", "array<long>"),
    ("boots", "array<string>"),
    ("codes", "array<string>"),
)
TIMER: Final = 10  # index of the timer in a `State`
UNKNOWN: Final[State] = (PROVISIONED, 0, NEVER, 0, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, (), (), (), ())


class Rules(NamedTuple):
    """Durations in milliseconds."""

    lateness: int
    timeout: int
    degraded_window: int
    flagged_window: int
    flagged_hold: int


class Fold:
    """Fold of one device: takes messages, and judges those due in event-time order.

    Attributes:
        out: transitions: device id, number, from, to, trigger, event time, runtime.
    """

    __slots__ = (
        "boots",
        "codes",
        "degraded_until",
        "device_id",
        "first_step",
        "flagged_until",
        "last_seen",
        "mode",
        "newer_error",
        "newest_received",
        "older_error",
        "out",
        "rules",
        "runtime",
        "second_step",
        "seqs",
        "times",
        "transitions",
    )

    def __init__(self, device_id: str, known: State, rules: Rules) -> None:
        self.device_id, self.rules = device_id, rules
        self.mode, self.transitions, self.last_seen, self.runtime = known[0:4]
        self.older_error, self.newer_error, self.first_step, self.second_step = known[4:8]
        self.degraded_until, self.flagged_until = known[8:10]
        self.times, self.seqs, self.boots, self.codes = map(list, known[11:15])
        self.newest_received = NEVER
        self.out: list[tuple[str, int, str, str, str, int, int]] = []

    def frontier(self, watermark_ms: int) -> int:
        """Return the frontier of this device, for rows in order of reception."""
        return watermark_ms if self.newest_received == NEVER else max(watermark_ms, self.newest_received - self.rules.lateness)

    def take(self, event_ms: int, received_ms: int, boot: str, seq: int, code: str) -> None:
        """Insert a message into the pending messages, unless it is late or a duplicate."""
        self.newest_received = max(self.newest_received, received_ms)
        if received_ms - event_ms >= self.rules.lateness:
            return
        times, seqs, codes = self.times, self.seqs, self.codes
        at = len(times)
        while at > 0:
            before = at - 1
            if event_ms != times[before]:
                if event_ms > times[before]:
                    break
            elif seq != seqs[before]:
                if seq > seqs[before]:
                    break
            elif code or not codes[before]:
                break
            at = before
        if not self._is_copy(event_ms, boot, seq, code, at):
            times.insert(at, event_ms)
            seqs.insert(at, seq)
            self.boots.insert(at, boot)
            codes.insert(at, code)

    def _is_copy(self, event_ms: int, boot: str, seq: int, code: str, before: int) -> bool:
        at = before - 1
        while at >= 0 and self.times[at] == event_ms and self.seqs[at] == seq:
            if bool(self.codes[at]) == bool(code) and self.boots[at] == boot:
                return True
            at -= 1
        return False

    def fold_to(self, frontier_ms: int) -> None:
        """Judge messages and deadlines up to the frontier, messages first at one instant."""
        times, codes = self.times, self.codes
        done = 0
        for at_ms in times:
            if at_ms > frontier_ms:
                break
            self._expire(at_ms)
            self._hear(at_ms)
            code = codes[done]
            if code:
                self._count_error(at_ms, code)
            done += 1
        self._expire(frontier_ms + 1)
        if done:
            del times[:done], self.seqs[:done], self.boots[:done], codes[:done]

    def wake_at(self) -> int:
        """Return the next instant at which the state may change without a further message.

        Heartbeats of a device that is present do not count.
        """
        at = self._next_deadline()
        for time_ms, code in zip(self.times, self.codes, strict=True):
            if code or self.mode not in _PRESENT:
                return time_ms if at == NEVER else min(at, time_ms)
        return at

    def to_state(self, timer: int) -> State:
        """Return the state to store."""
        return (
            self.mode,
            self.transitions,
            self.last_seen,
            self.runtime,
            self.older_error,
            self.newer_error,
            self.first_step,
            self.second_step,
            self.degraded_until,
            self.flagged_until,
            timer,
            self.times,
            self.seqs,
            self.boots,
            self.codes,
        )

    def _next_deadline(self) -> int:
        at = self.last_seen + self.rules.timeout if self.mode in _PRESENT else NEVER
        if self.degraded_until != NEVER and (at == NEVER or self.degraded_until < at):
            at = self.degraded_until
        if self.flagged_until != NEVER and (at == NEVER or self.flagged_until < at):
            at = self.flagged_until
        return at

    def _expire(self, before_ms: int) -> None:
        at = self._next_deadline()
        while at != NEVER and at < before_ms:
            if self.mode in _PRESENT and at == self.last_seen + self.rules.timeout:
                self._change(OFFLINE, "silence", at)
            elif at == self.degraded_until:
                self.degraded_until = NEVER
                if self.mode == DEGRADED:
                    self._change(self._alive_mode(), "recovered", at)
            else:
                self.flagged_until = NEVER
                if self.mode == FLAGGED:
                    self._change(self._alive_mode(), "hold_over", at)
            at = self._next_deadline()

    def _alive_mode(self) -> int:
        if self.flagged_until != NEVER:
            return FLAGGED
        return DEGRADED if self.degraded_until != NEVER else ONLINE

    def _hear(self, at_ms: int) -> None:
        present = self.mode in _PRESENT
        if present:
            self.runtime += at_ms - self.last_seen
        self.last_seen = at_ms
        if not present:
            self._change(self._alive_mode(), "signal", at_ms)

    def _count_error(self, at_ms: int, code: str) -> None:
        rules = self.rules
        if self.older_error != NEVER and at_ms - self.older_error <= rules.degraded_window:
            self.degraded_until = self.older_error + rules.degraded_window
            if self.mode == ONLINE:
                self._change(DEGRADED, "errors", at_ms)
        self.older_error, self.newer_error = self.newer_error, at_ms
        if code == "escalation":
            if self.second_step != NEVER and at_ms - self.second_step <= rules.flagged_window:
                self.flagged_until = at_ms + rules.flagged_hold
                if self.mode in (ONLINE, DEGRADED):
                    self._change(FLAGGED, "sequence", at_ms)
        elif code == "auth_failed":
            if self.first_step != NEVER and at_ms - self.first_step <= rules.flagged_window:
                self.second_step = self.first_step
        elif code == "reconnaissance":
            self.first_step = at_ms

    def _change(self, to: int, trigger: str, at_ms: int) -> None:
        self.transitions += 1
        self.out.append((self.device_id, self.transitions, NAMES[self.mode], NAMES[to], trigger, at_ms, self.runtime))
        self.mode = to
