"""Buffer of the messages that a bridge has received but not yet written.

Rule 1: ordinary messages are added many at a time, as columns; no row object is created for them.
Rule 2: a flood costs little disk. A refused message keeps the first `FLOOD_BYTES` bytes of its
payload, and a segment has at most `FLOOD_ROWS` refused rows of a device for each reason. The last
of these rows counts the messages that have no row.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from fleetpulse.core.messages.decode import digest64
from fleetpulse.core.rows import Origin, Reason
from fleetpulse.io.ingest.segments import SegmentRow, columns_table
from fleetpulse.io.mqtt.subscriber import AckToken

FLOOD_BYTES: Final = 128  # kept of the payload of a message that the bridge refuses
FLOOD_ROWS: Final = 2  # most rows of a device in a segment for refused messages, by reason
_More = tuple[str, str | None, int | None, str | None, str | None, int | None, int | None, int | None]
_USUAL: Final[_More] = (Origin.MQTT.value, None, None, None, None, None, None, None)  # fields of `SegmentRow` after ``payload``
_REFUSED: Final = 4  # index of ``refused`` in `_More`


class SegmentBuffer:
    """Rows that wait for the next segment, stored as columns.

    Attributes:
        tokens: acknowledgement token of each row's message; None for rows that the bridge created.
        passed: tokens of messages that became no row.
        size_bytes: size of the rows' topics and payloads.
        limited: reason by place, for messages beyond a limit.
        senders: by place, the sender whose limit a row counts towards; only for rows with an escaped topic.
    """

    def __init__(self) -> None:
        self.tokens: list[AckToken | None] = []
        self.passed: list[AckToken] = []
        self.size_bytes = 0
        self.limited: dict[int, Reason] = {}
        self.senders: dict[int, str] = {}
        self._received_ms: list[int] = []
        self._topics: list[str] = []
        self._payloads: list[bytes] = []
        self._more: dict[int, _More] = {}  # by place, for rows that are not ordinary
        self._refused: dict[str, list[int]] = {}  # by device: places of its refused messages

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, row: SegmentRow, token: AckToken | None) -> None:
        """Add a row."""
        self._more[len(self)] = row[3:]
        self.add_ordinary(row.received_at_ms, (row.topic,), (row.payload,), (token,))

    def add_ordinary(
        self, received_at_ms: int, topics: Sequence[str], payloads: Sequence[bytes], tokens: Sequence[AckToken | None]
    ) -> int:
        """Add ordinary MQTT messages that arrived together; return the place of the first."""
        first = len(self)
        self._received_ms += [received_at_ms] * len(topics)
        self._topics += topics
        self._payloads += payloads
        self.tokens += tokens
        self.size_bytes += sum(map(len, topics)) + sum(map(len, payloads))
        return first

    def topic(self, place: int) -> str:
        """Return the topic of a row."""
        return self._topics[place]

    def refuse(self, place: int, why: Reason, device: str) -> None:
        """Mark the row of a refused message, and cut its payload.

        A row that is already refused keeps its first reason.

        Args:
            place: place of the row.
            why: reason.
            device: device whose refused messages share the rows of a segment.
        """
        origin, recording, line, command, refused, *_ = self._more.get(place, _USUAL)
        payload = self._payloads[place]
        size, digest = None, None
        if len(payload) > FLOOD_BYTES:
            size, digest = len(payload), digest64(payload)
            self._payloads[place] = payload[:FLOOD_BYTES]
            self.size_bytes -= size - FLOOD_BYTES
        self._more[place] = (origin, recording, line, command, refused or why, size, digest, None)
        self._refused.setdefault(device, []).append(place)
        self.limited[place] = why

    def rows(self) -> Iterator[SegmentRow]:
        """Yield the rows, one for each message."""
        for place, values in enumerate(zip(self._received_ms, self._topics, self._payloads, strict=True)):
            yield SegmentRow(*values, *self._more.get(place, _USUAL))

    def table(self) -> pa.Table:
        """Return the rows as a table of `SEGMENT_SCHEMA`, without the excess rows of floods."""
        dropped = self._fold_floods()
        more: list[list[Any]] = [[value] * len(self) for value in _USUAL]
        for place, values in self._more.items():
            for column, value in zip(more, values, strict=True):
                column[place] = value
        table = columns_table([self._received_ms, self._topics, self._payloads, *more])
        return table.take([place for place in range(len(self)) if place not in dropped]) if dropped else table

    def _fold_floods(self) -> set[int]:
        """Return the places of excess rows; count them in the last row of their device and reason.

        The last row of the buffer is never an excess row, so the segment ends with its instant.
        """
        dropped = set[int]()
        for places in self._refused.values():
            by_reason: dict[str | None, list[int]] = {}
            for place in sorted(places):
                by_reason.setdefault(self._more[place][_REFUSED], []).append(place)
            for same in by_reason.values():
                excess = same[FLOOD_ROWS - 1 : -1]
                if excess:
                    dropped.update(excess)
                    self._more[same[-1]] = (*self._more[same[-1]][:-1], len(excess) + 1)
        return dropped
