"""Delta tables without the JVM: create, append exactly once, query with SQL."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from glob import escape
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from deltalake import DeltaTable, Schema

from fleetpulse.core.catalog import TABLES, VIEWS
from fleetpulse.core.tables import JUDGEMENTS, Table
from fleetpulse.io.delta.corruption import open_table, reporting_corruption
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.delta.spark_conflicts import commit_verified
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import sync_tree

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection, DuckDBPyRelation, Expression

    from fleetpulse.io.delta.appender import Appender

SPILLING_MEMORY: Final = "1GB"  # of a query that sorts or compares all rows of a table


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the readings of a block share, see `one_instance`.

    Attributes:
        root: connection of the instance.
        opened: opened tables by folder.
        numbers: numbers of the catalogs.
    """

    root: "DuckDBPyConnection"
    opened: dict[Path, DeltaTable]
    numbers: Iterator[int]


_shared: ContextVar[_Shared | None] = ContextVar("shared", default=None)
_SQL: Final = {
    "string": "VARCHAR",
    "long": "BIGINT",
    "int": "INTEGER",
    "double": "DOUBLE",
    "timestamp": "TIMESTAMPTZ",
    "binary": "BLOB",
    "boolean": "BOOLEAN",
}


def arrow_schema(table: Table) -> "pa.Schema":
    """Return the Arrow schema of a declared table; all columns are nullable."""
    import pyarrow as pa  # loads numpy, which commands that only read do not need

    types = {
        "string": pa.string(),
        "long": pa.int64(),
        "int": pa.int32(),
        "double": pa.float64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "binary": pa.binary(),
        "boolean": pa.bool_(),
    }
    return pa.schema([pa.field(column.name, types[column.type]) for column in table.columns])


def create(home: Home, table: Table) -> None:
    """Create a table of a home, or add newly declared columns and properties."""
    create_at(home.table(table.name), table)


def create_at(path: Path, table: Table) -> None:
    """Create a table in a folder, or add newly declared columns and properties."""
    if holds_table(path):
        _add_columns(path, arrow_schema(table))
        _set_properties(path, dict(table.properties))
        return
    DeltaTable.create(
        str(path),
        schema=arrow_schema(table),
        mode="ignore",
        partition_by=list(table.partitioned_by) or None,
        description=table.meaning,
        configuration=dict(table.properties) or None,
    )
    sync_tree(path)  # deltalake does not call fsync, and appended rows must be durable at once


def _set_properties(path: Path, declared: dict[str, str]) -> None:
    known = open_table(path).metadata().configuration
    if new := {name: value for name, value in declared.items() if name not in known}:
        commit_verified(
            path, lambda properties: DeltaTable(str(path)).alter.set_table_properties(new, commit_properties=properties)
        )


def _add_columns(path: Path, declared: "pa.Schema") -> None:
    import pyarrow as pa

    known = {field.name for field in open_table(path).schema().fields}
    if new := [field for field in declared if field.name not in known]:
        added = Schema.from_arrow(pa.schema(new)).fields
        commit_verified(path, lambda properties: DeltaTable(str(path)).alter.add_columns(added, commit_properties=properties))


_STORED: Final = {"integer": "int"}  # Delta's type name -> name in table declarations


def stored_types(home: Home, table: Table) -> dict[str, str] | None:
    """Return the stored columns of a table with their declared type names.

    Returns:
        Types by column name; None if the table does not exist.
    """
    path = home.table(table.name)
    if not holds_table(path):
        return None
    types = {field.name: str(getattr(field.type, "type", field.type)) for field in open_table(path).schema().fields}
    return {name: _STORED.get(kind, kind) for name, kind in types.items()}


def to_table(table: Table, rows: Iterable[Mapping[str, Any]]) -> "pa.Table":
    """Convert rows to an Arrow table; ``<column>_ms`` becomes timestamp ``<column>``."""
    all_rows = list(rows)
    names = {name for row in all_rows for name in row}
    return from_columns(table, {name: [row.get(name) for row in all_rows] for name in names}, len(all_rows))


def from_columns(table: Table, values: Mapping[str, "Sequence[Any] | pa.Array"], count: int) -> "pa.Table":
    """Convert columns of ``count`` values each to an Arrow table.

    Values named ``<column>_ms`` become the timestamp ``<column>``. Missing columns are null.
    """
    import pyarrow as pa

    from fleetpulse.columnar.compute import pc

    schema = arrow_schema(table)
    columns: list[pa.Array] = []
    for field in schema:
        timestamp = pa.types.is_timestamp(field.type)
        found = values.get(f"{field.name}_ms" if timestamp else field.name)
        if found is None or not len(found):
            columns.append(pa.nulls(count, field.type))
        elif timestamp:
            columns.append(pc.multiply(_column(found, pa.int64()), 1000).cast(field.type))
        else:
            columns.append(_column(found, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: Any, kind: "pa.DataType") -> "pa.ChunkedArray | pa.Array":
    import pyarrow as pa

    return values.cast(kind) if isinstance(values, pa.ChunkedArray | pa.Array) else pa.array(values, kind)


def landed(home: Home, table: Table, writer: str) -> int:
    """Return the newest number that a writer has committed to a table; 0 at first."""
    return open_table(home.table(table.name)).transaction_version(writer) or 0


def append(home: Home, table: Table, rows: "pa.Table", writer: str, number: int) -> None:
    """Append rows in one commit that also records ``number`` as the writer's newest."""
    append_of(home, table, rows, {writer: number})


def append_of(home: Home, table: Table, rows: "pa.Table", numbers: Mapping[str, int], appender: "Appender | None" = None) -> None:
    """Append rows of several writers in one commit that also records their numbers.

    Args:
        home: home that holds the table.
        table: declaration of the table.
        rows: rows with the columns of `arrow_schema`.
        numbers: newest number by writer; Delta stores each as a ``txn`` action.
        appender: appender of this table, kept by callers that append often. Without it, the
            table's log is read for each commit.

    Raises:
        FleetError: see `Appender.append`.
        OSError: the rows cannot be written to the disk.
    """
    from fleetpulse.io.delta.appender import Appender  # loads the Parquet writer, which commands that only read do not need

    (appender or Appender(home.table(table.name))).append(rows, numbers)


Only = Mapping[str, tuple[str, Sequence[Any]]]  # table -> a column, and the values of it to search for


@contextmanager
def reading(
    home: Home,
    tables: Iterable[str] = (JUDGEMENTS.name,),
    only: Only = MappingProxyType({}),
    device_id: str | None = None,
    *,
    views: bool = True,
) -> "Iterator[DuckDBPyConnection]":
    """Open the newest version of tables for SQL in DuckDB.

    With ``judgements``, its views (``transitions``, ``late_events`` ...) are opened as well. A
    table that does not exist is empty; a column that a file lacks is null.

    DuckDB reads the files itself: `pyarrow.dataset` imports pandas and takes ten times as long
    for a file.

    Args:
        home: home that holds the tables.
        tables: names of the tables.
        only: values to search for, by table. Files whose statistics exclude these values are
            skipped; the SQL must still filter the rows.
        device_id: device whose rows are read; None reads the rows of all devices.
        views: whether to open the views; each reads the footers of all files.

    Yields:
        DuckDB connection with a view for each table.

    Raises:
        DamagedError: a file is damaged or missing. The error may also occur while SQL runs.
    """
    with connect() as connection, reporting_corruption(f'one of the tables {", ".join(tables)} of "{home.path}"'):
        for name in tables:
            table = declared(name)
            searched = only.get(name, None if device_id is None else ("device_id", [device_id]))
            files = paths_of(home, table) if searched is None else [file.path for file in files_of(home, table, *searched)]
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {_no_rows(table)}")
            if files:
                rows = _from_files(connection, table, files)
                (rows if device_id is None else rows.filter(_of_device(device_id))).create_view(name, replace=True)
        if JUDGEMENTS.name in tables and views:
            open_views_in(connection)
        yield connection


def _of_device(device_id: str) -> "Expression":
    from duckdb import ColumnExpression, ConstantExpression

    return ColumnExpression("device_id") == ConstantExpression(device_id)


def open_files(connection: "DuckDBPyConnection", name: str, table: Table, files: Sequence[Path]) -> None:
    """Open given files as a view, such as an older version of a table.

    Args:
        connection: DuckDB connection in which the view is created.
        name: name of the view.
        table: declaration that the rows of the files follow.
        files: paths of the files; without any, the view is empty.
    """
    connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {_no_rows(table)}")
    if files:
        _from_files(connection, table, files).create_view(name, replace=True)


def open_table_in(connection: "DuckDBPyConnection", home: Home, table: Table) -> int:
    """Open the newest version of a table as a view, as `reading` does; return the version, -1 if there is none."""
    opened = newest(home, table)
    open_files(connection, table.name, table, [] if opened is None else paths_in(home, table, opened))
    if table == JUDGEMENTS:
        open_views_in(connection)
    return -1 if opened is None else opened.version()


def connect() -> "DuckDBPyConnection":
    """Open an empty in-memory DuckDB connection with the time zone UTC."""
    import duckdb  # 25 MB that processes which only write do not need

    if (shared := _shared.get()) is None:
        connection = duckdb.connect()
    else:
        connection, catalog = shared.root.cursor(), f"catalog_{next(shared.numbers)}"
        connection.execute(f"ATTACH ':memory:' AS {catalog}")
        connection.execute(f"USE {catalog}")
    connection.execute("SET TimeZone='UTC'")
    return connection


def spill_to(connection: "DuckDBPyConnection", folder: Path) -> None:
    """Limit the memory of a connection to `SPILLING_MEMORY`; beyond it, DuckDB writes rows to a folder.

    DuckDB creates the folder when it needs it, and removes it when the connection closes; a killed process leaves it.
    """
    connection.execute(f"SET memory_limit = '{SPILLING_MEMORY}'")
    connection.execute("SET temp_directory = ?", [str(folder)])


@contextmanager
def one_instance() -> Iterator[None]:
    """Let the readings of this thread share one instance of DuckDB, and read one version of each table.

    An instance takes 20 ms to start, and a log 10 ms to read. It has one thread, since a report on one device has
    little to do in parallel. It ends with the block, so its connections cannot be used afterwards.
    """
    import duckdb

    with duckdb.connect(config={"threads": 1}) as root:
        before = _shared.set(_Shared(root, {}, count()))
        try:
            yield
        finally:
            _shared.reset(before)


class Mirror:
    """In-memory copy of tables for repeated queries; a refresh reads only new files.

    Args:
        home: home that holds the tables.
        tables: names of the tables.
        columns: columns to read, by table; all others are null. A table without an entry is read
            with all columns.
        rows: SQL condition on the rows to read, by table.
    """

    def __init__(
        self,
        home: Home,
        tables: Sequence[str],
        columns: Mapping[str, Collection[str]] = MappingProxyType({}),
        rows: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.home = home
        self.connection = connect()
        self._columns, self._rows = columns, rows
        self._known: dict[str, set[Path]] = {name: set() for name in tables}
        for name in tables:
            self.connection.execute(f"CREATE TABLE {name} AS SELECT * FROM {_no_rows(declared(name))}")
        if JUDGEMENTS.name in tables:
            open_views_in(self.connection)

    def refresh(self) -> None:
        """Read files added since the last refresh; reload a table if files were removed."""
        for name, known in self._known.items():
            present = set(paths_of(self.home, declared(name)))
            if known - present:
                self.connection.execute(f"DELETE FROM {name}")
                known.clear()
            if fresh := sorted(present - known):
                found = _from_files(self.connection, declared(name), fresh, self._columns.get(name))
                (found.filter(self._rows[name]) if name in self._rows else found).insert_into(name)
                known |= present


def declared(name: str) -> Table:
    """Return the declaration of the table with a name."""
    return next(table for table in TABLES if table.name == name)


def _no_rows(table: Table) -> str:
    nothing = ", ".join(f"CAST(NULL AS {_SQL[column.type]}) AS {_quoted(column.name)}" for column in table.columns)
    return f"(SELECT {nothing} WHERE false)"


def open_views_in(connection: "DuckDBPyConnection") -> None:
    """Open the views of ``judgements``, which must be open."""
    for one in VIEWS:
        connection.execute(f"CREATE OR REPLACE VIEW {one.name} AS {one.sql}")


def _from_files(
    connection: "DuckDBPyConnection", table: Table, files: Iterable[Path], selected: Collection[str] | None = None
) -> "DuckDBPyRelation":
    names = [escape(str(file)) for file in files]  # DuckDB treats a bracket in a path as a glob pattern
    found = connection.read_parquet(names, hive_partitioning=bool(table.partitioned_by), union_by_name=True)
    present = set(found.columns) if selected is None else set(found.columns) & set(selected)
    # Spark writes timestamps without a time zone, Arrow with one: cast both to the declared type.
    columns = ", ".join(
        f"CAST({_quoted(column.name) if column.name in present else 'NULL'} AS {_SQL[column.type]}) AS {_quoted(column.name)}"
        for column in table.columns
    )
    return found.project(columns)


@dataclass(frozen=True, slots=True)
class File:
    """A data file of a table with its statistics from the log.

    Attributes:
        path: path of the file.
        rows: number of rows; None if the log has no count.
        least: minimum of the requested column; None if the log has no statistics of it.
        greatest: maximum of the requested column; None if the log has no statistics of it.
    """

    path: Path
    rows: int | None
    least: Any
    greatest: Any


def files_of(home: Home, table: Table, column: str, values: Sequence[Any] | None = None) -> list[File]:
    """Return the files of a table's newest version with statistics from its log.

    Args:
        home: home that holds the table.
        table: declaration of the table; no file of it is opened.
        column: column whose statistics are returned.
        values: values of the column. Files whose statistics exclude all of them are omitted; None
            omits no file.
    """
    opened = newest(home, table)
    if opened is None:
        return []
    log = opened.get_add_actions(flatten=True)
    nothing = [None] * log.num_rows
    columns = (
        log[name].to_pylist() if name in log.column_names else nothing
        for name in ("path", "num_records", f"min.{column}", f"max.{column}")
    )
    files = [File(home.table(table.name) / path, *rest) for path, *rest in zip(*columns, strict=True)]
    if values is None:
        return files
    return [
        file
        for file in files
        if file.least is None or file.greatest is None or any(file.least <= value <= file.greatest for value in values)
    ]


def paths_of(home: Home, table: Table) -> list[Path]:
    """Return the paths of the files of a table's newest version."""
    opened = newest(home, table)
    return [] if opened is None else paths_in(home, table, opened)


def newest(home: Home, table: Table) -> DeltaTable | None:
    """Open a table's newest version, to read several facts of the same version.

    Returns:
        The opened table; None if it does not exist.
    """
    folder, shared = home.table(table.name), _shared.get()
    if shared is not None and folder in shared.opened:
        return shared.opened[folder]
    opened = open_table(folder) if holds_table(folder) else None
    if shared is not None and opened is not None:
        shared.opened[folder] = opened
    return opened


def paths_in(home: Home, table: Table, opened: DeltaTable) -> list[Path]:
    """Return the paths of the files of an opened version.

    `DeltaTable.file_uris` is not used: it encodes a space in the path of a home as ``%20``.
    """
    return [home.table(table.name) / str(name) for name in opened.get_add_actions()["path"].to_pylist()]


def files_of_version(home: Home, table: Table, version: int) -> tuple[Path, ...]:
    """Return the paths of the files of one version of a table."""
    names = DeltaTable(str(home.table(table.name)), version=version).get_add_actions()["path"].to_pylist()
    return tuple(home.table(table.name) / unquote(str(name)) for name in names)


def _quoted(name: str) -> str:
    return f'"{name}"'  # the name of the column "trigger" is an SQL keyword


def fetch(connection: "DuckDBPyConnection", sql: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Run SQL over opened tables and return rows as dicts by column name."""
    result = connection.execute(sql, list(parameters))
    names = [column[0] for column in result.description]
    return [dict(zip(names, values, strict=True)) for values in result.fetchall()]


def query(
    home: Home,
    sql: str,
    parameters: Iterable[Any] = (),
    tables: Iterable[str] = (JUDGEMENTS.name,),
    only: Only = MappingProxyType({}),
    device_id: str | None = None,
) -> list[dict[str, Any]]:
    """Run SQL over the newest version of tables; see `reading` for the arguments.

    Returns:
        Rows as dicts by column name. A table that does not exist is empty.
    """
    with reading(home, tables, only, device_id) as connection:
        return fetch(connection, sql, parameters)


def query_files(table: Table, files: Sequence[Path], sql: str, parameters: Iterable[Any] = ()) -> "pa.Table":
    """Run SQL over some files of a table; the SQL refers to the table by its name."""
    with connect() as connection:
        open_files(connection, table.name, table, files)
        return connection.sql(sql, params=list(parameters)).to_arrow_table()


def version(path: Path) -> int:
    """Return the newest version number of a table."""
    return open_table(path).version()
