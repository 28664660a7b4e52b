"""Tables of one file, which each version replaces; the footer of the file says which rows it includes."""

import shutil
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from fleetpulse.core.tables import Table
from fleetpulse.io.delta.corruption import DamagedError, reporting_corruption
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.tables import paths_of

if TYPE_CHECKING:
    from pathlib import Path

    from duckdb import DuckDBPyConnection

_ROW_GROUP: Final = 50_000  # rows: the unit that a search reads


def read_file(home: Home, connection: "DuckDBPyConnection", table: Table, footer_key: str) -> "tuple[Path, str] | None":
    """Return the file of a table, and its footer; None if there is none, or it is damaged.

    Args:
        home: home that holds the table.
        connection: connection that reads the footer.
        table: declaration of the table.
        footer_key: name of the footer.
    """
    try:
        with reporting_corruption(f'table "{table.name}" of "{home.path}"'):
            files = paths_of(home, table)
            sql = "SELECT decode(value) FROM parquet_kv_metadata(?) WHERE decode(key) = ?"
            found = connection.execute(sql, [str(files[0]), footer_key]).fetchone() if len(files) == 1 else None
    except DamagedError:
        return None
    return (files[0], found[0]) if found else None


def replace_file(
    home: Home,
    connection: "DuckDBPyConnection",
    table: Table,
    rows: tuple[str, list[Any]],
    order: str,
    footer: tuple[str, str],
) -> int | None:
    """Write the rows of a query as the only file of a table.

    Args:
        home: home that holds the table.
        connection: connection with the tables of the query.
        table: declaration of the table; it is created if it does not exist or its log is damaged.
        rows: SQL with the columns of the table, and its parameters.
        order: columns by which the rows are sorted.
        footer: name and text of the footer.

    Returns:
        Number of rows; None if another process changed the table.

    Raises:
        OSError: the disk cannot be written.
    """
    from fleetpulse.io.delta.commits import Added, replace_files
    from fleetpulse.io.system.fsync import replace_durably

    folder = home.table(table.name)
    try:
        tables.create(home, table)
        files = paths_of(home, table)
    except DamagedError:  # its log is damaged; all rows are derived from other tables
        shutil.rmtree(folder)
        tables.create(home, table)
        files = []
    old = {str(path.relative_to(folder)): path.stat().st_size if path.exists() else 0 for path in files}
    name = f"part-{uuid4().hex}.parquet"
    temporary = folder / f".{name}.tmp"
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    sql, values = rows
    key, text = (one.replace("'", "''") for one in footer)
    options = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROW_GROUP}, KV_METADATA {{'{key}': '{text}'}}"
    target = str(temporary).replace("'", "''")
    try:
        copied = connection.execute(f"COPY (SELECT {columns} FROM ({sql}) ORDER BY {order}) TO '{target}' ({options})", values)
        [(count,)] = copied.fetchall()
        replace_durably(temporary, folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk, it would keep occupying space
        raise
    added = Added(name, (folder / name).stat().st_size, {"numRecords": count})
    if replace_files(folder, old, [added], "WRITE", data_change=True) is None:
        (folder / name).unlink()
        return None
    return count
