"""What waits for its time is kept in few chunks, whatever it is."""

import pytest

from fleetpulse.columnar.blocks import batch_to_rows, rows_to_batch
from fleetpulse.columnar.waiting import MOST, MOST_MOVING, Waiting
from tests.histories import START, row

pytestmark = pytest.mark.unit


def test_rows_of_ours_that_wait_behind_an_open_gap_are_joined_as_signals_are() -> None:
    waiting, kept = Waiting(), dict[int, bytes]()
    rows = [row(at, f"gw-{at}/death") for at in range(3 * MOST)]  # gateways that die one by one while a bridge is away
    most = 0
    for one in rows:
        before = waiting.written
        kept |= dict(waiting.write(rows_to_batch([one]), 1_000))
        joined, gone = waiting.join(None, before, kept.__getitem__)
        kept = {number: content for number, content in (kept | dict(joined)).items() if number not in gone}
        most = max(most, len(waiting.chunks))
        assert sorted(kept) == sorted(chunk.number for chunk in waiting.chunks)
    assert most <= MOST + 2
    assert len(waiting) == len(rows)
    _, others, gone = waiting.take(None, START + 10**9, kept.__getitem__)
    assert sorted(gone) == sorted(kept)
    assert {(one.device_id, one.event_time_ms) for batch in others for one in batch_to_rows(batch)} == {
        (one.device_id, one.event_time_ms) for one in rows
    }


def test_a_lateness_of_very_many_batches_waits_in_few_chunks_and_each_row_is_due_in_its_call() -> None:
    waiting, kept = Waiting(), dict[int, bytes]()
    batches, lateness = 5 * MOST_MOVING, 3 * MOST_MOVING  # a batch a second
    most = rewritten = 0
    for at in range(batches + lateness):
        frontier_ms = START + (at - lateness) * 1_000
        _, others, gone = waiting.take(frontier_ms - 1_000, frontier_ms, kept.__getitem__)
        due = [one.event_time_ms for batch in others for one in batch_to_rows(batch)]
        assert due == ([frontier_ms] if at >= lateness else [])
        before = waiting.written
        if at < batches:
            kept |= dict(waiting.write(rows_to_batch([row(at, f"gw-{at}/death")]), 1_000))
        joined, parts = waiting.join(frontier_ms, before, kept.__getitem__, moving=True)
        rewritten += sum(one.rows for one in waiting.chunks if one.number in dict(joined))
        kept = {number: content for number, content in (kept | dict(joined)).items() if number not in {*gone, *parts}}
        assert sorted(kept) == sorted(chunk.number for chunk in waiting.chunks)
        most = max(most, len(waiting.chunks))
    assert most <= MOST_MOVING + 2 and not kept
    assert rewritten < 3 * batches, "what waits is written again a time or two, not in each call"
