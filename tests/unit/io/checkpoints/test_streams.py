"""Positions of the checkpoints of streams, and the versions of bronze that they keep."""

from pathlib import Path

import pytest

from fleetpulse.core.streams.names import StreamName
from fleetpulse.io.checkpoints.streams import has_begun, next_versions
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.readers import oldest_live_pin, reader_pins
from tests.support.homes.checkpoints import write_offsets
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def test_newest_committed_batch_determines_the_position(tmp_path: Path) -> None:
    assert next_versions(tmp_path) == []
    assert not has_begun(tmp_path)
    write_offsets(tmp_path, 0, {"version": 3}, committed=False)
    assert next_versions(tmp_path) == []
    assert has_begun(tmp_path)
    write_offsets(tmp_path, 1, {"version": 4}, {"reservoirVersion": 6, "index": -1}, "-")
    write_offsets(tmp_path, 2, {"version": 8}, {"reservoirVersion": 9, "index": -1}, "-", committed=False)
    assert next_versions(tmp_path) == [4, 6]


def test_damaged_offsets_are_an_error(tmp_path: Path) -> None:
    write_offsets(tmp_path, 0, '{"other": 1}')
    with refused("offsets-damaged"):
        next_versions(tmp_path)


def test_stream_keeps_the_versions_that_it_has_not_read(home: Home) -> None:
    write_offsets(home.checkpoint, 0, {"version": 9})
    assert oldest_live_pin(reader_pins(home)).version == 9
    write_offsets(home.stream_checkpoint(StreamName.VITALS), 0, {"reservoirVersion": 5, "index": -1})
    assert oldest_live_pin(reader_pins(home)).reader == "stream vitals"
    assert oldest_live_pin(reader_pins(home)).version == 5
