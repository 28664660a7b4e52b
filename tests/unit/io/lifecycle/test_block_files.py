"""Block files between tasks: a block is read as it was written, or the read fails."""

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
def test_rows_refer_to_their_blocks_in_one_file(tmp_path: Path, part: slice) -> None:
    rows = ROWS.slice(part.start, part.stop - part.start)
    handed_over = write_blocks(rows, "signals", str(tmp_path))
    assert handed_over["signals"].null_count == len(BLOCKS[part])
    assert [read_block(row, "signals") for row in _rows(handed_over)] == BLOCKS[part]
    assert len(list(tmp_path.iterdir())) == 1
    write_blocks(rows, "signals", str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2, "a repeated task writes a new file"


def test_no_file_is_written_without_a_folder_or_without_blocks(tmp_path: Path) -> None:
    assert [read_block(row, "signals") for row in _rows(write_blocks(ROWS, "signals", None))] == BLOCKS
    empty = write_blocks(ROWS.slice(1, 2), "signals", str(tmp_path))
    assert [read_block(row, "signals") for row in _rows(empty)] == [None, b""]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"fir"])
def test_missing_or_truncated_block_file_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    row = _rows(write_blocks(ROWS, "signals", str(tmp_path)))[3]
    if content is None:
        Path(row.file).unlink()
    else:
        Path(row.file).write_bytes(content)
    with refused("block-file-missing"):
        read_block(row, "signals")


def test_batch_removes_the_block_folders_of_other_batches_only(tmp_path: Path) -> None:
    folders = tmp_path / "blocks"
    first = Path(folder_for(str(folders), 0, 3))
    (first / "one").touch()
    assert folder_for(str(folders), 0, 3) == str(first) and list(first.iterdir()) == [first / "one"]
    second = Path(folder_for(str(folders), 3, 4))
    assert list(folders.iterdir()) == [second]
