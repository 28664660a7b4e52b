"""Delta tables from outside the JVM: made from their declaration, appended to exactly once, and read with SQL."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from fleetpulse.core.tables import JUDGEMENTS, READINGS, Table
from fleetpulse.io.home import Home

_ARROW: Final = {
    "string": pa.string(),
    "long": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
}


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
            configuration=dict(table.properties) or None,
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


def query(
    home: Home, sql: str, parameters: Iterable[Any] = (), tables: Iterable[str] = (JUDGEMENTS.name,)
) -> list[dict[str, Any]]:
    """Run SQL over tables, and over the readings of judgements (``transitions``, ``late_events`` ...).

    Returns:
        Rows by column name. A table that is not there yet reads as empty.
    """
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone='UTC'")
        for name in tables:
            path = home.table(name)
            if (path / "_delta_log").exists():
                connection.register(name, DeltaTable(str(path)).to_pyarrow_dataset())
            else:
                connection.register(name, _empty(name))
        if JUDGEMENTS.name in tables:
            for reading, kind in READINGS.items():
                connection.execute(f"CREATE VIEW {reading} AS SELECT * FROM {JUDGEMENTS.name} WHERE kind = '{kind}'")
        result = connection.execute(sql, list(parameters))
        names = [column[0] for column in result.description]
        return [dict(zip(names, values, strict=True)) for values in result.fetchall()]


def _empty(name: str) -> pa.Table:
    from fleetpulse.core.tables import TABLES

    return next(to_table(table, []) for table in TABLES if table.name == name)


def version(path: Path) -> int:
    """Return a table's newest version."""
    return DeltaTable(str(path)).version()
