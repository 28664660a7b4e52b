"""Detection of damaged or missing files of a home, and the error reporting them.

Rule 1: only a library's error about a file counts as damage. An error in SQL or in a column name of
this project is not converted.
Rule 2: the caller names the file or table that it reads, since the library's error may not.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetpulse.core.errors import FleetError, first_line

if TYPE_CHECKING:
    from deltalake import DeltaTable

# Modules of the libraries' errors, by name, so that this module does not import the libraries.
_DELTA, _DUCKDB, _ARROW = "_internal", "_duckdb", "pyarrow.lib"
_NO_DAMAGE: Final = frozenset({"CommitFailedError", "SchemaMismatchError"})  # a conflicting commit; a fault of this code
_OF_WRITING: Final = re.compile(r"no space left|disk quota|read-only file system", re.IGNORECASE)
_OF_A_FILE: Final = re.compile(r"\.parquet\b|\bparquet file\b", re.IGNORECASE)


class DamagedError(FleetError):
    """Error about a damaged or missing file of a home."""

    def __init__(self, subject: str, why: str) -> None:
        super().__init__(
            f"{subject} cannot be read: a file is damaged or missing ({why}); the file is left unchanged; run the command "
            f"again, and if it fails again, restore the home from a backup",
            code="file-damaged",
        )


def corruption_message(error: BaseException) -> str | None:
    """Return the first line of an error about a damaged or missing file.

    Args:
        error: error raised by deltalake, DuckDB or Arrow.

    Returns:
        Text of the error; None if it does not report a damaged or missing file.
    """
    if _OF_WRITING.search(str(error)):
        return None  # a write failed, so no existing file is damaged
    names = [kind.__name__ for kind in type(error).__mro__]
    if type(error).__module__ == _DELTA and "DeltaError" in names:
        damaged = _NO_DAMAGE.isdisjoint(names)
    elif type(error).__module__ == _DUCKDB:
        damaged = _is_duckdb_file_error(names[0], str(error))
    elif type(error).__module__ == _ARROW:
        damaged = "ArrowInvalid" in names and _OF_A_FILE.search(str(error)) is not None
    else:
        damaged = False
    return first_line(error) if damaged else None


def _is_duckdb_file_error(name: str, text: str) -> bool:
    """Return whether an error of DuckDB is about a file; errors in SQL have other classes.

    DuckDB reports inconsistent content of a file by the base class ``Error``.
    """
    return name in ("Error", "IOException") or (name == "InvalidInputException" and _OF_A_FILE.search(text) is not None)


@contextmanager
def reporting_corruption(subject: str) -> Iterator[None]:
    """Convert errors of deltalake, DuckDB or Arrow about a file to `DamagedError`.

    Args:
        subject: name of the data being read, such as ``the log of the table "messages"``.

    Raises:
        DamagedError: a file of the data is damaged or missing.
    """
    try:
        yield
    except Exception as error:
        if (why := corruption_message(error)) is None:
            raise
        raise DamagedError(subject, why) from error


@contextmanager
def reporting_corruption_of_file(path: Path) -> Iterator[None]:
    """Convert errors of Arrow while it reads one Parquet file to `DamagedError`.

    The block must only read this file, since every error of Arrow counts as damage of the file.

    Args:
        path: path of the file.

    Raises:
        DamagedError: the file is damaged or missing.
    """
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedError(f'"{path}"', first_line(error)) from error


def open_table(path: Path) -> "DeltaTable":
    """Open the newest version of a Delta table.

    Raises:
        DamagedError: the log of the table is damaged.
    """
    from deltalake import DeltaTable

    with reporting_corruption(f'the log of the table "{path}"'):
        return DeltaTable(str(path))
