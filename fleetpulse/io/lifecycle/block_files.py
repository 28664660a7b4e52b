"""Handover of blocks between tasks through local files referenced by rows.

Rule 1: a file has the blocks of one task, a folder the files of one batch. The folder is removed
when the next batch is planned, or at the end of the query. A task that runs again writes a new
file.
Rule 2: a missing or incomplete block is an error. The batch is then recomputed from bronze; no
block is ever skipped.
Rule 3: if tasks may run on other machines, rows carry the blocks.

Source: docs/adr/0021-block-files-between-tasks.md
"""

import secrets
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.core.errors import FleetError

COLUMNS: Final = "file string, begin long, size long"
_NAME_BYTES: Final = 12
_FIELDS: Final = (pa.field("file", pa.string()), pa.field("begin", pa.int64()), pa.field("size", pa.int64()))


def folder_for(folders: str, start: int, end: int) -> str:
    """Create the folder of a batch, remove those of other batches, and return it.

    Args:
        folders: parent folder of the query.
        start: first version of the batch.
        end: version after the last one of the batch.
    """
    own = Path(folders, f"{start}-{end}")
    for other in Path(folders).glob("*"):
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    return str(own)


def write_blocks(blocks: pa.RecordBatch, name: str, folder: str | None) -> pa.RecordBatch:
    """Write a column of blocks to a file and return the rows with references to it.

    Args:
        blocks: rows with a binary column of blocks.
        name: name of the column; its values become null if the blocks are written to a file.
        folder: folder of the batch; None if rows carry the blocks.

    Returns:
        The rows with `COLUMNS` added. These columns are null if the row carries its block.
    """
    column = blocks[name]
    count, _, offsets, content = len(column), *column.buffers()
    ends = np.frombuffer(offsets, np.int32)[column.offset :][: count + 1].astype(np.int64)
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if folder is None or ends[-1] == ends[0]:
        return _with(blocks, [pa.nulls(count, field.type) for field in _FIELDS])
    file = Path(folder, secrets.token_hex(_NAME_BYTES))
    with file.open("xb") as out:
        out.write(memoryview(content)[ends[0] : ends[-1]])
    bare = blocks.set_column(blocks.schema.get_field_index(name), name, pa.nulls(count, pa.binary()))
    starts, sizes = ends[:-1] - ends[0], np.diff(ends)
    places = [np.full(count, str(file), object), starts, sizes]
    return _with(bare, [pa.array(one, field.type, mask=missing) for one, field in zip(places, _FIELDS, strict=True)])


def read_block(row: Any, name: str) -> bytes | None:
    """Return the block of a row; None if it has none.

    Args:
        row: row with the column of blocks and `COLUMNS`.
        name: name of the column of blocks.

    Raises:
        FleetError: the file is missing or incomplete.
    """
    if row.file is None:
        block: bytes | None = row[name]
        return block
    try:
        with Path(row.file).open("rb") as file:
            file.seek(row.begin)
            found = file.read(row.size)
    except FileNotFoundError:
        found = b""
    if len(found) != row.size:
        raise FleetError(
            f"block file {row.file} is incomplete: {len(found)} of {row.size} bytes of a block; "
            "the file was removed or truncated while in use; "
            "restart the stream: it recomputes the batch from bronze without loss",
            code="block-file-missing",
        )
    return found


def _with(blocks: pa.RecordBatch, places: list[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*blocks.columns, *places], schema=pa.schema([*blocks.schema, *_FIELDS]))
