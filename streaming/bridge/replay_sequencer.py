"""In which order the lines of a recording are taken: one after the other, each once, whatever the broker's order.

Rule 1: line n is written after line n - 1; an earlier one was written already, a later one is held until its turn.
Rule 2: one recording after the other, and none that begins before what was received last.
Rule 3: a recording's word on who does not listen holds to its end: nobody will come to say that they listen again.
Rule 4: what is remembered of bridges has a bound: a gap row of one more than `MAX_RECORDED` is kept, and not judged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Self

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.messages.replay_envelope import Envelope, unwrap
from fleetpulse.core.presence.coverage import MAX_RECORDED
from fleetpulse.core.rows import Kind, Origin, Row
from fleetpulse.io.ingest.segments import BridgeOffset
from fleetpulse.io.mqtt.subscriber import Token

HELD_LINES: Final = 20_000  # more than a broker has under way to us
HELD_BYTES: Final = 64 * 1024 * 1024
_GAP: Final = "/" + Kind.GAP.value


class LineAction(Enum):
    """What becomes of a message on ``replay/#``."""

    WRITE = "write"  # the next line
    REPEATED = "repeated"  # written already
    REJECTED = "rejected"  # must not be written
    DOUBLED = "doubled"  # the next line, and a gap row at the instant of another of the same bridge: kept, not judged
    CROWDED = "crowded"  # the next line, and a gap row of a bridge too many, see Rule 4: likewise
    STRAY = "stray"  # not an envelope


Taken = tuple[LineAction, bytes, Envelope | None, Token | None]


@dataclass(slots=True)
class History:
    """How far a recording has been taken.

    Attributes:
        recording: the recording; None where none is or was the last thing taken.
        line: its newest line taken; -1 before the first.
        ended: whether that was the line after its last.
        played: the recording that was last taken to its end.
        left_open: bridges that do not listen, as its lines say, see `let_go`; `MAX_RECORDED` at most.
        why: the reason of the newest rejection.
        missing: lines are held and none more can be: the broker must send the missing one again.
    """

    recording: str | None = None
    line: int = -1
    ended: bool = False
    played: str | None = None
    left_open: frozenset[str] = frozenset()
    why: str | None = None
    missing: bool = False
    _held: dict[tuple[str, int], tuple[Envelope, Token | None]] = field(
        default_factory=dict[tuple[str, int], tuple[Envelope, Token | None]]
    )
    _held_bytes: int = 0
    _gap_rows: tuple[int, frozenset[str]] = (0, frozenset())  # the newest instant of gap rows, and whose
    _refused: set[str] = field(default_factory=set[str])

    @classmethod
    def after(cls, position: BridgeOffset | None) -> Self:
        """Begin where a bridge stands."""
        if position is None:
            return cls()
        if position.recording is None or position.line is None:
            return cls(played=position.played, left_open=position.left_open)
        found = cls(position.recording, position.line, position.ended, position.played, position.left_open)
        found._gap_rows = position.received_at_ms, position.gap_rows
        return found

    def copy(self) -> Self:
        """Return what is remembered, without the lines that are held: the broker sends those again."""
        return replace(self, missing=False, _held={}, _held_bytes=0, _refused=set(self._refused))

    @property
    def done(self) -> bool:
        """Whether a recording was played, and none is under way."""
        return self.ended or (self.recording is None and self.played is not None)

    @property
    def under_way(self) -> bool:
        """Whether a recording has begun and not ended."""
        return self.recording is not None and not self.ended

    @property
    def held(self) -> int:
        """How many lines wait for one before them."""
        return len(self._held)

    def gap_rows_at(self, instant_ms: int) -> frozenset[str]:
        """Return the bridges of which the lines had a gap row at an instant, if that is the newest with one."""
        newest_ms, whose = self._gap_rows
        return whose if newest_ms == instant_ms else frozenset()

    def let_go(self) -> list[str]:
        """Return the bridges of which a recording still says that they do not listen, and remember none of them."""
        left, self.left_open = sorted(self.left_open), frozenset()
        return left

    def take(self, payload: bytes, token: Token | None, last_ms: int | None) -> Iterator[Taken]:
        """Yield what becomes of a message, and of held ones whose turn it is then.

        Args:
            payload: the message's; an envelope, or a stray.
            token: the message's.
            last_ms: the newest ``received_at`` written; no line may be older.
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
                self.missing = True  # not acknowledged: it comes again
            return
        yield verdict, payload, envelope, token
        yield from self._release(envelope, last_ms)

    def _judge(self, envelope: Envelope, last_ms: int | None) -> LineAction | None:
        """Return what becomes of a line, and move on where it is the next; None where it must wait."""
        same, under_way = envelope.recording == self.recording, self.under_way
        if under_way and not same:
            self.why = f"recording {envelope.recording} while {self.recording} is at line {self.line}"
            return LineAction.REJECTED
        if (same and (self.ended or envelope.line <= self.line)) or (not same and envelope.recording == self.played):
            return LineAction.REPEATED
        if envelope.recording in self._refused:
            return LineAction.REJECTED
        if envelope.line != (self.line + 1 if under_way else 0):
            return None
        older = envelope.received_at_ms is not None and last_ms is not None and envelope.received_at_ms < last_ms
        if older:
            self.why = f"line {envelope.line} of {envelope.recording} is older than what was received last"
            if not under_way:
                self._refused.add(envelope.recording)
                return LineAction.REJECTED
        self.recording, self.line, self.ended = envelope.recording, envelope.line, envelope.end
        if envelope.end:
            self.played = envelope.recording
        elif envelope.topic and envelope.topic.endswith(_GAP) and not older:
            return self._heed(decode(envelope.topic, envelope.payload, envelope.received_at_ms or 0, Origin.REPLAY))
        return LineAction.REJECTED if older else LineAction.WRITE

    def _heed(self, row: object) -> LineAction:
        """Remember who does not listen, as whoever judges the row will."""
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
