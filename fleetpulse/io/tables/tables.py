"""Delta tables from outside the JVM: made from their declaration, appended to exactly once, and read with SQL."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable, Schema

from fleetpulse.core.tables import JUDGEMENTS, READINGS, TABLES, Table
from fleetpulse.io.delta.corruption import open_table, reporting_corruption
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.delta.spark_conflicts import commit_verified
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import sync_tree

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation, Expression

    from fleetpulse.io.delta.appender import Appender

_ARROW: Final = {
    "string": pa.string(),
    "long": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
}
_SQL: Final = {
    "string": "VARCHAR",
    "long": "BIGINT",
    "int": "INTEGER",
    "double": "DOUBLE",
    "timestamp": "TIMESTAMPTZ",
    "binary": "BLOB",
}


def arrow_schema(table: Table) -> pa.Schema:
    """Return the Arrow schema of a declared table; its columns are nullable."""
    return pa.schema([pa.field(column.name, _ARROW[column.type]) for column in table.columns])


def create(home: Home, table: Table) -> None:
    """Make a table, unless it is there; columns and properties that were declared since are added."""
    create_at(home.table(table.name), table)


def create_at(path: Path, table: Table) -> None:
    """Make a table in a folder, unless it is there; columns and properties that were declared since are added."""
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
    sync_tree(path)  # deltalake syncs nothing, and what is appended is on the disk at once


def _set_properties(path: Path, declared: dict[str, str]) -> None:
    known = open_table(path).metadata().configuration
    if new := {name: value for name, value in declared.items() if name not in known}:
        commit_verified(path, lambda said: DeltaTable(str(path)).alter.set_table_properties(new, commit_properties=said))


def _add_columns(path: Path, declared: pa.Schema) -> None:
    known = {field.name for field in open_table(path).schema().fields}
    if new := [field for field in declared if field.name not in known]:
        added = Schema.from_arrow(pa.schema(new)).fields
        commit_verified(path, lambda said: DeltaTable(str(path)).alter.add_columns(added, commit_properties=said))


_STORED: Final = {"integer": "int"}  # as Delta calls a type that is declared otherwise


def stored_types(home: Home, table: Table) -> dict[str, str] | None:
    """Return the columns that a table has, with their types as tables are declared; None where there is no table."""
    path = home.table(table.name)
    if not holds_table(path):
        return None
    types = {field.name: str(getattr(field.type, "type", field.type)) for field in open_table(path).schema().fields}
    return {name: _STORED.get(kind, kind) for name, kind in types.items()}


def to_table(table: Table, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table; values named ``<column>_ms`` become the timestamp ``<column>``."""
    kept = list(rows)
    names = {name for row in kept for name in row}
    return from_columns(table, {name: [row.get(name) for row in kept] for name in names}, len(kept))


def from_columns(table: Table, values: Mapping[str, Sequence[Any] | pa.Array], count: int) -> pa.Table:
    """Return ``count`` rows as a table, from their columns; ``<column>_ms`` becomes the timestamp ``<column>``."""
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


def _column(values: Any, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
    return values.cast(kind) if isinstance(values, pa.ChunkedArray | pa.Array) else pa.array(values, kind)


def landed(home: Home, table: Table, writer: str) -> int:
    """Return up to which of its own numbers ``writer`` has appended to a table; 0 at first."""
    return open_table(home.table(table.name)).transaction_version(writer) or 0


def append(home: Home, table: Table, rows: pa.Table, writer: str, number: int) -> None:
    """Append rows in one commit that also says that ``writer`` has come to ``number``."""
    append_of(home, table, rows, {writer: number})


def append_of(home: Home, table: Table, rows: pa.Table, numbers: Mapping[str, int], appender: "Appender | None" = None) -> None:
    """Append rows of several writers in one commit that also says to which number each has come.

    Args:
        home: the home.
        table: which.
        rows: columns of `arrow_schema`.
        numbers: by writer.
        appender: the table's, by one who appends often and keeps it: else its log is read for each commit.

    Raises:
        FleetError: see `Appender.append`.
        OSError: the disk refuses.
    """
    from fleetpulse.io.delta.appender import Appender  # and with it what writes Parquet: a verb that reads does without

    (appender or Appender(home.table(table.name))).append(rows, numbers)


Only = Mapping[str, tuple[str, Sequence[Any]]]  # table -> a column, and the values of it that are looked for


@contextmanager
def reading(
    home: Home,
    tables: Iterable[str] = (JUDGEMENTS.name,),
    only: Only = MappingProxyType({}),
    device_id: str | None = None,
) -> "Iterator[DuckDBPyConnection]":
    """Open tables, and the readings of judgements (``transitions``, ``late_events`` ...), as they stand now, for SQL.

    DuckDB reads the files itself: the way over ``pyarrow.dataset`` imports pandas, and costs ten times as much for a file.
    A table that is not there yet reads as empty, and so does a column that a file does not have.

    Args:
        home: the home.
        tables: their names.
        only: spares files whose statistics say that none of these values is in them; the SQL must ask for them all the same.
        device_id: this device's rows alone.

    Raises:
        DamagedError: a file of them is damaged, or gone: here, or where the SQL is run.
    """
    with connect() as connection, reporting_corruption(f'of "{home.path}" one of the tables {", ".join(tables)}'):
        for name in tables:
            table = declared(name)
            files = [file.path for file in files_of(home, table, *only[name])] if name in only else paths_of(home, table)
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {_no_rows(table)}")
            if files:
                rows = _from_files(connection, table, files)
                (rows if device_id is None else rows.filter(_of_device(device_id))).create_view(name, replace=True)
        _name_readings(connection, tables)
        yield connection


def _of_device(device_id: str) -> "Expression":
    from duckdb import ColumnExpression, ConstantExpression

    return ColumnExpression("device_id") == ConstantExpression(device_id)


def open_files(connection: "DuckDBPyConnection", name: str, table: Table, files: Sequence[Path]) -> None:
    """Give files of a table a name of their own: a version of it that is not its newest, or rows of the same form."""
    connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {_no_rows(table)}")
    if files:
        _from_files(connection, table, files).create_view(name, replace=True)


def connect() -> "DuckDBPyConnection":
    """Return a connection of DuckDB in which nothing is known yet, with instants in UTC."""
    import duckdb  # 25 MB that who only writes does without

    connection = duckdb.connect()
    connection.execute("SET TimeZone='UTC'")
    return connection


class Mirror:
    """Tables of a home in memory, for one who looks again and again: a refresh reads only the files that are new.

    Args:
        home: the home.
        tables: their names.
        columns: of a table these alone; the others are null.
        rows: of a table these alone, as an SQL condition.
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
        _name_readings(self.connection, tables)

    def refresh(self) -> None:
        """Take in what was written since; all of it anew where files were put together or removed."""
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
    """Return the declaration of a table."""
    return next(table for table in TABLES if table.name == name)


def _no_rows(table: Table) -> str:
    nothing = ", ".join(f"CAST(NULL AS {_SQL[column.type]}) AS {_quoted(column.name)}" for column in table.columns)
    return f"(SELECT {nothing} WHERE false)"


def _name_readings(connection: "DuckDBPyConnection", tables: Iterable[str]) -> None:
    if JUDGEMENTS.name in tables:
        for one in READINGS:
            connection.execute(f"CREATE VIEW {one.name} AS {one.sql}")


def _from_files(
    connection: "DuckDBPyConnection", table: Table, files: Iterable[Path], wanted: Collection[str] | None = None
) -> "DuckDBPyRelation":
    names = [escape(str(file)) for file in files]  # DuckDB would take a bracket in a home's path for a pattern
    found = connection.read_parquet(names, hive_partitioning=bool(table.partitioned_by), union_by_name=True)
    there = set(found.columns) if wanted is None else set(found.columns) & set(wanted)
    # Spark writes instants without their zone, Arrow with it: what a table declares is what is read.
    columns = ", ".join(
        f"CAST({_quoted(column.name) if column.name in there else 'NULL'} AS {_SQL[column.type]}) AS {_quoted(column.name)}"
        for column in table.columns
    )
    return found.project(columns)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a table, as the log describes it.

    Attributes:
        path: where it lies.
        rows: how many it holds; None where the log does not say.
        least: the least value of the column that was asked about; None where the log does not say.
        greatest: likewise the greatest.
    """

    path: Path
    rows: int | None
    least: Any
    greatest: Any


def files_of(home: Home, table: Table, column: str, values: Sequence[Any] | None = None) -> list[File]:
    """Return the files of a table's newest version, without opening one.

    Args:
        home: the home.
        table: the table.
        column: whose statistics are wanted.
        values: leave out the files that hold none of them for sure; None leaves out none.
    """
    if not holds_table(home.table(table.name)):
        return []
    log = open_table(home.table(table.name)).get_add_actions(flatten=True)
    nothing = [None] * log.num_rows
    told = (
        log[name].to_pylist() if name in log.column_names else nothing
        for name in ("path", "num_records", f"min.{column}", f"max.{column}")
    )
    files = [File(home.table(table.name) / path, *rest) for path, *rest in zip(*told, strict=True)]
    if values is None:
        return files
    return [
        file
        for file in files
        if file.least is None or file.greatest is None or any(file.least <= value <= file.greatest for value in values)
    ]


def paths_of(home: Home, table: Table) -> list[Path]:
    """Return the files of a table's newest version."""
    opened = newest(home, table)
    return [] if opened is None else paths_in(home, table, opened)


def newest(home: Home, table: Table) -> DeltaTable | None:
    """Return a table as it stands now, for who reads several things of the same version; None where there is no table."""
    folder = home.table(table.name)
    return open_table(folder) if holds_table(folder) else None


def paths_in(home: Home, table: Table, opened: DeltaTable) -> list[Path]:
    """Return the files of the version that was opened; `DeltaTable.file_uris` would spell a space in a home's path ``%20``."""
    return [home.table(table.name) / str(name) for name in opened.get_add_actions()["path"].to_pylist()]


def files_of_version(home: Home, table: Table, version: int) -> tuple[Path, ...]:
    """Return the files of a version of a table."""
    names = DeltaTable(str(home.table(table.name)), version=version).get_add_actions()["path"].to_pylist()
    return tuple(home.table(table.name) / unquote(str(name)) for name in names)


def _quoted(name: str) -> str:
    return f'"{name}"'  # a column is named trigger


def fetch(connection: "DuckDBPyConnection", sql: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Run SQL over opened tables; return rows by column name."""
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
    """Run SQL over tables, and over the readings of judgements (``transitions``, ``late_events`` ...).

    Returns:
        Rows by column name. A table that is not there yet reads as empty.
    """
    with reading(home, tables, only, device_id) as connection:
        return fetch(connection, sql, parameters)


def query_files(table: Table, files: Sequence[Path], sql: str, parameters: Iterable[Any] = ()) -> pa.Table:
    """Run SQL over some files of a table, which it knows by its name."""
    with connect() as connection:
        open_files(connection, table.name, table, files)
        return connection.sql(sql, params=list(parameters)).to_arrow_table()


def version(path: Path) -> int:
    """Return a table's newest version."""
    return open_table(path).version()
