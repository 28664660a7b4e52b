"""Verdicts that are to be said with the work that a generation gets: beside its checkpoint until they are in the table.

Rule 1: they are there before the generation has the work, and are said after it has: whoever dies between, they are neither lost
nor said for one that was not to be.
Rule 2: who comes first says them: the verb that wrote them, the next one, or the job when it starts. The table knows how many of
them it has, so that none is said twice.
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
    """Return a new name for verdicts that are to be said: columns of `JUDGEMENTS`. By that name the table knows them."""
    return checkpoint / f"{_NAMED}{secrets.token_hex(8)}.parquet"


def flush_outbox(home: Home, number: int) -> int:
    """Say the verdicts that a generation got with its work, and has not said; return how many.

    Args:
        home: the home, its state held by the caller.
        number: of the generation; it has the work.

    Raises:
        DamagedError: they cannot be read.
    """
    said = 0
    for path in sorted(checkpoint_of(home.lifecycle, number).glob(f"{_NAMED}*.parquet")):
        tables.create(home, JUDGEMENTS)
        begin, group = tables.landed(home, JUDGEMENTS, path.stem), 0
        while (rows := _group(path, begin + group)) is not None:
            group += 1
            tables.append(home, JUDGEMENTS, rows, path.stem, begin + group)
            said += rows.num_rows
        path.unlink()
    return said


def _group(path: Path, number: int) -> pa.Table | None:
    """Return a part of the verdicts; None behind the last."""
    with reporting_corruption_of_file(path), pq.ParquetFile(path) as file:
        return None if number >= file.num_row_groups else file.read_row_group(number).cast(tables.arrow_schema(JUDGEMENTS))
