"""Deliver the lines of a recording in order and once, in whatever order the broker delivers them.

Rule 1: line n is written after line n - 1. An earlier line was already written; a later line is
held until its turn.
Rule 2: recordings are played one after another. None may start before the newest received row.
Rule 3: a coverage gap that a recording leaves open ends with it, as no bridge will close the gap.
Rule 4: the number of remembered bridges is bounded. A gap row of a bridge beyond `MAX_RECORDED` is
kept but not judged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Self

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.messages.replay_envelope import Envelope, unwrap
from fleetpulse.core.presence.coverage import MAX_RECORDED
from fleetpulse.core.rows import Kind, Origin, Row
from fleetpulse.io.ingest.segments import BridgePosition
from fleetpulse.io.mqtt.subscriber import AckToken

HELD_LINES: Final = 20_000  # more than a broker has in flight to one client
HELD_BYTES: Final = 64 * 1024 * 1024
_GAP: Final = "/" + Kind.GAP.value


class LineAction(Enum):
    """Action of the bridge on a message from ``replay/#``."""

    WRITE = "write"  # the next line
    REPEATED = "repeated"  # written already
    REJECTED = "rejected"  # must not be written
    DOUBLED = "doubled"  # the next line, but a second gap row of its bridge at one instant: kept, not judged
    CROWDED = "crowded"  # the next line, but a gap row of one bridge too many (Rule 4): kept, not judged
    STRAY = "stray"  # not an envelope


Taken = tuple[LineAction, bytes, Envelope | None, AckToken | None]


@dataclass(slots=True)
class RecordingSequencer:
    """Position in a recording, and the lines held for their turn.

    Attributes:
        recording: id of the recording in progress or played last; None if live rows came after it.
        line: number of the newest line taken; -1 before the first.
        ended: whether that line is the end line of the recording.
        played: id of the recording that was last taken to its end.
        left_open: bridges with an open coverage gap according to the lines, see `let_go`; at most
            `MAX_RECORDED`.
        why: reason of the newest rejection.
        missing: whether the next line is missing and no more lines can be held; the broker must
            redeliver it.
    """

    recording: str | None = None
    line: int = -1
    ended: bool = False
    played: str | None = None
    left_open: frozenset[str] = frozenset()
    why: str | None = None
    missing: bool = False
    _held: dict[tuple[str, int], tuple[Envelope, AckToken | None]] = field(
        default_factory=dict[tuple[str, int], tuple[Envelope, AckToken | None]]
    )
    _held_bytes: int = 0
    _gap_rows: tuple[int, frozenset[str]] = (0, frozenset())  # newest instant of gap rows, and their bridges
    _refused: set[str] = field(default_factory=set[str])

    @classmethod
    def after(cls, position: BridgePosition | None) -> Self:
        """Restore the history from the position of a bridge."""
        if position is None:
            return cls()
        if position.recording is None or position.line is None:
            return cls(played=position.played, left_open=position.left_open)
        found = cls(position.recording, position.line, position.ended, position.played, position.left_open)
        found._gap_rows = position.received_at_ms, position.gap_rows
        return found

    def copy(self) -> Self:
        """Return a copy without the held lines, which the broker redelivers."""
        return replace(self, missing=False, _held={}, _held_bytes=0, _refused=set(self._refused))

    @property
    def done(self) -> bool:
        """Whether a recording was played, and none is in progress."""
        return self.ended or (self.recording is None and self.played is not None)

    @property
    def under_way(self) -> bool:
        """Whether a recording has started and not ended."""
        return self.recording is not None and not self.ended

    @property
    def held(self) -> int:
        """Number of lines held for their turn."""
        return len(self._held)

    def gap_rows_at(self, instant_ms: int) -> frozenset[str]:
        """Return the bridges with a gap row at an instant; empty if a later instant has gap rows."""
        newest_ms, bridges = self._gap_rows
        return bridges if newest_ms == instant_ms else frozenset()

    def let_go(self) -> list[str]:
        """Return and forget the bridges whose coverage gap the recording left open."""
        left, self.left_open = sorted(self.left_open), frozenset()
        return left

    def take(self, payload: bytes, token: AckToken | None, last_ms: int | None) -> Iterator[Taken]:
        """Yield the action on a message, then on each held line that follows it.

        Args:
            payload: payload of the message; an envelope, or a stray.
            token: acknowledgement token of the message.
            last_ms: newest ``received_at`` written; no line may be older.
        """
        try:
            envelope = unwrap(payload)
        except (ValueError, RecursionError):
            yield LineAction.STRAY, payload, None, token
            return
        verdict = self._judge(envelope, last_ms)
        if verdict is None:
            key = (envelope.recording, envelope.line)
            if key in self._held:
                yield LineAction.REPEATED, b"", None, token
            elif len(self._held) < HELD_LINES and self._held_bytes < HELD_BYTES:
                self._held[key] = (envelope, token)
                self._held_bytes += len(envelope.payload)
            else:
                self.missing = True  # not acknowledged: the broker redelivers it
            return
        yield verdict, payload, envelope, token
        yield from self._release(envelope, last_ms)

    def _judge(self, envelope: Envelope, last_ms: int | None) -> LineAction | None:
        """Classify a line, and advance if it is the next one; None if it must wait."""
        same, under_way = envelope.recording == self.recording, self.under_way
        if under_way and not same:
            self.why = f"recording {envelope.recording} started while {self.recording} is at line {self.line}"
            return LineAction.REJECTED
        if (same and (self.ended or envelope.line <= self.line)) or (not same and envelope.recording == self.played):
            return LineAction.REPEATED
        if envelope.recording in self._refused:
            return LineAction.REJECTED
        if envelope.line != (self.line + 1 if under_way else 0):
            return None
        older = envelope.received_at_ms is not None and last_ms is not None and envelope.received_at_ms < last_ms
        if older:
            self.why = f"line {envelope.line} of {envelope.recording} is older than the newest received row"
            if not under_way:
                self._refused.add(envelope.recording)
                return LineAction.REJECTED
        self.recording, self.line, self.ended = envelope.recording, envelope.line, envelope.end
        if envelope.end:
            self.played = envelope.recording
        elif envelope.topic and envelope.topic.endswith(_GAP) and not older:
            return self._track_gaps(decode(envelope.topic, envelope.payload, envelope.received_at_ms or 0, Origin.REPLAY))
        return LineAction.REJECTED if older else LineAction.WRITE

    def _track_gaps(self, row: object) -> LineAction:
        """Track the open coverage gaps of a recording; refuse gap rows beyond the limits."""
        if not isinstance(row, Row) or row.kind is not Kind.GAP:
            return LineAction.WRITE
        same = self.gap_rows_at(row.received_at_ms)
        if row.device_id in same:
            return LineAction.DOUBLED
        content = row.contents()
        opens = content.get("op") == "open" and type(content.get("from")) is int
        if len(same) >= MAX_RECORDED or (opens and len(self.left_open | {row.device_id}) > MAX_RECORDED):
            return LineAction.CROWDED
        self._gap_rows = row.received_at_ms, same | {row.device_id}
        if opens:
            self.left_open |= {row.device_id}
        elif content.get("op") == "close" and type(content.get("until")) is int:
            self.left_open -= {row.device_id}
        return LineAction.WRITE

    def _release(self, envelope: Envelope, last_ms: int | None) -> Iterator[Taken]:
        newest = last_ms
        while True:
            if envelope.received_at_ms is not None:
                newest = max(envelope.received_at_ms, newest or envelope.received_at_ms)
            key = (envelope.recording, self.line + 1 if self.recording == envelope.recording else envelope.line + 1)
            following = self._held.pop(key, None)
            if following is None:
                return
            envelope, token = following
            self._held_bytes -= len(envelope.payload)
            yield self._judge(envelope, newest) or LineAction.REPEATED, b"", envelope, token
