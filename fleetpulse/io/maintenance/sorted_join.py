"""Join of small files of a table, with the rows of each new file sorted.

Rule 1: readers that search for one device read a few row groups of a sorted file, by their statistics.
Rule 2: a join changes no row, and may be interrupted at any point and repeated.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from fleetpulse.core.tables import Table
from fleetpulse.io.delta.commits import Added, replace_files
from fleetpulse.io.delta.corruption import open_table, reporting_corruption
from fleetpulse.io.maintenance.vacuum import SMALL_BYTES, SmallFiles
from fleetpulse.io.system.fsync import replace_durably
from fleetpulse.io.tables.tables import connect, fetch, open_files, spill_to

_ROW_GROUP: Final = 20_000  # rows: the unit that a search for one device reads


def join_sorted(table: Path, declared: Table, small: SmallFiles, by: Sequence[str]) -> bool:
    """Join the small files of a partition, and sort the rows of each new file.

    Args:
        table: folder of the table.
        declared: declaration of the table.
        small: partition whose small files are joined.
        by: columns to sort by; the file has statistics of each.

    Returns:
        Whether the files were joined; False if another writer changed the table.

    Raises:
        DamagedError: a file cannot be read.
        OSError: the disk cannot be written.
    """
    partition = {column: value for column, _, value in small.partition}
    for files in _groups(table, partition):
        added = _write(table, declared, partition, [table / name for name in files], by)
        if replace_files(table, files, [added], "OPTIMIZE", data_change=False, partition=partition) is None:
            return False
    return True


def _groups(table: Path, partition: dict[str, str]) -> Iterator[dict[str, int]]:
    """Yield the small files of a partition with their sizes, in groups of at most twice `SMALL_BYTES`."""
    log = open_table(table).get_add_actions(flatten=True)
    names, sizes = log["path"].to_pylist(), log["size_bytes"].to_pylist()
    values = [log[f"partition.{column}"].to_pylist() for column in partition]
    rows = zip(names, sizes, *values, strict=True)
    small = [
        (str(name), int(size)) for name, size, *of in rows if size < SMALL_BYTES and list(map(str, of)) == [*partition.values()]
    ]
    group: dict[str, int] = {}
    for name, size in sorted(small):
        if group and sum(group.values()) + size > 2 * SMALL_BYTES:
            yield group
            group = {}
        group[name] = size
    if len(group) > 1:
        yield group


def _write(table: Path, declared: Table, partition: dict[str, str], files: Sequence[Path], by: Sequence[str]) -> Added:
    folder = table.joinpath(*(f"{column}={value}" for column, value in partition.items()))
    path = folder / f"part-{uuid4().hex}.parquet"
    temporary = path.with_name(f".{path.name}.tmp")
    columns = ", ".join(f'"{column.name}"' for column in declared.columns if column.name not in partition)
    with connect() as connection, reporting_corruption(f'a file of "{table}"'):
        spill_to(connection, folder / f".{path.name}.sort")
        open_files(connection, "rows", declared, files)
        ends = ", ".join(f"min({name}), max({name})" for name in by)
        [found] = fetch(connection, f"SELECT count(*), {ends} FROM rows")
        count, *spans = found.values()
        options = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROW_GROUP}"
        target = str(temporary).replace("'", "''")
        try:
            connection.execute(f"COPY (SELECT {columns} FROM rows ORDER BY {', '.join(by)}) TO '{target}' ({options})")
            replace_durably(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)  # on a full disk, it would keep occupying space
            raise
    stats = {"numRecords": count, "minValues": _named(by, spans[::2]), "maxValues": _named(by, spans[1::2])}
    return Added(str(path.relative_to(table)), path.stat().st_size, stats, partition)


def _named(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return the known values by name, in the format of Delta's statistics."""
    from fleetpulse.io.delta.appender import as_statistic

    return {name: as_statistic(value) for name, value in zip(names, values, strict=True) if value is not None}
