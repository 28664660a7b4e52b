"""Buffer of the messages that a bridge has received but not yet written.

Rule: ordinary messages are added many at a time, as columns; no row object is created for them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from fleetpulse.core.rows import Origin
from fleetpulse.io.ingest.segments import SegmentRow, columns_table
from fleetpulse.io.mqtt.subscriber import AckToken

_More = tuple[str, str | None, int | None, str | None, str | None]
_USUAL: Final[_More] = (Origin.MQTT.value, None, None, None, None)  # fields of `SegmentRow` after ``payload``


class SegmentBuffer:
    """Rows that wait for the next segment, stored as columns.

    Attributes:
        tokens: acknowledgement token of each row's message; None for rows that the bridge created.
        passed: tokens of messages that became no row.
        size_bytes: size of the rows' topics and payloads.
    """

    def __init__(self) -> None:
        self.tokens: list[AckToken | None] = []
        self.passed: list[AckToken] = []
        self.size_bytes = 0
        self._received_ms: list[int] = []
        self._topics: list[str] = []
        self._payloads: list[bytes] = []
        self._more: dict[int, _More] = {}  # by place, for rows that are not ordinary

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, row: SegmentRow, token: AckToken | None) -> None:
        """Add a row."""
        self._more[len(self)] = row[3:]
        self.add_usual(row.received_at_ms, (row.topic,), (row.payload,), (token,))

    def add_usual(
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

    def refuse(self, place: int, why: str) -> None:
        """Mark the row of an MQTT message as refused, unless it is marked already."""
        more = self._more.get(place, _USUAL)
        if more[-1] is None:
            self._more[place] = (*more[:-1], why)

    def rows(self) -> Iterator[SegmentRow]:
        """Yield the rows."""
        for place, values in enumerate(zip(self._received_ms, self._topics, self._payloads, strict=True)):
            yield SegmentRow(*values, *self._more.get(place, _USUAL))

    def table(self) -> pa.Table:
        """Return the rows as a table of `SEGMENT_SCHEMA`."""
        more: list[list[Any]] = [[value] * len(self) for value in _USUAL]
        for place, values in self._more.items():
            for column, value in zip(more, values, strict=True):
                column[place] = value
        return columns_table([self._received_ms, self._topics, self._payloads, *more])
