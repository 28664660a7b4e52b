"""What the bridge has received, and not written yet.

Rule: usual messages are taken in many at a time, and never become a row of their own.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from fleetpulse.core.rows import Origin
from fleetpulse.io.ingest.segments import SegmentRow, columns_table
from fleetpulse.io.mqtt.subscriber import Token

_More = tuple[str, str | None, int | None, str | None, str | None]
_USUAL: Final[_More] = (Origin.MQTT.value, None, None, None, None)  # of `SegmentRow`, what follows its payload


class SegmentBuffer:
    """What waits for its segment: rows, as columns.

    Attributes:
        tokens: of the messages that the rows came from; None of our own rows.
        passed: tokens of messages that became no row.
        size_bytes: of the rows' topics and payloads.
    """

    def __init__(self) -> None:
        self.tokens: list[Token | None] = []
        self.passed: list[Token] = []
        self.size_bytes = 0
        self._received_ms: list[int] = []
        self._topics: list[str] = []
        self._payloads: list[bytes] = []
        self._more: dict[int, _More] = {}  # of rows that are not usual

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, row: SegmentRow, token: Token | None) -> None:
        """Take in a row."""
        self._more[len(self)] = row[3:]
        self.add_usual(row.received_at_ms, (row.topic,), (row.payload,), (token,))

    def add_usual(
        self, received_at_ms: int, topics: Sequence[str], payloads: Sequence[bytes], tokens: Sequence[Token | None]
    ) -> int:
        """Take in messages that came over MQTT, together, of which there is nothing more to say; return the first one's place."""
        first = len(self)
        self._received_ms += [received_at_ms] * len(topics)
        self._topics += topics
        self._payloads += payloads
        self.tokens += tokens
        self.size_bytes += sum(map(len, topics)) + sum(map(len, payloads))
        return first

    def refuse(self, place: int, why: str) -> None:
        """Refuse a row that came over MQTT, unless it is refused already."""
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
