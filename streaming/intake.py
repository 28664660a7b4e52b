"""What the bridge does with what arrives: stamped, put in order, written, acknowledged. No network and no clock here.

Rule 1: ``received_at`` never runs backwards, not across restarts either; our own rows share theirs with nobody.
Rule 2: a message is acknowledged when the segment with it is on the disk, never before.
Rule 3: while history is played, nothing else is taken; each of its lines is taken once, in order.
Rule 4: when we were not listening, the row that says so comes before any other.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from fleetpulse.core.envelope import TOPIC_PREFIX, Envelope, unwrap
from fleetpulse.core.messages import EVERYONE, Kind, Origin
from fleetpulse.io.mqtt import Arrived
from fleetpulse.io.segments import SEGMENT_SCHEMA, Position

_HELD_LINES: Final = 50_000
_CONTINUES_MS: Final = 60_000  # history that ended so recently goes on live without a gap

Token = tuple[int, int]


@dataclass(slots=True)
class Batch:
    """Rows for one segment, and what may be acknowledged once it is on the disk."""

    rows: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    tokens: list[Token] = field(default_factory=list[Token])
    bytes: int = 0

    def to_table(self) -> pa.Table:
        """Return the rows with the columns of `SEGMENT_SCHEMA`."""
        columns = zip(*self.rows, strict=True)
        arrays = [pa.array(values, item.type) for values, item in zip(columns, SEGMENT_SCHEMA, strict=True)]
        return pa.Table.from_arrays(arrays, schema=SEGMENT_SCHEMA)


class Intake:
    """The bridge's memory and its rules.

    Args:
        bridge: its name.
        position: where it stands, from its newest segment.
        replay: whether it was started for history.
        grace_ms: how long after the return devices may still be on their way back to us.
    """

    def __init__(self, bridge: str, position: Position | None, *, replay: bool, grace_ms: int) -> None:
        self.bridge = bridge
        self.grace_ms = grace_ms
        self.replaying = replay and not (position is not None and position.ended)
        self.recording = position.recording if position else None
        self.line = position.line if position and position.line is not None else -1
        self.ended = position.ended if position else False
        self.last_ms = position.received_at_ms if position else -1
        self.last_canary_ms = position.last_canary_ms if position else None
        self.began = position is not None
        self.gap_open = False
        self.returned = False  # whether a canary sent after the return may close the gap
        self.counts = {"retained": 0, "rejected": 0, "repeated": 0}
        self._own_last = False
        self._held: dict[int, tuple[Envelope, Token]] = {}
        self._batch = Batch()

    def go_live(self, now_ms: int, *, played: bool) -> None:
        """Begin to listen: where we had listened before, the time between is a gap.

        Args:
            now_ms: the wall clock.
            played: whether history has just been played to its end.
        """
        self.replaying = False
        if self.began and not (played and now_ms - self.last_ms <= _CONTINUES_MS):
            since_ms = self.last_ms if self.last_canary_ms is None else self.last_canary_ms
            self.open_gap(now_ms, "start", since_ms)

    def arrived(self, message: Arrived, now_ms: int) -> None:
        """Take in one message."""
        if message.retained:
            self._pass_over("retained", message.token)
        elif message.topic.startswith(TOPIC_PREFIX) and self._is_history(message):
            pass
        elif self.replaying:
            self._pass_over("rejected", message.token)
        else:
            self._row(self._stamp(now_ms), message.topic, message.payload, Origin.MQTT, token=message.token)

    def _is_history(self, message: Arrived) -> bool:
        try:
            envelope = unwrap(message.payload)
        except (ValueError, RecursionError):
            return False
        other = self.recording is not None and envelope.recording != self.recording
        if not self.replaying and not (self.ended and not other):
            self._pass_over("rejected", message.token)
        elif other and not self.ended and self.line >= 0:
            self._pass_over("rejected", message.token)  # one recording after the other
        else:
            self._line(envelope, message.token)
        return True

    def _line(self, envelope: Envelope, token: Token) -> None:
        if envelope.recording != self.recording:
            self.recording, self.line, self.ended = envelope.recording, -1, False
            self._held.clear()
        if envelope.line <= self.line:
            self._pass_over("repeated", token)
        elif envelope.line > self.line + 1:
            if len(self._held) < _HELD_LINES:
                self._held[envelope.line] = (envelope, token)
        else:
            self._write_line(envelope, token)
            while (following := self._held.pop(self.line + 1, None)) is not None:
                self._write_line(*following)

    def _write_line(self, envelope: Envelope, token: Token) -> None:
        self.line = envelope.line
        mark = {"recording": envelope.recording, "line": envelope.line, "token": token}
        if envelope.end:
            self.ended, self.replaying = True, False
            self._row(max(self.last_ms, 0), TOPIC_PREFIX + envelope.recording, b"", Origin.REPLAY, **mark)
            return
        assert envelope.received_at_ms is not None and envelope.topic is not None
        if envelope.received_at_ms < self.last_ms:
            self.line -= 1
            self._pass_over("rejected", token)
            return
        self._row(envelope.received_at_ms, envelope.topic, envelope.payload, Origin.REPLAY, **mark)

    def command(self, name: str, topic: str, payload: Mapping[str, Any], now_ms: int) -> None:
        """Take in an operator's command."""
        content = json.dumps(payload, separators=(",", ":")).encode()
        self._own(now_ms, topic, content, Origin.COMMAND, command=name)

    def canary_returned(self, now_ms: int, *, sent_after_return: bool) -> None:
        """Our canary came back: we are listening; a gap that was open comes to its end."""
        self._own(now_ms, self._topic(Kind.TICK), self._content(), Origin.BRIDGE)
        self.last_canary_ms = self.last_ms
        if self.gap_open and sent_after_return:
            self.gap_open = False
            content = self._content(op="close", until=self.last_ms + self.grace_ms)
            self._own(now_ms, self._topic(Kind.GAP), content, Origin.BRIDGE)

    def open_gap(self, now_ms: int, why: str, since_ms: int | None = None) -> None:
        """Say that we have not been listening since the last canary came back; once, until that is closed."""
        since_ms = self.last_canary_ms if since_ms is None else since_ms
        if self.gap_open or since_ms is None:
            return
        self.gap_open = True
        content = self._content(**{"op": "open", "from": since_ms, "why": why})
        self._own(now_ms, self._topic(Kind.GAP), content, Origin.BRIDGE)

    def disconnected(self) -> None:
        """The connection is lost: what was not acknowledged comes again, so it is not written now."""
        kept = [row for row in self._batch.rows if row[3] not in (Origin.MQTT, Origin.REPLAY)]
        first = next((row for row in self._batch.rows if row[3] == Origin.REPLAY), None)
        if first is not None:
            self.line, self.ended = first[5] - 1, False
            self.replaying = True
        self._batch = Batch(rows=kept)
        self._held.clear()

    def take(self) -> Batch:
        """Return what is to be written, and begin anew."""
        batch, self._batch = self._batch, Batch()
        return batch

    def put_back(self, batch: Batch) -> None:
        """Take back a batch that could not be written."""
        batch.rows += self._batch.rows
        batch.tokens += self._batch.tokens
        batch.bytes += self._batch.bytes
        self._batch = batch

    @property
    def waiting_rows(self) -> int:
        """How many rows are to be written."""
        return len(self._batch.rows)

    @property
    def waiting_bytes(self) -> int:
        """How many bytes of payload are to be written."""
        return self._batch.bytes

    @property
    def waiting_tokens(self) -> int:
        """How many acknowledgements wait."""
        return len(self._batch.tokens)

    def _stamp(self, now_ms: int) -> int:
        return max(now_ms, self.last_ms + 1 if self._own_last else self.last_ms)

    def _own(self, now_ms: int, topic: str, content: bytes, origin: Origin, command: str | None = None) -> None:
        """Write a row of ours, with an instant that it shares with nobody: their order is part of what they say."""
        self._row(max(now_ms, self.last_ms + 1), topic, content, origin, command=command)
        self._own_last = True

    def _row(
        self,
        received_at_ms: int,
        topic: str,
        payload: bytes,
        origin: Origin,
        *,
        recording: str | None = None,
        line: int | None = None,
        command: str | None = None,
        token: Token | None = None,
    ) -> None:
        self._batch.rows.append((received_at_ms, topic, payload, origin.value, recording, line, command))
        self._batch.bytes += len(payload) + len(topic)
        if token is not None:
            self._batch.tokens.append(token)
        self.last_ms, self._own_last, self.began = received_at_ms, False, True

    def _pass_over(self, why: str, token: Token) -> None:
        self.counts[why] += 1
        self._batch.tokens.append(token)

    def _topic(self, kind: Kind) -> str:
        return f"fleet/{EVERYONE}/{self.bridge}/{kind.value}"

    def _content(self, **content: Any) -> bytes:
        return json.dumps({"bridge": self.bridge, **content}, separators=(",", ":")).encode()
