"""Appends to a Delta table at a cost that does not grow with the table.

deltalake loads the list of all files at each commit (0.2 ms a file), which an append does not need.

Rule 1: rows are durable before the commit that names them. The commit is created whole, under a
version that no other commit has.
Rule 2: commits of other writers are read before each try. Appends and replacements of files are
ignored; after a change of the schema, the table is opened again. If another process has committed
under the name of the same writer, the append fails.
Rule 3: the log gets a checkpoint every `CHECKPOINT_EVERY` versions, and entries beyond the table's
log retention are removed.
"""

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError

from fleetpulse.columnar.compute import pc
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import INDEXED_COLUMNS
from fleetpulse.io.delta.commits import Added, change_the_table, number_actions, open_known, put_commit, write_log_checkpoint
from fleetpulse.io.delta.log import actions_of
from fleetpulse.io.system.fsync import sync_folder
from fleetpulse.io.system.wall_clock import wall_clock_ms

CHECKPOINT_EVERY: Final = 100
_TRIES: Final = 100  # other writers commit a few times a second, and a try takes milliseconds
_IDS: Final = ("device_id",)  # string columns with few repetitions in a file


class Appender:
    """Appender to one table; all its writers must create commits by hard links.

    Spark does not, so a table that Spark also writes to needs `commit_verified`.

    Args:
        path: folder of the table.

    Raises:
        FleetError: the table has a newer protocol than this module writes.
        DamagedError: the log of the table is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = self._read_schema()

    def _read_schema(self) -> int:
        """Read columns, partitions and version of the table; return the version."""
        opened = open_known(self.path)
        self._columns = frozenset(field.name for field in opened.schema().fields)
        self._partitioned_by = tuple(opened.metadata().partition_columns)
        return opened.version()

    def _commit_of(self, version: int) -> Path:
        return self.path / "_delta_log" / f"{version:020d}.json"

    def append(self, rows: pa.Table, numbers: Mapping[str, int]) -> int:
        """Append rows in one commit that also records the numbers of its writers.

        Args:
            rows: rows with columns of the table.
            numbers: newest number by writer.

        Returns:
            Version of the commit.

        Raises:
            FleetError: the table lacks a column, or another process commits as one of the writers.
            OSError: the disk cannot be written. Either the table is unchanged, or it has the rows,
                but they may not be durable.
        """
        if unknown := [name for name in rows.column_names if name not in self._columns]:
            raise FleetError(
                f'"{self.path}" has no column {", ".join(unknown)}; restart the process to add it', code="column-unknown"
            )
        return self.commit(write_files(self.path, rows, self._partitioned_by), numbers)

    def commit(self, added: Sequence[Added], numbers: Mapping[str, int]) -> int:
        """Append files that `write_files` has written, in one commit like `append`.

        Args:
            added: durable files in the folder of the table.
            numbers: newest number by writer.

        Returns:
            Version of the commit.

        Raises:
            FleetError: see `append`; the files are removed.
            OSError: see `append`; the files are removed unless the commit names them.
        """
        try:
            version = self._commit(added, numbers)
        except BaseException:
            if added and not self._is_committed(added[0]):
                remove_files(self.path, added)
            raise
        if version % CHECKPOINT_EVERY == 0:
            _leave_checkpoint(self.path)
        return version

    def _commit(self, added: Sequence[Added], numbers: Mapping[str, int]) -> int:
        for _ in range(_TRIES):
            self._catch_up(numbers)
            if put_commit(self._commit_of(self._version + 1), _actions(added, numbers)):
                self._version += 1
                return self._version
        raise FleetError(
            f'cannot commit to "{self.path}": another commit came first in each of {_TRIES} tries; stop its other writers',
            code="commit-conflict",
        )

    def _is_committed(self, added: Added) -> bool:
        """Return whether a commit that ended with an error exists, and names a file."""
        commit = self._commit_of(self._version + 1)
        return commit.exists() and added.name in commit.read_text(encoding="utf-8")

    def _catch_up(self, numbers: Mapping[str, int]) -> None:
        """Read the commits of other writers, up to the newest version.

        If the log no longer has the last known version, the table is opened again: the next version
        would seem free, but a commit there would be below a checkpoint and never be read.

        Raises:
            FleetError: another process commits as one of the writers.
        """
        if not self._commit_of(self._version).exists():
            self._version = self._read_schema()
        while (commit := self._commit_of(self._version + 1)).exists():
            actions = actions_of(commit)
            if further := sorted({action["txn"]["appId"] for action in actions if "txn" in action} & numbers.keys()):
                raise FleetError(
                    f'another process appends to "{self.path}" as {further[0]}; stop one of the two processes',
                    code="appender-superseded",
                )
            if change_the_table(actions):
                self._read_schema()
            self._version += 1


def _actions(added: Sequence[Added], numbers: Mapping[str, int]) -> Iterable[Mapping[str, Any]]:
    now_ms = wall_clock_ms()
    info = {"timestamp": now_ms, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "isBlindAppend": True}
    yield {"commitInfo": {**info, "engineInfo": "fleetpulse"}}
    yield from (file.action(now_ms, data_change=True) for file in added)
    yield from number_actions(numbers, now_ms)


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return Parquet options: zstd; dictionary encoding for strings other than ids."""
    encoded = [field.name for field in schema if pa.types.is_string(field.type) and field.name not in _IDS]
    return {"compression": "zstd", "use_dictionary": encoded or False}


def write_files(table: Path, rows: pa.Table, partitioned_by: Sequence[str] = (), *, with_statistics: bool = True) -> list[Added]:
    """Write rows durably to new files in a table's folder, without committing them.

    Args:
        table: folder of the table.
        rows: rows with the columns of the table; without rows, no file is written.
        partitioned_by: partition column, or empty; each of its values gets a file.
        with_statistics: whether the files have statistics of columns. Arrow imports pandas to read
            them, which takes half a second.

    Returns:
        The files, for a commit that adds them.

    Raises:
        OSError: the disk cannot be written; the new files are removed.
    """
    added: list[Added] = []
    try:
        for partition, some in _parts(rows, partitioned_by):
            added.append(_write(table, some, partition, with_statistics=with_statistics))
    except BaseException:
        remove_files(table, added)
        raise
    return added


def remove_files(table: Path, added: Iterable[Added]) -> None:
    """Remove files that no commit names."""
    for one in added:
        (table / one.name).unlink(missing_ok=True)


def _parts(rows: pa.Table, partitioned_by: Sequence[str]) -> Iterator[tuple[dict[str, str], pa.Table]]:
    """Yield the rows of each partition in their order, without the partition column."""
    if not rows.num_rows:
        return
    if not partitioned_by:
        yield {}, rows
        return
    [name] = partitioned_by
    values, bare = rows[name], rows.drop_columns([name])
    for value in pc.unique(values).to_pylist():
        yield {name: value}, bare.filter(pc.equal(values, value))


def _write(table: Path, rows: pa.Table, partition: Mapping[str, str], *, with_statistics: bool) -> Added:
    folder = table.joinpath(*(f"{name}={value}" for name, value in partition.items()))
    if partition and not folder.exists():
        folder.mkdir(exist_ok=True)
        sync_folder(table)
    path = folder / f"part-{uuid.uuid4().hex}.parquet"
    try:
        with path.open("xb") as file:
            pq.write_table(rows, file, **parquet_options(rows.schema))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    stats = {"numRecords": rows.num_rows, **(_stats(pq.read_metadata(path)) if with_statistics else {})}
    return Added(str(path.relative_to(table)), path.stat().st_size, stats, partition)


def _stats(file: pq.FileMetaData) -> dict[str, dict[str, Any]]:
    """Return Delta's file statistics of the first `INDEXED_COLUMNS` columns."""
    stats: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for place in range(min(INDEXED_COLUMNS, file.num_columns)):
        groups = [file.row_group(group).column(place) for group in range(file.num_row_groups)]
        name = groups[0].path_in_schema
        known = [group.statistics for group in groups if group.statistics is not None]
        if len(known) < len(groups):
            continue
        stats["nullCount"][name] = sum(one.null_count for one in known)
        some = [one for one in known if one.has_min_max]  # the others are null, or too long for statistics
        if some and all(one.has_min_max or not one.num_values for one in known) and not isinstance(some[0].min, bytes):
            stats["minValues"][name] = as_statistic(min(one.min for one in some))
            stats["maxValues"][name] = as_statistic(max(one.max for one in some))
    return stats


def as_statistic(value: Any) -> Any:
    """Return a value in the format of Delta's statistics.

    Timestamps keep their microseconds, so that no row lies outside of the minimum and maximum.
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return value


def _leave_checkpoint(table: Path) -> None:
    """Write a checkpoint of the log and clean up the log; log a warning on failure.

    The table is valid without it; the next checkpoint is tried `CHECKPOINT_EVERY` versions later.
    """
    try:
        opened = write_log_checkpoint(table)
        if opened.metadata().configuration.get("delta.enableExpiredLogCleanup") != "false":
            opened.cleanup_metadata()
    except (OSError, DeltaError, FleetError) as error:
        import structlog  # its import takes a tenth of the time to read a table, and is rarely needed

        structlog.get_logger("tables").warning("the checkpoint of a table's log failed", table=table.name, error=str(error))
