"""Verified commits to Delta tables that Spark also writes to.

On a local disk, Delta's log store in Spark checks whether a version is free, and then renames its
file to it. The rename replaces a commit that another process made in between. deltalake creates a
hard link, which never replaces a file. So Spark loses no commit, but other writers may (ADR 20).

Rule 1: a commit is valid if it still exists once no writer can replace it. Otherwise it is retried.
Rule 2: a writer that can replace it is visible: its hidden temporary file, named after the version,
is in the log's folder before it checks the version.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from deltalake import CommitProperties, Transaction

from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.corruption import open_table

_TRIES: Final = 20
_LIMIT_S: Final = 60.0  # limit of a rename: a writer that takes longer counts as killed
_PAUSE_S: Final = 0.005
_MARK: Final = "fleetpulse_commit"
_Result = TypeVar("_Result")
Commit = Callable[[CommitProperties], _Result]


def commit_verified(table: Path, commit: Commit[_Result], numbers: Mapping[str, int] | None = None) -> _Result:
    """Commit to a table, and retry if a commit of Spark replaced it.

    Args:
        table: folder of the table.
        commit: function that makes the commit with the given properties.
        numbers: newest number by writer, recorded in the commit.

    Returns:
        Result of ``commit``.

    Raises:
        FleetError: each try was replaced.
    """
    written = [Transaction(writer, number) for writer, number in (numbers or {}).items()]
    for _ in range(_TRIES):
        before, mark = open_table(table).version(), uuid.uuid4().hex
        result = commit(CommitProperties(custom_metadata={_MARK: mark}, app_transactions=written or None))
        if _is_final(table / "_delta_log", before, mark):
            return result
    raise FleetError(
        f'cannot commit to "{table}": another writer replaced each of {_TRIES} commits; stop writers other than the job',
        code="commit-replaced",
    )


def _is_final(log: Path, before: int, mark: str) -> bool:
    """Return whether a commit exists and can no longer be replaced.

    A commit without changes creates no version; it counts as existing.
    """
    version = before + 1
    while (path := log / f"{version:020d}.json").exists() and mark not in path.read_text():
        version += 1
    if not path.exists():
        return version == before + 1
    until_s = time.monotonic() + _LIMIT_S
    while any(log.glob(f".{path.name}.*.tmp")) and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
    return mark in path.read_text()
