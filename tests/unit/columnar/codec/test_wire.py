"""Signals on the wire: what is written is read, whatever the columns hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.columnar.codec.arrow import signals_to_batch
from fleetpulse.columnar.codec.wire import from_wire, to_wire
from fleetpulse.core.rows import FROM_DEVICES, Clock, Kind, Row

INT64 = st.integers(-(2**62), 2**62)
WORDS = st.none() | st.text(max_size=5)
ROWS = st.builds(
    Row,
    received_at_ms=INT64 | st.integers(0, 3),
    kind=st.sampled_from(sorted(FROM_DEVICES)),
    device_id=st.text(min_size=1, max_size=6),
    site=st.text(max_size=3),
    event_time_ms=INT64 | st.integers(0, 70_000),
    clock=st.sampled_from([Clock.DEVICE, Clock.RECEIVED]),
    boot=WORDS,
    seq=st.none() | st.integers(0, 2**63 - 1),
    code=WORDS,
    gateway=WORDS,
    digest=INT64,
    session=WORDS,
    position=st.integers(0, 3) | st.integers(0, 2**40),
)


@given(st.lists(ROWS, min_size=1, max_size=30))
def test_what_is_written_is_read(rows: list[Row]) -> None:
    batch = signals_to_batch(rows)
    assert from_wire(to_wire(batch)).equals(batch)


@pytest.mark.parametrize("words", [127, 128, 129, 40_000])
def test_more_words_than_a_byte_can_count_are_read(words: int) -> None:
    batch = signals_to_batch([Row(1, Kind.HEARTBEAT, "d", f"site-{number}", 1, seq=number) for number in range(words)])
    assert from_wire(to_wire(batch)).equals(batch)


def test_a_part_of_a_batch_is_written_alone() -> None:
    batch = signals_to_batch([Row(number, Kind.HEARTBEAT, f"d{number}", "s", number) for number in range(10)])
    assert from_wire(to_wire(batch.slice(3, 4))).equals(batch.slice(3, 4))


def test_text_of_one_length_is_written_without_saying_where_each_begins() -> None:
    rows = [Row(1, Kind.HEARTBEAT, f"device-{number:04}", "s", 1, boot="b1", seq=1) for number in range(1000)]
    batch, uneven = signals_to_batch(rows), signals_to_batch([*rows[1:], Row(1, Kind.HEARTBEAT, "d", "s", 1, boot="b", seq=1)])
    assert from_wire(to_wire(batch.slice(7, 900))).equals(batch.slice(7, 900))
    assert len(to_wire(uneven)) - len(to_wire(batch)) > 7 * len(rows)  # of two columns, four bytes a row each
