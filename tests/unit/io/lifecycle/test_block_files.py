"""Blocks that are handed over by files: what is read is what was written, or an error."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import Row

from fleetpulse.io.lifecycle.block_files import folder_for, read_block, write_blocks
from tests.support.refusals import refused

BLOCKS = [b"first", None, b"", b"the fourth"]
ROWS = pa.record_batch({"key_group": pa.array([7, 8, 9, 10]), "signals": pa.array(BLOCKS, pa.binary())})


def _rows(batch: pa.RecordBatch) -> list[Row]:
    return [Row(**row) for row in batch.to_pylist()]


@pytest.mark.parametrize("part", [slice(0, 4), slice(1, 4), slice(3, 4)])
def test_each_row_gets_its_block_back_and_carries_none_itself(tmp_path: Path, part: slice) -> None:
    rows = ROWS.slice(part.start, part.stop - part.start)
    handed_over = write_blocks(rows, "signals", str(tmp_path))
    assert handed_over["signals"].null_count == len(BLOCKS[part])
    assert [read_block(row, "signals") for row in _rows(handed_over)] == BLOCKS[part]
    assert len(list(tmp_path.iterdir())) == 1
    write_blocks(rows, "signals", str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2, "a task that is run again writes a file of its own"


def test_without_a_folder_and_without_a_block_no_file_is_written(tmp_path: Path) -> None:
    assert [read_block(row, "signals") for row in _rows(write_blocks(ROWS, "signals", None))] == BLOCKS
    nothing = write_blocks(ROWS.slice(1, 2), "signals", str(tmp_path))
    assert [read_block(row, "signals") for row in _rows(nothing)] == [None, b""]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [None, b"fir"])
def test_a_block_that_is_not_whole_is_an_error(tmp_path: Path, left: bytes | None) -> None:
    row = _rows(write_blocks(ROWS, "signals", str(tmp_path)))[3]
    if left is None:
        Path(row.file).unlink()
    else:
        Path(row.file).write_bytes(left)
    with refused("block-file-missing"):
        read_block(row, "signals")


def test_a_batch_takes_away_what_the_one_before_it_left_and_not_its_own(tmp_path: Path) -> None:
    folders = tmp_path / "blocks"
    first = Path(folder_for(str(folders), 0, 3))
    (first / "one").touch()
    assert folder_for(str(folders), 0, 3) == str(first) and list(first.iterdir()) == [first / "one"]
    second = Path(folder_for(str(folders), 3, 4))
    assert list(folders.iterdir()) == [second]
