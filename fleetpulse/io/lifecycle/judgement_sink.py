"""Streaming sink of the lifecycle query: one Delta commit a batch of judgements.

Rule 1: a batch is committed once: its commit carries the query id and the batch number (Delta's
``txn``). A batch that the table already has still runs, because the state of the query needs it.
Its judgements are dropped.
Rule 2: the row of a key group carries its judgements. If they are many, the task writes them to
files, and the row names the files.
Rule 3: files are durable before the commit that names them. Files that no commit names are removed.

Source: docs/adr/0034-judgement-sink.md
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from fleetpulse.columnar.codec.arrow import from_bytes
from fleetpulse.columnar.compute import pc
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.appender import remove_files, write_files
from fleetpulse.io.delta.commits import Added
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.batch_appender import BatchAppender

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_INSTANT: Final = pa.timestamp("us", "UTC")


class JudgementSink:
    """Function for ``foreachBatch`` that commits batches to a table.

    Args:
        table: folder of the judgements table; a missing table is created.
        checkpoint: checkpoint of the query.
        generation: generation of the job.
    """

    def __init__(self, table: Path, checkpoint: Path, generation: int) -> None:
        self._table, self._generation = table, generation
        tables.create_at(table, JUDGEMENTS)
        self._batches = BatchAppender(table, checkpoint)

    def __call__(self, batch: "DataFrame", batch_id: int) -> None:
        """Run a batch and commit its judgements unless the table already has them."""
        rows = batch.collect()
        filed = [Added(**one) for row in rows if row.files is not None for one in json.loads(row.files)]
        inline = [from_bytes(row.judgements) for row in rows if row.judgements is not None]
        try:
            if self._batches.has(batch_id):
                remove_files(self._table, filed)
                return
            added = [*filed, *self._write(inline)]
        except BaseException:
            remove_files(self._table, filed)
            raise
        self._batches.commit(added, batch_id)

    def _write(self, inline: Sequence[pa.RecordBatch]) -> list[Added]:
        if not inline:
            return []
        return files_of(self._table, pa.Table.from_batches([with_table_columns(one, self._generation) for one in inline]))


def files_of(table: Path, judgements: pa.Table) -> list[Added]:
    """Write judgements to files in the folder of a table, one file for each kind."""
    return write_files(table, judgements, JUDGEMENTS.partitioned_by)


def write_to_files(table: str, judgements: pa.RecordBatch, generation: int) -> str:
    """Write the judgements of a key group to files; return the files as JSON.

    Args:
        table: folder of the judgements table.
        judgements: judgements with the columns of `JUDGEMENT_SCHEMA`.
        generation: generation of the job.
    """
    added = files_of(Path(table), pa.Table.from_batches([with_table_columns(judgements, generation)]))
    return json.dumps([asdict(one) for one in added])


def with_table_columns(judgements: pa.RecordBatch, generation: int) -> pa.RecordBatch:
    """Add the columns of `JUDGEMENTS` that the fold does not produce.

    Args:
        judgements: judgements with the columns of `JUDGEMENT_SCHEMA`.
        generation: generation of the job.
    """
    added = {
        "judged_at": pa.scalar(time.time_ns() // 1000, pa.int64()).cast(_INSTANT),
        "generation": pa.scalar(generation, pa.int32()),
    }
    columns: dict[str, pa.Array] = {name: pa.repeat(value, judgements.num_rows) for name, value in added.items()}
    for column in JUDGEMENTS.columns:
        if column.name not in added:
            instant = column.type == "timestamp"
            columns[column.name] = _instants(judgements[f"{column.name}_ms"]) if instant else judgements[column.name]
    return pa.RecordBatch.from_pydict({column.name: columns[column.name] for column in JUDGEMENTS.columns})


def _instants(millis: pa.Array) -> pa.Array:
    return pc.multiply(millis, 1000).cast(_INSTANT)
