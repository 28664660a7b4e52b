"""Blocks on the machine's own disk, from the task that packs them to the one that folds them: Spark carries where they lie.

Rule 1: a file holds what one task packed, and a folder what one batch did; it goes when the next batch is planned, and the last
with the query. A task that is run again writes a file of its own.
Rule 2: a block that is not there whole is an error, and the batch is made again from bronze; nothing is ever passed over.
Rule 3: where tasks may run on other machines, blocks travel in the rows.

Source: docs/adr/0021-blocks-go-by-files.md
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
    """Return the folder of a batch, and take those of others away.

    Args:
        folders: of the query.
        start: the batch's first version.
        end: the version after its last.
    """
    own = Path(folders, f"{start}-{end}")
    for other in Path(folders).glob("*"):
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    return str(own)


def write_blocks(blocks: pa.RecordBatch, name: str, folder: str | None) -> pa.RecordBatch:
    """Write a column of blocks to a file, and return the rows with where each lies.

    Args:
        blocks: rows with a binary column.
        name: of this column; empty where its blocks went to a file.
        folder: of the batch; None where rows carry the blocks.

    Returns:
        The rows with `COLUMNS` added, which are null where a row carries its block.
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
    begins, sizes = ends[:-1] - ends[0], np.diff(ends)
    places = [np.full(count, str(file), object), begins, sizes]
    return _with(bare, [pa.array(one, field.type, mask=missing) for one, field in zip(places, _FIELDS, strict=True)])


def read_block(row: Any, name: str) -> bytes | None:
    """Return a row's block; None where it has none.

    Args:
        row: with the column of blocks and `COLUMNS`.
        name: of the column of blocks.

    Raises:
        FleetError: the file is gone, or is not whole.
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
            f"{row.file}: {len(found)} of a block's {row.size} bytes are left: the file was taken away while it was in use; "
            "start the stream again: it makes the batch anew from bronze, and nothing is lost",
            code="block-file-missing",
        )
    return found


def _with(blocks: pa.RecordBatch, places: list[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*blocks.columns, *places], schema=pa.schema([*blocks.schema, *_FIELDS]))
