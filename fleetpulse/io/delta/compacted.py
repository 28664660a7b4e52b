"""Versions of bronze that were put together: still read by version, since a file's name says which versions it holds.

Rule 1: a piece holds all rows of the versions from ``begin`` up to, and not including, ``end``, in the order in which they were
appended; who reads on from ``begin`` reads the same rows as before.
Rule 2: what retention leaves of the versions below ``end`` is no piece: who would read on from there learns that it is gone.
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
    """Versions that were put together.

    Attributes:
        begin: the first version.
        end: the one behind the last.
        rows: how many there are.
    """

    begin: int
    end: int
    rows: int

    @property
    def name(self) -> str:
        """Its path in the table's folder."""
        return f"{FOLDER}/versions-{self.begin:020d}-{self.end:020d}-{self.rows}.parquet"


def remainder_name(end: int) -> str:
    """Return the path, in the table's folder, of what retention leaves of the versions below ``end``."""
    return f"{FOLDER}/before-{end:020d}.parquet"


def piece_of(name: str) -> CompactedFile | None:
    """Return the piece that a file is, by its path in the table's folder; None where it is none."""
    named = _PIECE.fullmatch(name.removeprefix(f"{FOLDER}/"))
    return CompactedFile(*map(int, named.groups())) if named else None


def remainder_end(name: str) -> int | None:
    """Return up to which version a file is what retention left; None where it is none."""
    named = _REMAINDER.fullmatch(name.removeprefix(f"{FOLDER}/"))
    return int(named[1]) if named else None


def pieces(table: Path) -> dict[int, list[CompactedFile]]:
    """Return the pieces of a table by their first version, the longest first; none where nothing was done."""
    found: dict[int, list[CompactedFile]] = {}
    for piece in map(piece_of, _names(table)):
        if piece is not None:
            found.setdefault(piece.begin, []).append(piece)
    return {begin: sorted(those, key=lambda piece: -piece.end) for begin, those in found.items()}


def remainders(table: Path) -> dict[int, Path]:
    """Return what retention has left, by the version up to which; the newest counts."""
    ends = ((remainder_end(name), name) for name in _names(table))
    return {end: table / FOLDER / name for end, name in ends if end is not None}


def _names(table: Path) -> list[str]:
    return [path.name for path in (table / FOLDER).glob("*.parquet")]
