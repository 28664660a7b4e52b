"""Reader of a Delta log: files and row counts that each version appended.

Rule: versions that rewrite or remove files (OPTIMIZE, retention) are skipped. A missing version is
an error, not a gap. Compacted versions are read from their compacted file, see `compacted`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.compacted import FOLDER, CompactedFile, pieces, remainders


def actions_of(commit: Path) -> list[dict[str, Any]]:
    """Parse the actions of a commit file, one per line.

    Lines are split at line feeds only: text in an action may contain other Unicode line breaks.
    """
    return [json.loads(line) for line in commit.read_text(encoding="utf-8").split("\n") if line]


def appended_files(actions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of the ``add`` actions with which a commit appended files.

    A commit that removes files appends none, even if it marks added files as changed data: DELETE
    does so for files with the remaining rows.

    Args:
        actions: actions of the commit, see `actions_of`.
    """
    if any("remove" in action for action in actions):
        return []
    return [action["add"] for action in actions if "add" in action and action["add"].get("dataChange", True)]


def row_count(added: Mapping[str, Any], unknown: int = 0) -> int:
    """Return the number of rows of a file that a commit added; ``unknown`` if it has no statistics."""
    return int(json.loads(added.get("stats") or "{}").get("numRecords", unknown))


def is_committed(folder: Path) -> bool:
    """Return whether a table's log has a commit or checkpoint.

    A writer that was killed while it created the table leaves a folder, or rows, without a commit.
    """
    try:
        with os.scandir(folder / "_delta_log") as entries:
            return any(one.name.endswith((".json", ".parquet")) and one.name[:20].isdecimal() for one in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def holds_table(folder: Path) -> bool:
    """Return whether a folder holds a table, even a damaged one.

    A folder with an empty log but with data files counts as a damaged table, so that it is not
    created again.
    """
    if is_committed(folder):
        return True
    return (folder / "_delta_log").exists() and any(one.name != "_delta_log" for one in folder.iterdir())


class DeltaLog:
    """Reader of the files that the versions of a Delta table appended.

    Args:
        table: folder of the table.
    """

    def __init__(self, table: Path) -> None:
        self.table = table
        self.log = table / "_delta_log"
        self._pieces: dict[int, list[CompactedFile]] = {}
        self._pieces_changed_ns = -1
        self._newest = -1

    def latest(self) -> int:
        """Return the newest version; -1 if there is none.

        The search continues from the version found last: a log may have a hundred thousand commits
        a day, too many to list for each poll.
        """
        if self._newest < 0 or not self._commit_of(self._newest).exists():
            versions = (int(path.stem) for path in self.log.glob("*.json") if path.stem.isdecimal())
            self._newest = max(versions, default=-1)
        while self._commit_of(self._newest + 1).exists():
            self._newest += 1
        return self._newest

    def _commit_of(self, version: int) -> Path:
        return self.log / f"{version:020d}.json"

    def digest(self, version: int) -> str | None:
        """Return a digest of a version's commit; None if the version is not in the log.

        Two tables with the same digest have the same content at that version, since the commit names the
        files that it added.
        """
        try:
            return blake2b(self._commit_of(version).read_bytes(), digest_size=8).hexdigest()
        except FileNotFoundError:
            return None

    def landed_ms(self, version: int) -> int:
        """Return the commit time of a version, from the file's modification time.

        Returns:
            Time, epoch milliseconds; 0 if the version is no longer in the log.
        """
        try:
            return self._commit_of(version).stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return 0

    def actions(self, version: int) -> list[dict[str, Any]]:
        """Return the actions of a version's commit.

        Raises:
            FleetError: the version is no longer in the log.
        """
        try:
            return actions_of(self._commit_of(version))
        except FileNotFoundError:
            raise FleetError(
                f"version {version} of {self.table.name} is missing in the table's log and has not been judged; "
                f"restore it from a backup, or create a generation from a snapshot",
                code="table-version-missing",
            ) from None

    def appended(self, version: int) -> list[tuple[str, int]]:
        """Return path and number of rows of each file that a version appended, see `appended_files`.

        Raises:
            FleetError: the version is no longer in the log.
        """
        return [(str(self.table / unquote(one["path"])), row_count(one)) for one in appended_files(self.actions(version))]

    def span(self, version: int, through: int | None = None) -> tuple[list[tuple[str, int]], int]:
        """Return the files that a version appended, and the version to read next.

        If a compacted file begins with the version, that file is returned instead.

        Args:
            version: version to read.
            through: first version that must not be read; None for no limit.

        Returns:
            Path and number of rows of each file, and the version to read next.

        Raises:
            FleetError: the version is no longer in the log, nor in a compacted file.
        """
        known = self._known_pieces().get(version, ())
        if piece := next((one for one in known if through is None or one.end <= through), None):
            return [(str(self.table / piece.name), piece.rows)], piece.end
        return self.appended(version), version + 1

    def readable_since(self, version: int) -> int:
        """Return the version at which a reader must begin, so that it reads all rows of a version and later ones.

        Returns:
            The version itself; the begin of the compacted file with its rows; or, if retention has removed
            rows of the version, the oldest version that can be read.
        """
        oldest = max(remainders(self.table), default=0)
        containing = (one for each in self._known_pieces().values() for one in each if one.begin <= version < one.end)
        widest = max(containing, key=lambda one: one.end - one.begin, default=None)  # a narrower one was compacted again
        return max(oldest, version if widest is None else widest.begin)

    def _known_pieces(self) -> dict[int, list[CompactedFile]]:
        try:
            changed = (self.table / FOLDER).stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._pieces_changed_ns:  # checked several times a second, changes about once an hour
            self._pieces, self._pieces_changed_ns = pieces(self.table), changed
        return self._pieces

    def first_file(self) -> str | None:
        """Return the path of the file with the table's first row; None if it has no rows."""
        if left := remainders(self.table):
            return str(left[max(left)])
        version, latest = 0, self.latest()
        while version <= latest:
            files, version = self.span(version)
            if files:
                return files[0][0]
        return None
