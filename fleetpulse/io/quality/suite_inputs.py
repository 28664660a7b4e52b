"""Inputs of data-quality suites: tables of a home and derived tables, for SQL.

Rule 1: DuckDB and Spark read the same files with the same SQL. The number of rows decides which of
them is used.
Rule 2: the files of each table are listed once, when the tables are opened. Judgements are opened
before messages, so that each judgement finds its message. Quarantine is opened after messages,
because the commits of messages count rows that were written to quarantine earlier.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from fleetpulse.core.catalog import TABLES
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES, QUARANTINE, Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables as delta
from fleetpulse.io.tables.row_accounting import IngestCounters, read_counters, removed_in

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
    from pyspark.sql import DataFrame, SparkSession

_TURNS: Final = {JUDGEMENTS.name: 0, MESSAGES.name: 2, QUARANTINE.name: 3}  # order of opening, see Rule 2; others: 1
STATE: Final = "state"  # table name of the snapshot or state being checked
_SPARK: Final = {
    "string": "string",
    "long": "bigint",
    "int": "int",
    "double": "double",
    "timestamp": "timestamp",
    "binary": "binary",
}


@dataclass(slots=True)
class OpenedTables:
    """Opened tables of a home, and derived tables, for queries in DuckDB.

    Attributes:
        connection: DuckDB connection with a view for each table.
        home: home that holds the tables.
        files: files of the opened versions, by table.
        counted: counters of landing in the opened version of ``messages``; None if it has none.
        removed: number of rows that maintenance had removed as of the opened version, by table.
        made: derived tables, by name.
        states: files of the state being checked; None if no state is checked.
    """

    connection: "DuckDBPyConnection"
    home: Home
    files: Mapping[str, Sequence[Path]]
    counted: IngestCounters | None = None
    removed: Mapping[str, int] = field(default_factory=dict[str, int])
    made: dict[str, pa.Table] = field(default_factory=dict[str, pa.Table])
    states: Sequence[Path] | None = None

    def put(self, name: str, rows: pa.Table) -> None:
        """Add a derived table."""
        self.made[name] = rows
        self.connection.register(name, rows)

    def put_state(self, files: Sequence[Path]) -> None:
        """Add the rows of a snapshot, or of a generation's state, as table `STATE`."""
        self.states = files
        delta.open_files(self.connection, STATE, DEVICE_SNAPSHOTS, files)

    def arrow(self, sql: str) -> pa.Table:
        """Run a query in DuckDB; return its rows as an Arrow table."""
        return self.connection.sql(sql).to_arrow_table()

    def count(self, sql: str) -> int:
        """Return the number of rows that a query selects."""
        return int(self.connection.execute(f"SELECT count(*) FROM ({sql})").fetchall()[0][0])

    def frame(self, sql: str) -> Any:
        """Run a query in DuckDB; return a pandas DataFrame with nullable types.

        Integers and booleans with missing values keep their type.
        """
        import pandas as pd

        kinds: Mapping[Any, Any] = {pa.bool_(): pd.BooleanDtype(), pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}
        return self.arrow(sql).to_pandas(types_mapper=kinds.get)


@contextmanager
def opened(home: Home) -> Iterator[OpenedTables]:
    """Open the newest version of all tables of a home in DuckDB."""
    in_turn = sorted(TABLES, key=lambda table: _TURNS.get(table.name, 1))
    found = [(table, at) for table in in_turn if (at := delta.newest(home, table)) is not None]
    files = {table.name: delta.paths_in(home, table, at) for table, at in found}
    counted = next((read_counters(at) for table, at in found if table is MESSAGES), None)
    with delta.reading(home, ()) as connection:
        for table in TABLES:
            delta.open_files(connection, table.name, table, files.get(table.name, ()))
        connection.execute("CREATE MACRO unix_millis(instant) AS epoch_ms(instant)")  # Spark's name of the function
        yield OpenedTables(connection, home, files, counted, {table.name: removed_in(at) for table, at in found})


@contextmanager
def on_spark(spark: "SparkSession", tables: OpenedTables) -> Iterator["SparkRows"]:
    """Make opened tables available in Spark.

    Derived tables are written to temporary files, which are removed when the context exits.

    Args:
        spark: Spark session.
        tables: opened tables.
    """
    from fleetpulse.io.spark.session import folder_of

    with TemporaryDirectory(prefix="work-", dir=folder_of(spark)) as place:
        yield SparkRows(spark, tables, Path(place))


@dataclass(slots=True)
class SparkRows:
    """Tables of `OpenedTables` as temporary views in Spark.

    Attributes:
        spark: Spark session.
        tables: opened tables.
        place: folder for temporary files.
    """

    spark: "SparkSession"
    tables: OpenedTables
    place: Path
    _views: set[str] = field(default_factory=set[str])

    def frame(self, sql: str, reads: Sequence[str]) -> "DataFrame":
        """Run a query in Spark, and return its rows; they replace those of the query before.

        The rows are written to a temporary file first: Great Expectations starts several jobs for each expectation,
        each of which would run the query again.

        Args:
            sql: query.
            reads: names of the tables that the query reads.
        """
        for name in {*reads} - self._views:
            self._view(name).createOrReplaceTempView(name)
            self._views.add(name)
        found, path = self.spark.sql(sql), str(self.place / "rows")
        found.write.mode("overwrite").parquet(path)
        return self.spark.read.schema(found.schema).parquet(path)

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
        if divided:  # the partition column is in the names of the folders
            reader = reader.option("basePath", root + divided)
        found = reader.parquet(*files)
        present = set(found.columns)
        columns = (
            f"CAST({f'`{one.name}`' if one.name in present else 'NULL'} AS {_SPARK.get(one.type, one.type)}) AS `{one.name}`"
            for one in table.columns
        )
        return found.selectExpr(*columns)
