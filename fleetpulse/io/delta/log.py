"""What the versions of a Delta table appended, read from its log: file names and counts, never a row.

Rule: versions that rewrite or remove (OPTIMIZE, retention) are passed over; a version that is gone is an error, not a gap.
Versions that were put together are read from their piece, see `compacted`.
"""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.compacted import FOLDER, CompactedFile, pieces, remainders


def actions_of(commit: Path) -> list[dict[str, Any]]:
    """Return the actions of a commit, a line each; a text in one may hold what Unicode takes for an end of a line."""
    return [json.loads(line) for line in commit.read_text(encoding="utf-8").split("\n") if line]


def is_committed(folder: Path) -> bool:
    """Whether a table's log has an entry: its folder, and Spark's first rows, come first, and their maker may end there."""
    try:
        with os.scandir(folder / "_delta_log") as entries:
            return any(one.name.endswith((".json", ".parquet")) and one.name[:20].isdecimal() for one in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def holds_table(folder: Path) -> bool:
    """Whether a home's folder holds a table: one that has rows, and a log that lost its entries, is damaged and not made anew."""
    if is_committed(folder):
        return True
    return (folder / "_delta_log").exists() and any(one.name != "_delta_log" for one in folder.iterdir())


class DeltaLog:
    """The appended files of a Delta table's versions, read from its log."""

    def __init__(self, table: Path) -> None:
        self.table = table
        self.log = table / "_delta_log"
        self._pieces: dict[int, list[CompactedFile]] = {}
        self._looked_at = -1
        self._newest = -1

    def latest(self) -> int:
        """Return the newest version; -1 where there is none.

        It goes on from the one that was found last: a day leaves a hundred thousand commits, too many to be listed at each look.
        """
        if self._newest < 0 or not self._commit_of(self._newest).exists():
            versions = (int(path.stem) for path in self.log.glob("*.json") if path.stem.isdecimal())
            self._newest = max(versions, default=-1)
        while self._commit_of(self._newest + 1).exists():
            self._newest += 1
        return self._newest

    def _commit_of(self, version: int) -> Path:
        return self.log / f"{version:020d}.json"

    def landed_ms(self, version: int) -> int:
        """Return when a version was committed, by the file's time, epoch milliseconds; 0 where it is gone from the log."""
        try:
            return self._commit_of(version).stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return 0

    def actions(self, version: int) -> list[dict[str, Any]]:
        """Return the actions of a version.

        Raises:
            FleetError: the version is no longer in the log.
        """
        try:
            return actions_of(self._commit_of(version))
        except FileNotFoundError:
            raise FleetError(
                f"version {version} of {self.table.name} is gone from its log, and has not been judged; "
                f"restore it from a backup, or begin a new generation from a snapshot",
                code="table-version-missing",
            ) from None

    def appended(self, version: int) -> list[tuple[str, int]]:
        """Return path and number of rows of each file that a version appended.

        What a version adds while it removes others is not new: DELETE says of what it leaves that data changed.

        Raises:
            FleetError: the version is no longer in the log.
        """
        actions = self.actions(version)
        files: list[tuple[str, int]] = []
        for action in actions:
            add = action.get("add")
            if "remove" in action:
                return []
            if add and add.get("dataChange", True):
                rows = json.loads(add.get("stats") or "{}").get("numRecords", 0)
                files.append((str(self.table / unquote(add["path"])), rows))
        return files

    def span(self, version: int, through: int | None = None) -> tuple[list[tuple[str, int]], int]:
        """Return the files that a version appended, or the piece that begins with it, and the version to go on with.

        Args:
            version: to be read.
            through: the version that is not to be read any more; None where there is none such.

        Raises:
            FleetError: the version is gone.
        """
        known = self._known_pieces().get(version, ())
        if piece := next((one for one in known if through is None or one.end <= through), None):
            return [(str(self.table / piece.name), piece.rows)], piece.end
        return self.appended(version), version + 1

    def _known_pieces(self) -> dict[int, list[CompactedFile]]:
        try:
            changed = (self.table / FOLDER).stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._looked_at:  # asked several times a second, changed once an hour
            self._pieces, self._looked_at = pieces(self.table), changed
        return self._pieces

    def first_file(self) -> str | None:
        """Return the file that holds the first row ever; None where the log has come to no row yet."""
        if left := remainders(self.table):
            return str(left[max(left)])
        version, latest = 0, self.latest()
        while version <= latest:
            files, version = self.span(version)
            if files:
                return files[0][0]
        return None
