"""Delta tables from outside the JVM: made from their declaration, appended to exactly once, and read with SQL."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from fleetpulse.core.tables import JUDGEMENTS, READINGS, TABLES, Table
from fleetpulse.io.home import Home

_ARROW: Final = {
    "string": pa.string(),
    "long": pa.int64(),
    "int": pa.int32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
}
_SQL: Final = {"string": "VARCHAR", "long": "BIGINT", "int": "INTEGER", "timestamp": "TIMESTAMPTZ", "binary": "BLOB"}


def arrow_schema(table: Table) -> pa.Schema:
    """Return the Arrow schema of a declared table; columns are nullable, since Spark's streaming sink writes them so."""
    return pa.schema([pa.field(column.name, _ARROW[column.type]) for column in table.columns])


def create(home: Home, table: Table) -> None:
    """Make a table, unless it is there."""
    path = home.table(table.name)
    if not (path / "_delta_log").exists():
        DeltaTable.create(
            str(path),
            schema=arrow_schema(table),
            mode="ignore",
            partition_by=list(table.partitioned_by) or None,
            description=table.meaning,
        )


def to_table(table: Table, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table; values named ``<column>_ms`` become the timestamp ``<column>``."""
    kept = list(rows)
    schema = arrow_schema(table)
    columns: list[pa.Array] = []
    for field in schema:
        if pa.types.is_timestamp(field.type):
            name = f"{field.name}_ms"
            micros = [None if row.get(name) is None else row[name] * 1000 for row in kept]
            columns.append(pa.array(micros, pa.int64()).cast(field.type))
        else:
            columns.append(pa.array([row.get(field.name) for row in kept], field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def landed(home: Home, table: Table, writer: str) -> int:
    """Return up to which of its own numbers ``writer`` has appended to a table; 0 at first."""
    return DeltaTable(str(home.table(table.name))).transaction_version(writer) or 0


def append(home: Home, table: Table, rows: pa.Table, writer: str, number: int) -> None:
    """Append rows in one commit that also says that ``writer`` has come to ``number``."""
    properties = CommitProperties(app_transactions=[Transaction(writer, number)])
    write_deltalake(str(home.table(table.name)), rows, mode="append", commit_properties=properties)


@contextmanager
def reading(home: Home, tables: Iterable[str] = (JUDGEMENTS.name,)) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open tables, and the readings of judgements (``transitions``, ``late_events`` ...), as they stand now, for SQL.

    DuckDB reads the files itself: the way over ``pyarrow.dataset`` imports pandas, and costs ten times as much for a file.
    A table that is not there yet reads as empty, and so does a column that a file does not have.
    """
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone='UTC'")
        for name in tables:
            _view(connection, home, next(table for table in TABLES if table.name == name))
        if JUDGEMENTS.name in tables:
            for reading, kind in READINGS.items():
                connection.execute(f"CREATE VIEW {reading} AS SELECT * FROM {JUDGEMENTS.name} WHERE kind = '{kind}'")
        yield connection


def _view(connection: duckdb.DuckDBPyConnection, home: Home, table: Table) -> None:
    path = home.table(table.name)
    files = _files(path) if (path / "_delta_log").exists() else []
    if not files:
        nothing = ", ".join(f"CAST(NULL AS {_SQL[column.type]}) AS {_quoted(column.name)}" for column in table.columns)
        connection.execute(f"CREATE VIEW {table.name} AS SELECT {nothing} WHERE false")
        return
    names = [escape(str(file)) for file in files]  # DuckDB would take a bracket in a home's path for a pattern
    found = connection.read_parquet(names, hive_partitioning=bool(table.partitioned_by), union_by_name=True)
    # Spark writes instants without their zone, Arrow with it: what a table declares is what is read.
    columns = ", ".join(
        f"CAST({_quoted(column.name) if column.name in found.columns else 'NULL'} AS {_SQL[column.type]}) "
        f"AS {_quoted(column.name)}"
        for column in table.columns
    )
    found.project(columns).create_view(table.name)


def _files(path: Path) -> list[Path]:
    """Return the files of a table's newest version; `DeltaTable.file_uris` would spell a space in a home's path ``%20``."""
    return [path / str(name) for name in DeltaTable(str(path)).get_add_actions()["path"].to_pylist()]


def _quoted(name: str) -> str:
    return f'"{name}"'  # a column is named trigger


def fetch(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Run SQL over opened tables; return rows by column name."""
    result = connection.execute(sql, list(parameters))
    names = [column[0] for column in result.description]
    return [dict(zip(names, values, strict=True)) for values in result.fetchall()]


def query(
    home: Home, sql: str, parameters: Iterable[Any] = (), tables: Iterable[str] = (JUDGEMENTS.name,)
) -> list[dict[str, Any]]:
    """Run SQL over tables, and over the readings of judgements (``transitions``, ``late_events`` ...).

    Returns:
        Rows by column name. A table that is not there yet reads as empty.
    """
    with reading(home, tables) as connection:
        return fetch(connection, sql, parameters)


def version(path: Path) -> int:
    """Return a table's newest version."""
    return DeltaTable(str(path)).version()
