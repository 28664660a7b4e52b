"""Maintenance steps for any Delta table: delete rows, compact, vacuum, clean logs.

Rule 1: each step leaves a table that all readers and writers can use. It may be interrupted at any
point and repeated.
Rule 2: a commit that conflicts with another is retried a few times. If it still conflicts, the step
is left to the next maintenance.
Rule 3: replaced files are kept for some time, since readers may still use them. Files that no log
names are kept for a week, since a writer may still commit them.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from fleetpulse.core.times import DAY_MS, HOUR_MS, format_instant
from fleetpulse.io.delta.commits import write_log_checkpoint
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.delta.log import actions_of
from fleetpulse.io.delta.spark_conflicts import commit_verified
from fleetpulse.io.system.fsync import is_disk_full
from fleetpulse.io.tables.snapshots import note_of

UNKNOWN_KEPT_MS: Final = 7 * DAY_MS  # files that no log names: a writer may have been interrupted by a sleep of the machine
SMALL_BYTES: Final = 32 * 1024 * 1024
MIN_SMALL_FILES: Final = 10  # small files of a partition: fewer are not worth rewriting
MIN_VERSIONS: Final = 10  # since the newest checkpoint of a log: fewer are read quickly
_TRIES: Final = 5
_Result = TypeVar("_Result")
_LOGGED: Final = re.compile(r"\.?(\d{20})\..+")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")


def retry_conflicts(work: Callable[[], _Result]) -> _Result | None:
    """Call a function that commits, and retry after conflicts.

    Returns:
        Result of the function; None if each try had a conflict.
    """
    for attempt in range(_TRIES):
        try:
            return work()
        except CommitFailedError:
            time.sleep(0.1 * 2**attempt)
    return None


def remove_rows(table: Path, predicate: str, numbers: Mapping[str, int] | None = None) -> int | None:
    """Delete the rows of a table that match a predicate.

    Args:
        table: folder of the table.
        predicate: SQL condition on the rows.
        numbers: newest number by writer, recorded in the commit.

    Returns:
        Number of rows deleted; None if each try had a conflict.
    """

    def delete(properties: CommitProperties) -> Any:
        return DeltaTable(str(table)).delete(predicate, commit_properties=properties)

    done = retry_conflicts(lambda: commit_verified(table, delete, numbers))
    return None if done is None else int(done["num_deleted_rows"])


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """Small files of a partition that are worth compacting.

    Attributes:
        partition: filter of the partition: column, ``=`` and value as text; empty if the table has
            no partitions.
        files: number of files.
        size_bytes: total size of the files, bytes.
        rows: number of rows in the files, without files that have no count in the log.
    """

    partition: tuple[tuple[str, str, str], ...]
    files: int
    size_bytes: int
    rows: int


def small_files(table: Path) -> list[SmallFiles]:
    """Return the small files of each partition that has at least `MIN_SMALL_FILES` of them."""
    opened = open_table(table)
    columns = opened.metadata().partition_columns
    log = opened.get_add_actions(flatten=True)
    rows: Any = log["num_records"].to_pylist() if "num_records" in log.column_names else [0] * log.num_rows
    values = zip(*(log[f"partition.{column}"].to_pylist() for column in columns), strict=True) if columns else [()] * log.num_rows
    found: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for partition, size, count in zip(values, log["size_bytes"].to_pylist(), rows, strict=True):
        if size < SMALL_BYTES:
            found.setdefault(tuple(partition), []).append((size, count or 0))
    return [
        SmallFiles(
            tuple((column, "=", str(value)) for column, value in zip(columns, partition, strict=True)),
            len(files),
            sum(size for size, _ in files),
            sum(count for _, count in files),
        )
        for partition, files in sorted(found.items())
        if len(files) >= MIN_SMALL_FILES
    ]


def compact_small_files(table: Path, small: SmallFiles) -> bool:
    """Compact the small files of a partition; their order is not preserved.

    Returns:
        Whether the files were compacted; False if each try had a conflict.
    """
    filters = list(small.partition) or None
    target = 2 * SMALL_BYTES

    def compact(properties: CommitProperties) -> Any:
        return DeltaTable(str(table)).optimize.compact(
            partition_filters=filters, target_size=target, commit_properties=properties
        )

    return retry_conflicts(lambda: commit_verified(table, compact)) is not None


def unneeded_files(table: Path, kept_ms: int, versions: Collection[int] = ()) -> list[Path]:
    """Return the files of a table that no reader or writer needs.

    Args:
        table: folder of the table.
        kept_ms: time for which replaced files are kept, milliseconds.
        versions: older versions whose files are all kept.
    """
    opened = open_table(table)
    keep = sorted(versions) or None

    def listed(age_ms: int, *, full: bool) -> list[str]:
        hours = -(-age_ms // HOUR_MS)
        return opened.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=full, keep_versions=keep)

    names = {*listed(kept_ms, full=False), *listed(max(kept_ms, UNKNOWN_KEPT_MS), full=True)}
    return sorted(path for name in names if (path := table / name).is_file())


def write_checkpoint(table: Path, planned: int, *, dry_run: bool) -> bool:
    """Write a checkpoint of a table's log if the newest one is many versions old.

    Args:
        table: folder of the table.
        planned: number of commits before this step that a dry run has left out; 0 if this is no dry run.
        dry_run: whether nothing is written.

    Returns:
        Whether the checkpoint was written, or would be written if not for ``dry_run``.
    """
    newest = max(_checkpoints(table), default=-1)
    if open_table(table).version() + planned - newest < MIN_VERSIONS:
        return False
    if not dry_run:
        try:
            write_log_checkpoint(table)
        except (DeltaError, OSError) as error:  # the next maintenance retries
            if not isinstance(error, (DeltaError, FileNotFoundError)) and not is_disk_full(error):
                raise
            return False
    return True


def _checkpoints(table: Path) -> dict[int, float]:
    """Return the checkpoints of the log by version, with their write times.

    Only checkpoints of a single file are found; all writers of this project make these.

    Returns:
        Epoch seconds by version.
    """
    found = ((_CHECKPOINT.fullmatch(path.name), path) for path in (table / "_delta_log").glob("*.checkpoint.parquet"))
    return {int(named[1]): path.stat().st_mtime for named, path in found if named}


def outdated_log(
    table: Path, kept_ms: int, now_s: float, below: int | None = None, is_still_read: Callable[[int], bool] = lambda _: False
) -> list[Path]:
    """Return log files of a table that are no longer read, oldest version first.

    They are older than a checkpoint that has existed for ``kept_ms``. The age of the files
    themselves is not decisive: Spark holds a version of an idle table for days, and reads its log
    files when the next batch starts; by then it also reads newer versions. The numbers of the
    writers are not lost, since every checkpoint has them.

    Args:
        table: folder of the table.
        kept_ms: age of a checkpoint, milliseconds, from which older files may be removed.
        now_s: current time, epoch seconds.
        below: oldest version that must remain readable; None for the newest version.
        is_still_read: function that returns whether the commit file of a version is kept.
    """
    checkpoints = [
        version
        for version, written_s in _checkpoints(table).items()
        if now_s - written_s >= kept_ms / 1000 and (below is None or version <= below)
    ]
    if not checkpoints:
        return []
    found: list[tuple[int, Path]] = []
    for path in (table / "_delta_log").iterdir():
        named = _LOGGED.fullmatch(path.name)
        if (
            named is not None
            and int(named[1]) < max(checkpoints)
            and not (path.suffix == ".json" and is_still_read(int(named[1])))
        ):
            found.append((int(named[1]), path))
    return [path for _, path in sorted(found)]


def newest_by(table: Path, writer: str) -> int | None:
    """Return the newest version in which a writer recorded a number.

    The log of later versions must be kept for a running query of Spark, which looks for its next
    version after this one. A version removed from the log would seem free, but a commit there would
    be below a checkpoint and never be read.

    Args:
        table: folder of the table.
        writer: name of the writer, such as the id of a query.

    Returns:
        Version; None if the log has none.
    """
    for path in sorted((table / "_delta_log").glob("*.json"), reverse=True):
        if path.stem.isdecimal() and any(one["txn"]["appId"] == writer for one in actions_of(path) if "txn" in one):
            return int(path.stem)
    return None


def shorten_log(table: Path, writer: str, kept_ms: int, now_s: float) -> int:
    """Remove outdated log files of a table to which a running query writes.

    Args:
        table: folder of the table.
        writer: id of the query; versions newer than its last commit are kept.
        kept_ms: age of a checkpoint, milliseconds, from which older files are removed.
        now_s: current time, epoch seconds.

    Returns:
        Number of files removed.
    """
    newest = newest_by(table, writer)
    return 0 if newest is None else remove_files(outdated_log(table, kept_ms, now_s, newest))[0]


def remove_files(paths: Iterable[Path], *, dry_run: bool = False) -> tuple[int, int]:
    """Remove files; ignore those that no longer exist.

    Args:
        paths: files to remove.
        dry_run: whether the files are only counted.

    Returns:
        Number of existing files, and their total size in bytes.
    """
    count = size = 0
    for path in paths:
        try:
            length = path.stat().st_size
            if not dry_run:
                path.unlink()
        except FileNotFoundError:
            continue
        count, size = count + 1, size + length
    return count, size


def kept_versions(table: Path, keep_ms: int | None, now_ms: int) -> list[int]:
    """Return the versions of a table to keep: all of one day, then one per day.

    All versions of the last day are kept, and the newest of each earlier day within ``keep_ms``. A
    snapshot with an unsupported format version is kept regardless of its age.

    Args:
        table: folder of a table whose versions each replace the whole content.
        keep_ms: retention, milliseconds, counted back from the newest version, or from now if that
            is earlier; None keeps all versions.
        now_ms: current time, epoch milliseconds.
    """
    commits = open_table(table).history()
    history = [(int(one["version"]), int(one["timestamp"])) for one in commits]
    unknown = {int(one["version"]) for one in commits if (note := note_of(one)) is not None and not note.is_known}
    base_ms = min(now_ms, max(at_ms for _, at_ms in history))
    if keep_ms is None:
        return sorted(version for version, _ in history)
    of_day: dict[int, int] = {}
    for version, at_ms in history:
        if base_ms - at_ms <= keep_ms:
            of_day[at_ms // DAY_MS] = max(version, of_day.get(at_ms // DAY_MS, 0))
    return sorted({*unknown, *of_day.values(), *(version for version, at_ms in history if base_ms - at_ms <= DAY_MS)})


def cutoff_text(cutoff_ms: int) -> str:
    """Return an instant, epoch milliseconds, as an SQL literal for a predicate."""
    return f"'{format_instant(cutoff_ms)}'"
