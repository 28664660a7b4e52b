"""What waits for its time: chunks that are written once, read when they come due, and deleted.

Rule 1: a chunk holds rows of one span of time, so that few are open at a time; it is rewritten only where many wait: for
a frontier that stands still, as in a gap that is open, or for a lateness of very many batches. Then neighbours are joined, those
of the fewest rows first and of like size, so that a row is written again a few times at most. So there is a bound: ``MOST``, or
``MOST_MOVING``, and one more for each 4,096 rows.
Rule 2: a row is due in the call that moves the frontier past it: what lies at or before the frontier before has been judged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.arrow import SIGNAL_SCHEMA, from_bytes, to_bytes
from fleetpulse.columnar.codec.wire import from_wire, to_wire, to_wires
from fleetpulse.columnar.jit.take import filtered, taken
from fleetpulse.columnar.jit.world import Int64s

Read = Callable[[int], bytes]
MOST: Final = 64  # chunks of signals, and of other rows, before some are joined
MOST_MOVING: Final = 512  # likewise while the frontier moves: what is joined is read again in each call until all of it was due
_AT_ONCE: Final = 16  # are joined to one
_LARGE: Final = 65_536  # rows that are joined in one call at most, and so those of a joined chunk
_SPANS: Final = 8  # of a chunk in the allowed lateness, where batches are shorter than that


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is known of a chunk without reading it.

    Attributes:
        number: under which it is kept.
        first_ms: event time of the first row that is still to be judged.
        last_ms: event time of the last.
        rows: how many it holds.
        signals: whether it is written by `to_wire`; otherwise its columns are those of `ROW_SCHEMA`.
    """

    number: int
    first_ms: int
    last_ms: int
    rows: int
    signals: bool

    def to_plain(self) -> list[Any]:
        """Return it as JSON has it."""
        return [self.number, self.first_ms, self.last_ms, self.rows, int(self.signals)]


@dataclass(slots=True)
class PendingRows:
    """The chunks of a shard in a key group.

    Attributes:
        chunks: in the order in which they were written.
        written: how many were ever written: the next one's number.
    """

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    written: int = 0

    def __len__(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def first_ms(self) -> int | None:
        """Return the event time of the first row that waits."""
        return min((chunk.first_ms for chunk in self.chunks), default=None)

    def write(self, batch: pa.RecordBatch, width_ms: int, chosen: NDArray[np.bool_] | None = None) -> list[tuple[int, bytes]]:
        """Take in rows; return the chunks to be kept, by number.

        Args:
            batch: columns of `SIGNAL_SCHEMA` or `ROW_SCHEMA`.
            width_ms: of the span of event time that a chunk holds.
            chosen: the rows that are taken in; None takes all.
        """
        order = np.arange(batch.num_rows) if chosen is None else np.flatnonzero(chosen)
        if not len(order):
            return []
        signals = batch.schema.equals(SIGNAL_SCHEMA)
        event_ms = _instants(batch)[order]
        spans = event_ms // width_ms
        if spans.min() != spans.max():
            by_span = np.argsort(spans, kind="stable")
            order, event_ms, spans = order[by_span], event_ms[by_span], spans[by_span]
        edges = [0, *(np.flatnonzero(np.diff(spans)) + 1).tolist(), len(order)]
        begun = len(self.chunks)
        for begin, end in pairwise(edges):
            times = event_ms[begin:end]
            self.chunks.append(Chunk(self.written, int(times.min()), int(times.max()), end - begin, signals))
            self.written += 1
        written = to_wires(batch, order, edges) if signals else _to_parts(batch, order, edges)
        return [(chunk.number, part) for chunk, part in zip(self.chunks[begun:], written, strict=True)]

    def join(
        self, through_ms: int | None, before: int, read: Read, *, moving: bool = False
    ) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Join neighbours in event time where there are many, of signals and of other rows.

        Args:
            through_ms: the frontier: what lies at or before it has been judged.
            before: the number from which on chunks cannot be read yet.
            read: returns a chunk by its number.
            moving: whether the frontier has moved in this call.

        Returns:
            The chunks to be kept, with their numbers, and the numbers of those that are in them; none of either where few wait.
        """
        kept: list[tuple[int, bytes]] = []
        gone: set[int] = set()
        for signals, read_from, written_by in ((True, from_wire, to_wire), (False, from_bytes, to_bytes)):
            known = [one for one in self.chunks if one.signals is signals and one.number < before]
            left, most = _LARGE, MOST_MOVING if moving else MOST
            while len(known) > most and (near := _neighbours(known, left)):
                parts = {one.number for one in near}
                whole = pa.concat_batches([read_from(read(number)) for number in sorted(parts)])
                if through_ms is not None:
                    whole = filtered(whole, _instants(whole) > through_ms)
                event_ms = _instants(whole)
                joined = Chunk(self.written, int(event_ms.min()), int(event_ms.max()), whole.num_rows, signals)
                self.chunks = [*(chunk for chunk in self.chunks if chunk.number not in parts), joined]
                self.written += 1
                kept.append((joined.number, written_by(whole)))
                gone |= parts
                known = [one for one in known if one.number not in parts]
                left -= sum(one.rows for one in near)
        return kept, sorted(gone)

    def take(
        self, after_ms: int | None, through_ms: int, read: Read
    ) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch], list[int]]:
        """Take what is due.

        Args:
            after_ms: the frontier before: what lies at or before it has been judged.
            through_ms: the frontier now.
            read: returns a chunk by its number.

        Returns:
            Due batches of signals and of other rows, and the numbers of the chunks that are no longer needed.
        """
        signals: list[pa.RecordBatch] = []
        others: list[pa.RecordBatch] = []
        gone: list[int] = []
        kept: list[Chunk] = []
        for chunk in self.chunks:
            if chunk.first_ms > through_ms:
                kept.append(chunk)
                continue
            written = read(chunk.number)
            batch = from_wire(written) if chunk.signals else from_bytes(written)
            event_ms = _instants(batch)
            due = event_ms <= through_ms
            if after_ms is not None:
                due &= event_ms > after_ms
            (signals if chunk.signals else others).append(filtered(batch, due))
            if chunk.last_ms <= through_ms:
                gone.append(chunk.number)
            else:
                kept.append(replace(chunk, first_ms=int(event_ms[event_ms > through_ms].min())))
        self.chunks = kept
        return signals, others, gone


def waiting_to_plain(waiting: Sequence[PendingRows]) -> dict[str, Any]:
    """Return the pending chunks of each shard for JSON; chunks of all shards but the first carry the shard's number."""
    chunks = [[*chunk.to_plain(), *([shard] if shard else [])] for shard, of_it in enumerate(waiting) for chunk in of_it.chunks]
    return {"written": max(of_it.written for of_it in waiting), "chunks": chunks}


def waiting_from_plain(plain: Mapping[str, Any], shards: int) -> list[PendingRows]:
    """Parse the pending chunks of so many shards, the inverse of `waiting_to_plain`."""
    waiting = [PendingRows(written=plain["written"]) for _ in range(shards)]
    for values in plain["chunks"]:
        shard = values[5] if len(values) > 5 else 0
        waiting[shard].chunks.append(Chunk(*values[:4], signals=bool(values[4])))
    return waiting


def _instants(batch: pa.RecordBatch) -> Int64s:
    """Return the instants at which rows are judged: presence time of signals, event time of other rows."""
    signals = batch.schema.equals(SIGNAL_SCHEMA)
    return batch["presence_ms" if signals else "event_time_ms"].to_numpy()


def _to_parts(batch: pa.RecordBatch, order: Int64s, edges: Sequence[int]) -> list[bytes]:
    ordered = taken(batch, order)
    return [to_bytes(ordered.slice(begin, end - begin)) for begin, end in pairwise(edges)]


def _neighbours(chunks: list[Chunk], most_rows: int) -> list[Chunk]:
    """Return the neighbours in event time to be joined; none where any of them have more rows together than that.

    Those of the fewest rows of which none has more than half: then a row that is written again is in a chunk of twice the rows.
    """
    ordered = sorted(chunks, key=lambda one: (one.first_ms, one.number))
    windows = np.lib.stride_tricks.sliding_window_view([one.rows for one in ordered], min(_AT_ONCE, len(ordered)))
    sums, count = windows.sum(axis=1), windows.shape[1]
    begin = int(np.lexsort((sums, 2 * windows.max(axis=1) > sums, sums > most_rows))[0])
    return ordered[begin : begin + count] if sums[begin] <= most_rows else []


def span_ms(advance_ms: int, lateness_ms: int) -> int:
    """Return the width of the span that a chunk holds: what comes due in one call, but not less than a part of the lateness.

    Args:
        advance_ms: how far the frontier has moved in this call.
        lateness_ms: allowed lateness.
    """
    least = max(advance_ms, lateness_ms // _SPANS, 1)
    return 1 << (least - 1).bit_length()
