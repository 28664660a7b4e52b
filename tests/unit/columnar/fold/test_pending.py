"""What waits for its time is kept in few chunks, whatever it is."""

from dataclasses import dataclass, field

import pytest

from fleetpulse.columnar.codec.arrow import batch_to_rows, rows_to_batch
from fleetpulse.columnar.fold.pending import MAX_CHUNKS, MAX_CHUNKS_MOVING, PendingRows
from fleetpulse.core.rows import Row
from tests.support.histories.histories import START, row

pytestmark = pytest.mark.unit


@dataclass
class Kept:
    """The chunks of a group, as the state has them: what was joined is counted."""

    waiting: PendingRows = field(default_factory=PendingRows)
    chunks: dict[int, bytes] = field(default_factory=dict[int, bytes])
    rewritten: int = 0
    most: int = 0

    def take_in(self, rows: list[Row], frontier_ms: int | None, *, moving: bool = False) -> None:
        before = self.waiting.written
        self.chunks |= dict(self.waiting.write(rows_to_batch(rows), 1_000))
        joined, gone = self.waiting.join(frontier_ms, before, self.chunks.__getitem__, moving=moving)
        self.rewritten += sum(one.rows for one in self.waiting.chunks if one.number in dict(joined))
        self._keep(dict(joined), gone)
        self.most = max(self.most, len(self.waiting.chunks))

    def take(self, after_ms: int | None, through_ms: int) -> list[Row]:
        _, others, gone = self.waiting.take(after_ms, through_ms, self.chunks.__getitem__)
        self._keep({}, gone)
        return [one for batch in others for one in batch_to_rows(batch)]

    def _keep(self, joined: dict[int, bytes], gone: list[int]) -> None:
        self.chunks = {number: content for number, content in (self.chunks | joined).items() if number not in gone}
        assert sorted(self.chunks) == sorted(chunk.number for chunk in self.waiting.chunks)


def death(at_s: int) -> Row:
    return row(at_s, f"gw-{at_s}/death")  # gateways that die one by one


def test_rows_of_ours_that_wait_behind_an_open_gap_are_joined_as_signals_are() -> None:
    kept, rows = Kept(), [death(at) for at in range(40 * MAX_CHUNKS)]
    for one in rows:
        kept.take_in([one], None)
    assert kept.most <= MAX_CHUNKS + 2
    assert kept.rewritten < 5 * len(rows), "what waits is written again a few times, not in each call"
    assert len(kept.waiting) == len(rows)
    due = kept.take(None, START + 10**9)
    assert not kept.chunks
    assert {(one.device_id, one.event_time_ms) for one in due} == {(one.device_id, one.event_time_ms) for one in rows}


def test_a_row_at_the_frontier_is_taken_once_though_its_chunk_stays_for_a_later_one() -> None:
    kept = Kept()
    kept.chunks |= dict(kept.waiting.write(rows_to_batch([death(1), death(2)]), 60_000))
    assert [one.event_time_ms for one in kept.take(None, START + 1_000)] == [START + 1_000]
    assert [one.event_time_ms for one in kept.take(START + 1_000, START + 2_000)] == [START + 2_000]
    assert not kept.chunks


def test_a_lateness_of_very_many_batches_waits_in_few_chunks_and_each_row_is_due_in_its_call() -> None:
    kept = Kept()
    batches, lateness = 5 * MAX_CHUNKS_MOVING, 3 * MAX_CHUNKS_MOVING  # a batch a second
    for at in range(batches + lateness):
        frontier_ms = START + (at - lateness) * 1_000
        due = kept.take(frontier_ms - 1_000, frontier_ms)
        assert [one.event_time_ms for one in due] == ([frontier_ms] if at >= lateness else [])
        kept.take_in([death(at)] if at < batches else [], frontier_ms, moving=True)
    assert kept.most <= MAX_CHUNKS_MOVING + 2 and not kept.chunks
    assert kept.rewritten < 3 * batches


def test_a_call_that_brings_very_many_spans_leaves_few_chunks_as_well() -> None:
    kept, spans = Kept(), 2 * MAX_CHUNKS_MOVING
    for _ in range(3):
        kept.take_in([death(at) for at in range(spans)], START - 1, moving=True)
    for _ in range(2):
        kept.take_in([], START - 1, moving=True)
    assert len(kept.waiting.chunks) <= MAX_CHUNKS_MOVING and len(kept.waiting) == 3 * spans
    assert len(kept.take(START - 1, START + 10**9)) == 3 * spans and not kept.chunks
