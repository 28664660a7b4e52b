"""Where suites take their rows from: the tables of a home, and what was worked out, for DuckDB and for Spark.

Rule 1: both read the same files and the same SQL; which of them does is a matter of how many rows there are.
Rule 2: the files are those that the tables had when they were opened, listed once; what is said of messages before messages,
so that whatever is said of one that lands meanwhile finds it; quarantine after messages, which count what landed in it before.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES, QUARANTINE, TABLES, Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables as delta
from fleetpulse.io.tables.row_accounting import IngestCounters, read_counters, removed_in

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
    from pyspark.sql import DataFrame, SparkSession

_TURNS: Final = {JUDGEMENTS.name: 0, MESSAGES.name: 2, QUARANTINE.name: 3}  # when a table is opened, see Rule 2; others at 1
STATE: Final = "state"  # what a snapshot is registered as, whichever it is
_SPARK: Final = {
    "string": "string",
    "long": "bigint",
    "int": "int",
    "double": "double",
    "timestamp": "timestamp",
    "binary": "binary",
}


@dataclass(slots=True)
class Opened:
    """Tables that SQL can read.

    Attributes:
        connection: DuckDB's.
        home: whose tables they are.
        files: of the tables, by name.
        counted: what landing had taken by the version of ``messages`` that is read; None where nobody has counted.
        removed: how many rows maintenance had removed from a table by the version that is read, by name.
        made: tables that were worked out, by name.
        states: the files of the state that is looked at; None where none is.
    """

    connection: "DuckDBPyConnection"
    home: Home
    files: Mapping[str, Sequence[Path]]
    counted: IngestCounters | None = None
    removed: Mapping[str, int] = field(default_factory=dict[str, int])
    made: dict[str, pa.Table] = field(default_factory=dict[str, pa.Table])
    states: Sequence[Path] | None = None

    def put(self, name: str, rows: pa.Table) -> None:
        """Add a table that was worked out."""
        self.made[name] = rows
        self.connection.register(name, rows)

    def put_state(self, files: Sequence[Path]) -> None:
        """Add the rows of a snapshot, or of a generation's state."""
        self.states = files
        delta.open_files(self.connection, STATE, DEVICE_SNAPSHOTS, files)

    def arrow(self, sql: str) -> pa.Table:
        """Return what SQL selects."""
        return self.connection.sql(sql).to_arrow_table()

    def count(self, sql: str) -> int:
        """Return how many rows it selects."""
        return int(self.connection.execute(f"SELECT count(*) FROM ({sql})").fetchall()[0][0])

    def frame(self, sql: str) -> Any:
        """Return what SQL selects as pandas has it: numbers stay whole, and what is not there is not there."""
        import pandas as pd

        kinds: Mapping[Any, Any] = {pa.bool_(): pd.BooleanDtype(), pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}
        return self.arrow(sql).to_pandas(types_mapper=kinds.get)


@contextmanager
def opened(home: Home) -> Iterator[Opened]:
    """Open the tables of a home as they stand now, for SQL that both engines read."""
    in_turn = sorted(TABLES, key=lambda table: _TURNS.get(table.name, 1))
    found = [(table, at) for table in in_turn if (at := delta.newest(home, table)) is not None]
    files = {table.name: delta.paths_in(home, table, at) for table, at in found}
    counted = next((read_counters(at) for table, at in found if table is MESSAGES), None)
    with delta.reading(home, ()) as connection:
        for table in TABLES:
            delta.open_files(connection, table.name, table, files.get(table.name, ()))
        connection.execute("CREATE MACRO unix_millis(instant) AS epoch_ms(instant)")  # as Spark calls it
        yield Opened(connection, home, files, counted, {table.name: removed_in(at) for table, at in found})


@contextmanager
def on_spark(spark: "SparkSession", tables: Opened) -> Iterator["SparkRows"]:
    """Give the same tables to Spark; what was worked out goes through files that are removed afterwards."""
    from fleetpulse.io.spark.session import folder_of

    with TemporaryDirectory(prefix="work-", dir=folder_of(spark)) as place:
        yield SparkRows(spark, tables, Path(place))


@dataclass(slots=True)
class SparkRows:
    """The tables that `Opened` has, as Spark's views.

    Attributes:
        spark: the session.
        tables: what was opened.
        place: a folder for files.
    """

    spark: "SparkSession"
    tables: Opened
    place: Path
    _views: set[str] = field(default_factory=set[str])

    def frame(self, sql: str, reads: Sequence[str]) -> "DataFrame":
        """Return what SQL selects from some tables."""
        for name in {*reads} - self._views:
            self._view(name).createOrReplaceTempView(name)
            self._views.add(name)
        return self.spark.sql(sql)

    def _view(self, name: str) -> "DataFrame":
        if name in self.tables.made:
            path = self.place / f"{name}.parquet"
            pq.write_table(self.tables.made[name], path)
            return self.spark.read.parquet(str(path))
        table = DEVICE_SNAPSHOTS if name == STATE else delta.declared(name)
        files = self.tables.states if name == STATE else self.tables.files.get(name)
        return self._of_files(table, [str(file) for file in files or ()])

    def _of_files(self, table: Table, files: Sequence[str]) -> "DataFrame":
        if not files:
            return self.spark.createDataFrame(
                [], ", ".join(f"`{one.name}` {_SPARK.get(one.type, one.type)}" for one in table.columns)
            )
        reader = self.spark.read.option("mergeSchema", "true")
        root, divided, _ = files[0].partition(f"/{table.name}/")
        if divided:  # the partition's column is in the names of its folders
            reader = reader.option("basePath", root + divided)
        found = reader.parquet(*files)
        there = set(found.columns)
        columns = (
            f"CAST({f'`{one.name}`' if one.name in there else 'NULL'} AS {_SPARK.get(one.type, one.type)}) AS `{one.name}`"
            for one in table.columns
        )
        return found.selectExpr(*columns)
