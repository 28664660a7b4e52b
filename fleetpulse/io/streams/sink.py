"""Streaming sink that appends the rows of a batch to a Delta table, exactly once.

Rule 1: a batch is committed once: its commit carries the query id and the batch number (Delta's ``txn``). A batch
that the table already has still runs, since the state of the query needs it; its rows are dropped.
Rule 2: while a stream is rebuilt, its table has some of its rows already, from the former checkpoint. A row whose
key the table has is dropped: equal rows of bronze give equal rows of the stream.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpulse.core.tables import Table
from fleetpulse.io.checkpoints.stream_rebuild import read_rebuild
from fleetpulse.io.delta.appender import write_files
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.batch_appender import BatchAppender

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


class TableSink:
    """Function for ``foreachBatch`` that appends batches to a table.

    Args:
        folder: folder of the table; a missing table is created.
        table: declaration of the table.
        checkpoint: checkpoint of the query.
    """

    def __init__(self, folder: Path, table: Table, checkpoint: Path) -> None:
        self._folder, self._table, self._checkpoint = folder, table, checkpoint
        tables.create_at(folder, table)
        self._batches = BatchAppender(folder, checkpoint)

    def __call__(self, batch: "DataFrame", batch_id: int) -> None:
        """Run a batch and append its rows unless the table already has them."""
        self.append(self.rows_of(batch), batch_id)

    def append(self, rows: "pa.Table", batch_id: int) -> None:
        """Append the rows of a batch unless the table already has them; without rows, there is no commit."""
        if self._batches.has(batch_id):
            return
        if rows.num_rows and read_rebuild(self._checkpoint):
            rows = self._new_rows(rows)
        if rows.num_rows:
            self._batches.commit(write_files(self._folder, rows.cast(tables.arrow_schema(self._table))), batch_id)

    def rows_of(self, batch: "DataFrame") -> "pa.Table":
        """Return the rows of a batch with the columns of the table."""
        columns: list[Any] = [column.name for column in self._table.columns]
        return batch.select(*columns).toArrow()

    def _new_rows(self, rows: "pa.Table") -> "pa.Table":
        """Return the rows whose keys the table does not have."""
        with tables.connect() as connection:
            tables.open_table_in(connection, Home(self._folder.parents[1]), self._table)
            connection.register("batch", rows)
            sql = f"SELECT * FROM batch WHERE NOT EXISTS (SELECT 1 FROM {self._table.name} AS known WHERE {self.is_known()})"
            return connection.sql(sql).to_arrow_table()

    def is_known(self) -> str:
        """Return the SQL condition that a row of ``known``, the table, and one of ``batch`` are the same."""
        return " AND ".join(f"known.{name} IS NOT DISTINCT FROM batch.{name}" for name in self._table.key)
