"""What waits for its time is kept in few chunks, whatever it is."""

import pytest

from fleetpulse.columnar.blocks import batch_to_rows, rows_to_batch
from fleetpulse.columnar.waiting import MOST, Waiting
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
