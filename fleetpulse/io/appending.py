"""Rows appended to a Delta table at a cost that does not grow with the table.

deltalake makes what a table consists of anew at each commit, 0.2 ms a file, of which an append needs to know nothing.

Rule 1: rows are durable before the commit that names them is put in place, whole, under a number that nobody has taken.
Rule 2: who came before is looked at: another's append or exchange of files does not matter, another schema is read, and one who
says that a writer of ours has come further ends the try.
Rule 3: each `CHECKPOINT_EVERY` versions the log gets a checkpoint, and loses what is older than the table keeps it.
"""

import os
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import INDEXED_COLUMNS
from fleetpulse.io.commits import Added, change_the_table, leave_checkpoint, numbers_said, open_known, put
from fleetpulse.io.delta_log import actions_of
from fleetpulse.io.durable import sync_folder

CHECKPOINT_EVERY: Final = 100
_TRIES: Final = 100  # others commit a few times a second, and a try takes milliseconds
_IDS: Final = ("device_id",)  # texts of which a file holds each a few times


class Appender:
    """Appends to one table, which has no partitions and is not written to by Spark.

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
            raise FleetError(f'"{self.path}" has no column {", ".join(strange)}; restart, so that columns are added')
        added = _write(self.path, rows) if rows.num_rows else None
        try:
            version = self._commit(added, numbers)
        except BaseException:
            if added is not None and not self._is_committed(added):
                (self.path / added.name).unlink(missing_ok=True)
            raise
        if version % CHECKPOINT_EVERY == 0:
            _leave_checkpoint(self.path)
        return version

    def _commit(self, added: Added | None, numbers: Mapping[str, int]) -> int:
        for _ in range(_TRIES):
            self._catch_up(numbers)
            if put(self._commit_of(self._version + 1), _actions(added, numbers)):
                self._version += 1
                return self._version
        raise FleetError(f'"{self.path}" got a commit of another at each of {_TRIES} tries; see who writes to it')

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
                raise FleetError(f'another process appends to "{self.path}" as {further[0]}; stop one of the two')
            if change_the_table(actions):
                self._look()
            self._version += 1


def _actions(added: Added | None, numbers: Mapping[str, int]) -> Iterable[Mapping[str, Any]]:
    now_ms = time.time_ns() // 1_000_000
    info = {"timestamp": now_ms, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "isBlindAppend": True}
    yield {"commitInfo": {**info, "engineInfo": "fleetpulse"}}
    if added is not None:
        yield added.action(now_ms, data_change=True)
    yield from numbers_said(numbers, now_ms)


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return how rows of messages and the like are kept: words by a dictionary, ids and numbers without."""
    words = [field.name for field in schema if pa.types.is_string(field.type) and field.name not in _IDS]
    return {"compression": "zstd", "use_dictionary": words or False}


def _write(table: Path, rows: pa.Table) -> Added:
    """Write rows into a file of the table's folder that would survive a loss of power."""
    path = table / f"part-{uuid.uuid4().hex}.parquet"
    try:
        with path.open("xb") as file:
            pq.write_table(rows, file, **parquet_options(rows.schema))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(table)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Added(path.name, path.stat().st_size, {"numRecords": rows.num_rows, **_stats(pq.read_metadata(path))})


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
        opened = leave_checkpoint(table)
        if opened.metadata().configuration.get("delta.enableExpiredLogCleanup") != "false":
            opened.cleanup_metadata()
    except (OSError, DeltaError, FleetError) as error:
        import structlog  # a tenth of what it costs to read a table, and nearly never needed

        structlog.get_logger("tables").warning("a table's log got no checkpoint", table=table.name, error=str(error))
