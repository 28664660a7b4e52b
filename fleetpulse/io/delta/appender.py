"""Rows appended to a Delta table at a cost that does not grow with the table.

deltalake makes what a table consists of anew at each commit, 0.2 ms a file, of which an append needs to know nothing.

Rule 1: rows are durable before the commit that names them is put in place, whole, under a number that nobody has taken.
Rule 2: who came before is looked at: another's append or exchange of files does not matter, another schema is read, and one who
says that a writer of ours has come further ends the try.
Rule 3: each `CHECKPOINT_EVERY` versions the log gets a checkpoint, and loses what is older than the table keeps it.
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
from fleetpulse.io.delta.commits import Added, change_the_table, numbers_said, open_known, put_commit, write_log_checkpoint
from fleetpulse.io.delta.log import actions_of
from fleetpulse.io.system.fsync import sync_folder
from fleetpulse.io.system.wall_clock import wall_clock_ms

CHECKPOINT_EVERY: Final = 100
_TRIES: Final = 100  # others commit a few times a second, and a try takes milliseconds
_IDS: Final = ("device_id",)  # texts of which a file holds each a few times


class Appender:
    """Appends to one table; all its writers must put commits in place by a link, which Spark's writers do not.

    Args:
        path: the table's folder.

    Raises:
        FleetError: the table's protocol is not the one that is written here.
        DamagedError: its log is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = self._look()

    def _look(self) -> int:
        """Look at the table as it is now; return its version."""
        opened = open_known(self.path)
        self._columns = frozenset(field.name for field in opened.schema().fields)
        self._partitioned_by = tuple(opened.metadata().partition_columns)
        return opened.version()

    def _commit_of(self, version: int) -> Path:
        return self.path / "_delta_log" / f"{version:020d}.json"

    def append(self, rows: pa.Table, numbers: Mapping[str, int]) -> int:
        """Append rows in one commit that also says to which number each of several writers has come; return its version.

        Raises:
            FleetError: the table lacks a column; or another process has come further in the name of one of the writers.
            OSError: the disk refuses; the table is as it was, or it has the rows and does not know whether they are durable.
        """
        if strange := [name for name in rows.column_names if name not in self._columns]:
            raise FleetError(
                f'"{self.path}" has no column {", ".join(strange)}; restart, so that columns are added', code="column-unknown"
            )
        return self.commit(write_files(self.path, rows, self._partitioned_by), numbers)

    def commit(self, added: Sequence[Added], numbers: Mapping[str, int]) -> int:
        """Append files that are durable already, see `write_files`, in one commit, as `append` does; return its version.

        Raises:
            FleetError: see `append`; the files are removed then.
            OSError: likewise, unless the commit names them.
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
            f'"{self.path}" got a commit of another at each of {_TRIES} tries; see who writes to it', code="commit-conflict"
        )

    def _is_committed(self, added: Added) -> bool:
        """Whether the commit is there that names a file, although making it ended with an error."""
        commit = self._commit_of(self._version + 1)
        return commit.exists() and added.name in commit.read_text(encoding="utf-8")

    def _catch_up(self, numbers: Mapping[str, int]) -> None:
        """Go on to the newest version, looking at what others have committed.

        A version of which the log was cleared is not the newest: a number behind it may seem free, and lie below a checkpoint.
        """
        if not self._commit_of(self._version).exists():
            self._version = self._look()
        while (commit := self._commit_of(self._version + 1)).exists():
            actions = actions_of(commit)
            if further := sorted({action["txn"]["appId"] for action in actions if "txn" in action} & numbers.keys()):
                raise FleetError(
                    f'another process appends to "{self.path}" as {further[0]}; stop one of the two', code="appender-superseded"
                )
            if change_the_table(actions):
                self._look()
            self._version += 1


def _actions(added: Sequence[Added], numbers: Mapping[str, int]) -> Iterable[Mapping[str, Any]]:
    now_ms = wall_clock_ms()
    info = {"timestamp": now_ms, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "isBlindAppend": True}
    yield {"commitInfo": {**info, "engineInfo": "fleetpulse"}}
    yield from (file.action(now_ms, data_change=True) for file in added)
    yield from numbers_said(numbers, now_ms)


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return how rows of messages and the like are kept: words by a dictionary, ids and numbers without."""
    words = [field.name for field in schema if pa.types.is_string(field.type) and field.name not in _IDS]
    return {"compression": "zstd", "use_dictionary": words or False}


def write_files(table: Path, rows: pa.Table, partitioned_by: Sequence[str] = ()) -> list[Added]:
    """Write rows into new files of a table's folder that would survive a loss of power; no file without rows.

    Args:
        table: the folder.
        rows: its columns.
        partitioned_by: its partition column; a file has the rows of one of its values.

    Returns:
        The files, for a commit that adds them.

    Raises:
        OSError: the disk refuses; no file is left.
    """
    added: list[Added] = []
    try:
        for partition, some in _parts(rows, partitioned_by):
            added.append(_write(table, some, partition))
    except BaseException:
        remove_files(table, added)
        raise
    return added


def remove_files(table: Path, added: Iterable[Added]) -> None:
    """Remove files that no commit has added."""
    for one in added:
        (table / one.name).unlink(missing_ok=True)


def _parts(rows: pa.Table, partitioned_by: Sequence[str]) -> Iterator[tuple[dict[str, str], pa.Table]]:
    """Yield the rows of each partition, without its column, in the order in which they are."""
    if not rows.num_rows:
        return
    if not partitioned_by:
        yield {}, rows
        return
    [name] = partitioned_by
    values, bare = rows[name], rows.drop_columns([name])
    for value in pc.unique(values).to_pylist():
        yield {name: value}, bare.filter(pc.equal(values, value))


def _write(table: Path, rows: pa.Table, partition: Mapping[str, str]) -> Added:
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
    stats = {"numRecords": rows.num_rows, **_stats(pq.read_metadata(path))}
    return Added(str(path.relative_to(table)), path.stat().st_size, stats, partition)


def _stats(file: pq.FileMetaData) -> dict[str, dict[str, Any]]:
    """Return Delta's statistics of the first `INDEXED_COLUMNS` columns."""
    stats: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for place in range(min(INDEXED_COLUMNS, file.num_columns)):
        groups = [file.row_group(group).column(place) for group in range(file.num_row_groups)]
        name = groups[0].path_in_schema
        told = [group.statistics for group in groups if group.statistics is not None]
        if len(told) < len(groups):
            continue
        stats["nullCount"][name] = sum(one.null_count for one in told)
        some = [one for one in told if one.has_min_max]  # the rest is null, or too long to be told
        if some and all(one.has_min_max or not one.num_values for one in told) and not isinstance(some[0].min, bytes):
            stats["minValues"][name] = _spelt(min(one.min for one in some))
            stats["maxValues"][name] = _spelt(max(one.max for one in some))
    return stats


def _spelt(value: Any) -> Any:
    """Return a value as Delta's statistics spell it; an instant to the microsecond, so that nothing lies beyond it."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return value


def _leave_checkpoint(table: Path) -> None:
    """Leave a checkpoint in the log, for who opens the table; where the disk refuses, the next one is tried for."""
    try:
        opened = write_log_checkpoint(table)
        if opened.metadata().configuration.get("delta.enableExpiredLogCleanup") != "false":
            opened.cleanup_metadata()
    except (OSError, DeltaError, FleetError) as error:
        import structlog  # a tenth of what it costs to read a table, and nearly never needed

        structlog.get_logger("tables").warning("a table's log got no checkpoint", table=table.name, error=str(error))
