"""Files of a home that cannot be read: which, and what to do.

Rule 1: only what a reader says of a file is damage; an error of ours, in SQL or in a column's name, stays what it is.
Rule 2: who reads a file says which it was, where the reader does not.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetpulse.core.errors import FleetError

if TYPE_CHECKING:
    from deltalake import DeltaTable

# Modules of the libraries' errors, by name: a process that reads nothing with them does not load them.
_DELTA, _DUCKDB, _ARROW = "_internal", "_duckdb", "pyarrow.lib"
_NO_DAMAGE: Final = frozenset({"CommitFailedError", "SchemaMismatchError"})  # another's commit, and a column of ours
_OF_WRITING: Final = re.compile(r"no space left|disk quota|read-only file system", re.IGNORECASE)
_OF_A_FILE: Final = re.compile(r"\.parquet\b|\bparquet file\b", re.IGNORECASE)


class DamagedError(FleetError):
    """A file of a home cannot be read."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"{what} cannot be read: a file is damaged or gone ({why}); it is left as it is; give the same command again, and "
            f"where it says the same, restore the home from a copy",
            code="file-damaged",
        )


def corruption_message(error: BaseException) -> str | None:
    """Return in one line what a reader of tables says of a file that is damaged or gone; None where it is another error."""
    if _OF_WRITING.search(str(error)):
        return None  # the disk refuses what is written: nothing that is there is damaged
    names = [kind.__name__ for kind in type(error).__mro__]
    if type(error).__module__ == _DELTA and "DeltaError" in names:
        damaged = _NO_DAMAGE.isdisjoint(names)
    elif type(error).__module__ == _DUCKDB:
        damaged = _is_told_by_duckdb(names[0], str(error))
    elif type(error).__module__ == _ARROW:
        damaged = "ArrowInvalid" in names and _OF_A_FILE.search(str(error)) is not None
    else:
        damaged = False
    return _first_line(error) if damaged else None


def _is_told_by_duckdb(name: str, text: str) -> bool:
    """Whether it is of a file: wrong SQL has classes of its own, and a file whose parts do not fit has none but the common."""
    return name in ("Error", "IOException") or (name == "InvalidInputException" and _OF_A_FILE.search(text) is not None)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


@contextmanager
def reporting_corruption(what: str) -> Iterator[None]:
    """Read something with Delta or DuckDB.

    Args:
        what: is read, as in ``the log of the table "messages"``.

    Raises:
        DamagedError: a file of it is damaged, or gone.
    """
    try:
        yield
    except Exception as error:
        if (why := corruption_message(error)) is None:
            raise
        raise DamagedError(what, why) from error


@contextmanager
def reporting_corruption_of_file(path: Path) -> Iterator[None]:
    """Read one Parquet file with Arrow; nothing else may be done meanwhile, since whatever Arrow refuses is its damage.

    Raises:
        DamagedError: it is damaged, or gone.
    """
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedError(f'"{path}"', _first_line(error)) from error


def open_table(path: Path) -> "DeltaTable":
    """Open the newest version of a Delta table.

    Raises:
        DamagedError: its log is damaged.
    """
    from deltalake import DeltaTable

    with reporting_corruption(f'the log of the table "{path}"'):
        return DeltaTable(str(path))
