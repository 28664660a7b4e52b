"""Any Delta table kept small: rows of an age removed, small files joined, files and versions that nobody needs deleted.

Rule 1: each step leaves a table that every reader and writer goes on with, and may be broken off anywhere and done again.
Rule 2: a commit that another's was in the way of is tried again, a few times; what is busy is left for the next time.
Rule 3: what was replaced stays for a while, for who is reading it; what no log names stays for a week, for who is writing it.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from fleetpulse.core.times import format_instant
from fleetpulse.io.delta.commits import write_log_checkpoint
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.delta.log import actions_of
from fleetpulse.io.delta.spark_conflicts import commit_verified
from fleetpulse.io.system.fsync import no_room
from fleetpulse.io.tables.snapshots import note_of

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
UNKNOWN_KEPT_MS: Final = 7 * DAY_MS  # files that no log names: somebody may have been writing them before the machine slept
SMALL_BYTES: Final = 32 * 1024 * 1024
MIN_FILES: Final = 10  # of a partition: fewer are not worth writing them again
MIN_VERSIONS: Final = 10  # behind the newest checkpoint of a log: fewer are read at once
_TRIES: Final = 5
_Result = TypeVar("_Result")
_LOGGED: Final = re.compile(r"\.?(\d{20})\..+")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")


def tried(work: Callable[[], _Result]) -> _Result | None:
    """Do what ends in a commit, again where another's came in its way; None where one always did."""
    for attempt in range(_TRIES):
        try:
            return work()
        except CommitFailedError:
            time.sleep(0.1 * 2**attempt)
    return None


def remove_rows(table: Path, predicate: str, numbers: Mapping[str, int] | None = None) -> int | None:
    """Remove the rows of a table that a predicate is true of; return how many, None where others were always in the way.

    Args:
        table: its folder.
        predicate: as SQL says it.
        numbers: to which number each of several writers has come by it.
    """

    def delete(said: CommitProperties) -> Any:
        return DeltaTable(str(table)).delete(predicate, commit_properties=said)

    done = tried(lambda: commit_verified(table, delete, numbers))
    return None if done is None else int(done["num_deleted_rows"])


@dataclass(frozen=True, slots=True)
class Small:
    """Small files of a partition that are worth joining.

    Attributes:
        partition: column and value, as text; empty where the table has no partitions.
        files: how many.
        size_bytes: together.
        rows: in them, as far as the log says.
    """

    partition: tuple[tuple[str, str, str], ...]
    files: int
    size_bytes: int
    rows: int


def small_files(table: Path) -> list[Small]:
    """Return the partitions of a table that have many small files."""
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
        Small(
            tuple((column, "=", str(value)) for column, value in zip(columns, partition, strict=True)),
            len(files),
            sum(size for size, _ in files),
            sum(count for _, count in files),
        )
        for partition, files in sorted(found.items())
        if len(files) >= MIN_FILES
    ]


def join(table: Path, small: Small) -> bool:
    """Join a partition's small files; False where others were always in the way. Their order is not kept."""
    filters = list(small.partition) or None
    target = 2 * SMALL_BYTES

    def compact(said: CommitProperties) -> Any:
        return DeltaTable(str(table)).optimize.compact(partition_filters=filters, target_size=target, commit_properties=said)

    return tried(lambda: commit_verified(table, compact)) is not None


def unneeded(table: Path, kept_ms: int, versions: Collection[int] = ()) -> list[Path]:
    """Return the files of a table that nobody needs any longer.

    Args:
        table: its folder.
        kept_ms: for how long what was replaced stays.
        versions: older versions that are kept whole.
    """
    opened = open_table(table)
    keep = sorted(versions) or None

    def listed(age_ms: int, *, full: bool) -> list[str]:
        hours = -(-age_ms // HOUR_MS)
        return opened.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=full, keep_versions=keep)

    names = {*listed(kept_ms, full=False), *listed(max(kept_ms, UNKNOWN_KEPT_MS), full=True)}
    return sorted(path for name in names if (path := table / name).is_file())


def write_checkpoint(table: Path, *, dry_run: bool) -> bool:
    """Write a checkpoint of a table's log, where many versions lie behind the newest one; return whether."""
    newest = max(_checkpoints(table), default=-1)
    if open_table(table).version() - newest < MIN_VERSIONS:
        return False
    if not dry_run:
        try:
            write_log_checkpoint(table)
        except (DeltaError, OSError) as error:  # the next maintenance writes it
            if not isinstance(error, (DeltaError, FileNotFoundError)) and not no_room(error):
                raise
            return False
    return True


def _checkpoints(table: Path) -> dict[int, float]:
    """Return the versions that the log has whole checkpoints of (of one file, as all that write here make), and when written."""
    found = ((_CHECKPOINT.fullmatch(path.name), path) for path in (table / "_delta_log").glob("*.checkpoint.parquet"))
    return {int(named[1]): path.stat().st_mtime for named, path in found if named}


def outdated_log(
    table: Path, kept_ms: int, now_s: float, below: int | None = None, spared: Callable[[int], bool] = lambda _: False
) -> list[Path]:
    """Return files of a table's log that nobody reads any more, the oldest version first.

    What goes lies below a checkpoint that has been there for ``kept_ms``. The age of the files themselves says nothing: Spark
    holds a version of an idle table for days, and reads its files when the next batch begins; but it looks for newer ones then.
    The numbers to which each writer has come are in every checkpoint.

    Args:
        table: its folder.
        kept_ms: for how long a checkpoint has been there before what lies below it goes.
        now_s: the time, as files have it.
        below: versions from here on can be opened afterwards as well; None: only the newest.
        spared: says of a version that its commit stays all the same.
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
        if named is not None and int(named[1]) < max(checkpoints) and not (path.suffix == ".json" and spared(int(named[1]))):
            found.append((int(named[1]), path))
    return [path for _, path in sorted(found)]


def newest_by(table: Path, writer: str) -> int | None:
    """Return the newest version that a writer has said a number in; None where the log has none such.

    A query that Spark runs makes its next commit after that one, and must find what others have committed in between: a number
    that was cleared looks free to it, and what it commits below a checkpoint nobody reads.
    """
    for path in sorted((table / "_delta_log").glob("*.json"), reverse=True):
        if path.stem.isdecimal() and any(one["txn"]["appId"] == writer for one in actions_of(path) if "txn" in one):
            return int(path.stem)
    return None


def shorten_log(table: Path, writer: str, kept_ms: int, now_s: float) -> int:
    """Remove what lies below a checkpoint of some age from the log of a table that a running query writes to.

    Args:
        table: its folder.
        writer: the query's id; what is newer than its last commit stays.
        kept_ms: for how long a checkpoint has been there before what lies below it goes.
        now_s: the time, as files have it.

    Returns:
        How many files went.
    """
    newest = newest_by(table, writer)
    return 0 if newest is None else remove_files(outdated_log(table, kept_ms, now_s, newest))[0]


def remove_files(paths: Iterable[Path], *, dry_run: bool = False) -> tuple[int, int]:
    """Remove files; return how many there were, and their bytes. One that is gone already is passed over."""
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
    """Return the versions of a table that stay: those of the last day, and the newest of each day of the time that is kept.

    A snapshot that another version of fleetpulse took stays however old it is: what it is good for is not known here.

    Args:
        table: a table whose every version is a whole, written over the one before.
        keep_ms: counted back from the newest version, or from now where that lies ahead; None keeps all.
        now_ms: the time, epoch milliseconds.
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
    """Return an instant as a predicate has it."""
    return f"'{format_instant(cutoff_ms)}'"
