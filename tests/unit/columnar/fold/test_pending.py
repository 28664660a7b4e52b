"""Pending rows: few chunks hold them, for any allowed lateness and kind of row."""

from dataclasses import dataclass, field

import pytest

from fleetpulse.columnar.codec.arrow import batch_to_rows, rows_to_batch
from fleetpulse.columnar.fold.pending import MAX_CHUNKS, MAX_CHUNKS_MOVING, PendingRows
from fleetpulse.core.rows import Row
from tests.support.histories.histories import START, row

pytestmark = pytest.mark.unit


@dataclass
class StoredChunks:
    """The chunks of a key group, as its state holds them; joined rows are counted."""

    pending: PendingRows = field(default_factory=PendingRows)
    chunks: dict[int, bytes] = field(default_factory=dict[int, bytes])
    rewritten: int = 0
    most_chunks: int = 0

    def add(self, rows: list[Row], frontier_ms: int | None, *, moving: bool = False) -> None:
        before = self.pending.written
        self.chunks |= dict(self.pending.write(rows_to_batch(rows), 1_000))
        joined, removed = self.pending.join(frontier_ms, before, self.chunks.__getitem__, moving=moving)
        self.rewritten += sum(chunk.rows for chunk in self.pending.chunks if chunk.number in dict(joined))
        self._replace(dict(joined), removed)
        self.most_chunks = max(self.most_chunks, len(self.pending.chunks))

    def take(self, after_ms: int | None, through_ms: int) -> list[Row]:
        _, others, removed = self.pending.take(after_ms, through_ms, self.chunks.__getitem__)
        self._replace({}, removed)
        return [one for batch in others for one in batch_to_rows(batch)]

    def _replace(self, joined: dict[int, bytes], removed: list[int]) -> None:
        self.chunks = {number: content for number, content in (self.chunks | joined).items() if number not in removed}
        assert sorted(self.chunks) == sorted(chunk.number for chunk in self.pending.chunks)


def death(at_s: int) -> Row:
    return row(at_s, f"gw-{at_s}/death")  # one gateway dies per second


def test_internal_rows_pending_behind_an_open_gap_are_joined_like_signals() -> None:
    stored, rows = StoredChunks(), [death(at_s) for at_s in range(40 * MAX_CHUNKS)]
    for one in rows:
        stored.add([one], None)
    assert stored.most_chunks <= MAX_CHUNKS + 2
    assert stored.rewritten < 5 * len(rows), "pending rows are rewritten a few times, not in each call"
    assert len(stored.pending) == len(rows)
    due = stored.take(None, START + 10**9)
    assert not stored.chunks
    assert {(one.device_id, one.event_time_ms) for one in due} == {(one.device_id, one.event_time_ms) for one in rows}


def test_a_row_at_the_frontier_is_taken_once_though_its_chunk_remains() -> None:
    stored = StoredChunks()
    stored.chunks |= dict(stored.pending.write(rows_to_batch([death(1), death(2)]), 60_000))
    assert [one.event_time_ms for one in stored.take(None, START + 1_000)] == [START + 1_000]
    assert [one.event_time_ms for one in stored.take(START + 1_000, START + 2_000)] == [START + 2_000]
    assert not stored.chunks


def test_a_lateness_of_many_batches_needs_few_chunks_and_rows_are_due_on_time() -> None:
    stored = StoredChunks()
    batches, lateness = 5 * MAX_CHUNKS_MOVING, 3 * MAX_CHUNKS_MOVING  # a batch a second
    for at_s in range(batches + lateness):
        frontier_ms = START + (at_s - lateness) * 1_000
        due = stored.take(frontier_ms - 1_000, frontier_ms)
        assert [one.event_time_ms for one in due] == ([frontier_ms] if at_s >= lateness else [])
        stored.add([death(at_s)] if at_s < batches else [], frontier_ms, moving=True)
    assert stored.most_chunks <= MAX_CHUNKS_MOVING + 2 and not stored.chunks
    assert stored.rewritten < 3 * batches


def test_calls_with_many_spans_of_rows_leave_few_chunks() -> None:
    stored, spans = StoredChunks(), 2 * MAX_CHUNKS_MOVING
    for _ in range(3):
        stored.add([death(at_s) for at_s in range(spans)], START - 1, moving=True)
    for _ in range(2):
        stored.add([], START - 1, moving=True)
    assert len(stored.pending.chunks) <= MAX_CHUNKS_MOVING and len(stored.pending) == 3 * spans
    assert len(stored.take(START - 1, START + 10**9)) == 3 * spans and not stored.chunks
