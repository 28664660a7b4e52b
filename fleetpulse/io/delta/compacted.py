"""Names of compacted files of bronze, which contain the rows of several versions.

The name of a compacted file has its range of versions, so its rows can still be read by version.

Rule 1: a compacted file has all rows of the versions from ``begin`` up to, and not including,
``end``, in append order. A reader that continues at ``begin`` reads the same rows as before.
Rule 2: the remainder file has the rows that retention keeps of the versions below its ``end``. It
is not a compacted file: a reader that needs these versions gets an error.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = "history"
_PIECE: Final = re.compile(r"versions-(\d{20})-(\d{20})-(\d+)\.parquet")
_REMAINDER: Final = re.compile(r"before-(\d{20})\.parquet")


@dataclass(frozen=True, slots=True)
class CompactedFile:
    """A compacted file of consecutive versions.

    Attributes:
        begin: first version.
        end: version after the last one.
        rows: number of rows.
    """

    begin: int
    end: int
    rows: int

    @property
    def name(self) -> str:
        """Path of the file, relative to the table's folder."""
        return f"{FOLDER}/versions-{self.begin:020d}-{self.end:020d}-{self.rows}.parquet"


def remainder_name(end: int) -> str:
    """Return the path of a remainder file, relative to the table's folder.

    Args:
        end: version after the last version that the file covers.
    """
    return f"{FOLDER}/before-{end:020d}.parquet"


def piece_of(name: str) -> CompactedFile | None:
    """Parse the name of a compacted file.

    Args:
        name: path of the file, relative to the table's folder.

    Returns:
        The compacted file; None if the name is of another file.
    """
    named = _PIECE.fullmatch(name.removeprefix(f"{FOLDER}/"))
    return CompactedFile(*map(int, named.groups())) if named else None


def remainder_end(name: str) -> int | None:
    """Parse the name of a remainder file.

    Args:
        name: path of the file, relative to the table's folder.

    Returns:
        Version after the last version that the file covers; None if the name is of another file.
    """
    named = _REMAINDER.fullmatch(name.removeprefix(f"{FOLDER}/"))
    return int(named[1]) if named else None


def pieces(table: Path) -> dict[int, list[CompactedFile]]:
    """Return the compacted files of a table by first version, the longest ones first."""
    found: dict[int, list[CompactedFile]] = {}
    for piece in map(piece_of, _names(table)):
        if piece is not None:
            found.setdefault(piece.begin, []).append(piece)
    return {start: sorted(those, key=lambda piece: -piece.end) for start, those in found.items()}


def remainders(table: Path) -> dict[int, Path]:
    """Return the remainder files by ``end``; only the one with the greatest ``end`` is valid."""
    ends = ((remainder_end(name), name) for name in _names(table))
    return {end: table / FOLDER / name for end, name in ends if end is not None}


def _names(table: Path) -> list[str]:
    return [path.name for path in (table / FOLDER).glob("*.parquet")]
