"""Commits to tables that Spark writes to as well: on a local disk Spark may put its own in the place of one that was there first.

Delta's log store for files looks whether a version is free, and then renames its file to it; the rename replaces what another
process has put there between the two. deltalake links its file, which replaces nothing: so Spark loses no commit, and others may.

Rule 1: a commit counts when nobody is about to replace it any more, and it is still there; otherwise it is made again.
Rule 2: who is about to shows it: the file that is to be renamed lies beside, under a hidden name with the version in it.
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
_LIMIT_S: Final = 60.0  # for a rename: who takes longer was killed
_PAUSE_S: Final = 0.005
_MARK: Final = "fleetpulse_commit"
_Result = TypeVar("_Result")
Commit = Callable[[CommitProperties], _Result]


def commit_verified(table: Path, commit: Commit[_Result], numbers: Mapping[str, int] | None = None) -> _Result:
    """Make a commit, again where Spark's replaced it; return what making it returned.

    Args:
        table: the table's folder.
        commit: makes it, with the properties that it is given.
        numbers: to which number each of several writers has come by it.

    Raises:
        FleetError: it was replaced time and again.
    """
    written = [Transaction(writer, number) for writer, number in (numbers or {}).items()]
    for _ in range(_TRIES):
        before, mark = open_table(table).version(), uuid.uuid4().hex
        result = commit(CommitProperties(custom_metadata={_MARK: mark}, app_transactions=written or None))
        if _stays(table / "_delta_log", before, mark):
            return result
    raise FleetError(
        f'each of {_TRIES} commits to "{table}" was replaced by another\'s; see who writes to it besides the job',
        code="commit-replaced",
    )


def _stays(log: Path, before: int, mark: str) -> bool:
    """Whether a commit is there for good; one that had nothing to change made no version, and nothing of it can be lost."""
    version = before + 1
    while (path := log / f"{version:020d}.json").exists() and mark not in path.read_text():
        version += 1
    if not path.exists():
        return version == before + 1
    until_s = time.monotonic() + _LIMIT_S
    while any(log.glob(f".{path.name}.*.tmp")) and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
    return mark in path.read_text()
