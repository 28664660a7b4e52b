"""Outbox: judgements written with a new generation and published after the switch.

Rule 1: they are written into the generation's checkpoint before the switch, and published to the
table ``judgements`` after it. A crash in between neither loses them nor publishes them for a
generation that was never activated.
Rule 2: they are published by the command that wrote them, by the next command, or by the job when
it starts. The table's log records the number of published row groups of each file, so none is
published twice.
"""

import secrets
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.generations import checkpoint_of
from fleetpulse.io.delta.corruption import reporting_corruption_of_file
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

_NAMED: Final = "unsaid-"


def outbox_path(checkpoint: Path) -> Path:
    """Return a new path for an outbox file in a checkpoint.

    The file has the columns of `JUDGEMENTS`. Its name is the writer in the commits of the table.
    """
    return checkpoint / f"{_NAMED}{secrets.token_hex(8)}.parquet"


def is_outbox(writer: str) -> bool:
    """Return whether a writer in the commits of the table is an outbox file."""
    return writer.startswith(_NAMED)


def flush_outbox(home: Home, number: int) -> int:
    """Publish the remaining judgements of a generation's outbox; remove its files.

    Args:
        home: home of the generation; the caller holds its state lock.
        number: number of the generation, which must be the current one.

    Returns:
        Number of judgements published.

    Raises:
        DamagedError: a file of the outbox cannot be read.
    """
    published = 0
    for path in sorted(checkpoint_of(home.lifecycle, number).glob(f"{_NAMED}*.parquet")):
        tables.create(home, JUDGEMENTS)
        first, group = tables.landed(home, JUDGEMENTS, path.stem), 0
        while (rows := _group(path, first + group)) is not None:
            group += 1
            tables.append(home, JUDGEMENTS, rows, path.stem, first + group)
            published += rows.num_rows
        path.unlink()
    return published


def _group(path: Path, number: int) -> pa.Table | None:
    """Return a row group of an outbox file; None after the last one."""
    with reporting_corruption_of_file(path), pq.ParquetFile(path) as file:
        return None if number >= file.num_row_groups else file.read_row_group(number).cast(tables.arrow_schema(JUDGEMENTS))
