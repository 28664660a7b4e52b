"""Wire format of signals: a batch reads back as it was written, with any columns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.columnar.codec.arrow import signals_to_batch
from fleetpulse.columnar.codec.wire import from_wire, to_wire
from fleetpulse.core.rows import FROM_DEVICES, Clock, Kind, Row

INT64 = st.integers(-(2**62), 2**62)
TEXTS = st.none() | st.text(max_size=5)
ROWS = st.builds(
    Row,
    received_at_ms=INT64 | st.integers(0, 3),
    kind=st.sampled_from(sorted(FROM_DEVICES)),
    device_id=st.text(min_size=1, max_size=6),
    site=st.text(max_size=3),
    event_time_ms=INT64 | st.integers(0, 70_000),
    clock=st.sampled_from([Clock.DEVICE, Clock.RECEIVED]),
    boot=TEXTS,
    seq=st.none() | st.integers(0, 2**63 - 1),
    code=TEXTS,
    gateway=TEXTS,
    digest=INT64,
    session=TEXTS,
    position=st.integers(0, 3) | st.integers(0, 2**40),
)


@given(st.lists(ROWS, min_size=1, max_size=30))
def test_a_batch_reads_back_unchanged(rows: list[Row]) -> None:
    batch = signals_to_batch(rows)
    assert from_wire(to_wire(batch)).equals(batch)


@pytest.mark.parametrize("texts", [127, 128, 129, 40_000])
def test_a_column_with_more_texts_than_a_byte_can_index_reads_back(texts: int) -> None:
    batch = signals_to_batch([Row(1, Kind.HEARTBEAT, "d", f"site-{number}", 1, seq=number) for number in range(texts)])
    assert from_wire(to_wire(batch)).equals(batch)


def test_a_slice_of_a_batch_is_written_alone() -> None:
    batch = signals_to_batch([Row(number, Kind.HEARTBEAT, f"d{number}", "s", number) for number in range(10)])
    assert from_wire(to_wire(batch.slice(3, 4))).equals(batch.slice(3, 4))


def test_texts_of_equal_length_are_written_without_offsets() -> None:
    rows = [Row(1, Kind.HEARTBEAT, f"device-{number:04}", "s", 1, boot="b1", seq=1) for number in range(1000)]
    batch, uneven = signals_to_batch(rows), signals_to_batch([*rows[1:], Row(1, Kind.HEARTBEAT, "d", "s", 1, boot="b", seq=1)])
    assert from_wire(to_wire(batch.slice(7, 900))).equals(batch.slice(7, 900))
    assert len(to_wire(uneven)) - len(to_wire(batch)) > 7 * len(rows)  # offsets of two columns, four bytes a row each
