"""Chunks of pending rows: written once, read when due, then deleted.

Rule 1: a chunk covers one span of event time, so few chunks are read at a time.
Rule 2: chunks are compacted only if there are many: while the frontier does not move, as in an open
coverage gap, or if the allowed lateness spans very many batches. Neighbours in event time are
joined, those with the fewest rows and of similar size first, so a row is rewritten only a few
times. The number of chunks is bounded by ``MAX_CHUNKS`` or ``MAX_CHUNKS_MOVING``, and one more for each 4,096
rows.
Rule 3: a row is due in the call that moves the frontier to or past it. Rows at or before the
previous frontier have been judged.
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
from fleetpulse.columnar.jit.context import Int64s
from fleetpulse.columnar.jit.take import filtered, taken

Read = Callable[[int], bytes]
MAX_CHUNKS: Final = 64  # maximum number of chunks of signals, and of other rows, before a compaction
# The maximum while the frontier moves: a joined chunk is read in each call until all of it is due.
MAX_CHUNKS_MOVING: Final = 512
_AT_ONCE: Final = 16  # chunks that are joined into one
_LARGE: Final = 65_536  # maximum number of rows that one call joins, and so of a joined chunk
_SPANS: Final = 8  # spans in the allowed lateness, if batches are shorter than a span


@dataclass(frozen=True, slots=True)
class Chunk:
    """Metadata of a chunk.

    Attributes:
        number: key under which the chunk is stored.
        first_ms: least instant of the rows that are not judged yet (see `_instants`).
        last_ms: greatest instant of the rows.
        rows: number of rows in the chunk.
        signals: whether the chunk was written by `to_wire`; otherwise it has the columns of
            `ROW_SCHEMA`.
    """

    number: int
    first_ms: int
    last_ms: int
    rows: int
    signals: bool

    def to_plain(self) -> list[Any]:
        """Return the metadata as JSON values."""
        return [self.number, self.first_ms, self.last_ms, self.rows, int(self.signals)]


@dataclass(slots=True)
class PendingRows:
    """Chunks of a shard in a key group.

    Attributes:
        chunks: metadata of the chunks, in the order in which they were written.
        written: number of chunks ever written, which is the number of the next chunk.
    """

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    written: int = 0

    def __len__(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def first_ms(self) -> int | None:
        """Return the instant of the first pending row; None if there is none."""
        return min((chunk.first_ms for chunk in self.chunks), default=None)

    def write(self, batch: pa.RecordBatch, width_ms: int, chosen: NDArray[np.bool_] | None = None) -> list[tuple[int, bytes]]:
        """Add rows as new chunks; return the chunks to store, with their numbers.

        Args:
            batch: columns of `SIGNAL_SCHEMA` or `ROW_SCHEMA`.
            width_ms: width of the span of event time that a chunk covers.
            chosen: mask of the rows to add; None adds all.
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
        first_new = len(self.chunks)
        for start, end in pairwise(edges):
            times = event_ms[start:end]
            self.chunks.append(Chunk(self.written, int(times.min()), int(times.max()), end - start, signals))
            self.written += 1
        written = to_wires(batch, order, edges) if signals else _to_parts(batch, order, edges)
        return [(chunk.number, part) for chunk, part in zip(self.chunks[first_new:], written, strict=True)]

    def join(
        self, through_ms: int | None, before: int, read: Read, *, moving: bool = False
    ) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Compact neighbouring chunks if there are many, of signals and of other rows.

        Args:
            through_ms: frontier; rows at or before it have been judged and are dropped.
            before: number from which on chunks cannot be read yet.
            read: function that returns a chunk by its number.
            moving: whether the frontier has moved in this call.

        Returns:
            The chunks to store, with their numbers; and the numbers of the chunks that they
            replace. Both are empty if there are few chunks.
        """
        added: list[tuple[int, bytes]] = []
        replaced: set[int] = set()
        for signals, read_from, written_by in ((True, from_wire, to_wire), (False, from_bytes, to_bytes)):
            known = [one for one in self.chunks if one.signals is signals and one.number < before]
            left, most = _LARGE, MAX_CHUNKS_MOVING if moving else MAX_CHUNKS
            while len(known) > most and (near := _neighbours(known, left)):
                parts = {one.number for one in near}
                whole = pa.concat_batches([read_from(read(number)) for number in sorted(parts)])
                if through_ms is not None:
                    whole = filtered(whole, _instants(whole) > through_ms)
                event_ms = _instants(whole)
                joined = Chunk(self.written, int(event_ms.min()), int(event_ms.max()), whole.num_rows, signals)
                self.chunks = [*(chunk for chunk in self.chunks if chunk.number not in parts), joined]
                self.written += 1
                added.append((joined.number, written_by(whole)))
                replaced |= parts
                known = [one for one in known if one.number not in parts]
                left -= sum(one.rows for one in near)
        return added, sorted(replaced)

    def take(
        self, after_ms: int | None, through_ms: int, read: Read
    ) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch], list[int]]:
        """Remove and return the due rows.

        Args:
            after_ms: previous frontier; rows at or before it have been judged.
            through_ms: current frontier.
            read: function that returns a chunk by its number.

        Returns:
            Due batches of signals, due batches of other rows, and the numbers of the chunks to
            delete.
        """
        signals: list[pa.RecordBatch] = []
        others: list[pa.RecordBatch] = []
        deleted: list[int] = []
        remaining: list[Chunk] = []
        for chunk in self.chunks:
            if chunk.first_ms > through_ms:
                remaining.append(chunk)
                continue
            written = read(chunk.number)
            batch = from_wire(written) if chunk.signals else from_bytes(written)
            event_ms = _instants(batch)
            due = event_ms <= through_ms
            if after_ms is not None:
                due &= event_ms > after_ms
            (signals if chunk.signals else others).append(filtered(batch, due))
            if chunk.last_ms <= through_ms:
                deleted.append(chunk.number)
            else:
                remaining.append(replace(chunk, first_ms=int(event_ms[event_ms > through_ms].min())))
        self.chunks = remaining
        return signals, others, deleted


def pending_to_plain(waiting: Sequence[PendingRows]) -> dict[str, Any]:
    """Return the metadata of the pending chunks of each shard as JSON values.

    A chunk has the number of its shard as last item, except in the first shard.
    """
    chunks = [
        [*chunk.to_plain(), *([shard] if shard else [])]
        for shard, shard_rows in enumerate(waiting)
        for chunk in shard_rows.chunks
    ]
    return {"written": max(shard_rows.written for shard_rows in waiting), "chunks": chunks}


def pending_from_plain(plain: Mapping[str, Any], shards: int) -> list[PendingRows]:
    """Inverse of `pending_to_plain`, given the number of shards."""
    waiting = [PendingRows(written=plain["written"]) for _ in range(shards)]
    for values in plain["chunks"]:
        shard = values[5] if len(values) > 5 else 0
        waiting[shard].chunks.append(Chunk(*values[:4], signals=bool(values[4])))
    return waiting


def _instants(batch: pa.RecordBatch) -> Int64s:
    """Return the instants of rows: presence time of signals, event time of others."""
    signals = batch.schema.equals(SIGNAL_SCHEMA)
    return batch["presence_ms" if signals else "event_time_ms"].to_numpy()


def _to_parts(batch: pa.RecordBatch, order: Int64s, edges: Sequence[int]) -> list[bytes]:
    ordered = taken(batch, order)
    return [to_bytes(ordered.slice(start, end - start)) for start, end in pairwise(edges)]


def _neighbours(chunks: list[Chunk], most_rows: int) -> list[Chunk]:
    """Choose neighbours in event time to join; none if all exceed ``most_rows``.

    Together they have the fewest rows of all neighbours, and none has more than half of these rows.
    So a rewritten row is in a chunk with at least twice as many rows as before.
    """
    ordered = sorted(chunks, key=lambda one: (one.first_ms, one.number))
    windows = np.lib.stride_tricks.sliding_window_view([one.rows for one in ordered], min(_AT_ONCE, len(ordered)))
    sums, count = windows.sum(axis=1), windows.shape[1]
    start = int(np.lexsort((sums, 2 * windows.max(axis=1) > sums, sums > most_rows))[0])
    return ordered[start : start + count] if sums[start] <= most_rows else []


def span_ms(advance_ms: int, lateness_ms: int) -> int:
    """Return the width of a chunk's span of event time, a power of two.

    It is at least the advance of the frontier in one call, and at least a part of the allowed
    lateness.

    Args:
        advance_ms: advance of the frontier in this call.
        lateness_ms: allowed lateness.
    """
    least = max(advance_ms, lateness_ms // _SPANS, 1)
    return 1 << (least - 1).bit_length()
