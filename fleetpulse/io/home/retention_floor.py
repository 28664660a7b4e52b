"""Retention floor of tables: the instant since which all rows of a table are kept.

Rule: the floor is written before the first row is removed, so that it never lies before a gap.
"""

import json

from fleetpulse.core.errors import FleetError
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write

_FILE = "kept.json"


def oldest_kept_ms(home: Home, table: str) -> int | None:
    """Return the retention floor of a table.

    For ``messages`` it is a ``received_at``. Of earlier rows, only those that fleetpulse itself
    writes (registry, policies, gaps, commands) are kept.

    Returns:
        Instant, epoch milliseconds; None if no row was removed.
    """
    return _all(home).get(table)


def require_kept(home: Home, table: str, asked_ms: int, operation: str) -> None:
    """Check that the rows since an instant are above the retention floor of a table.

    Args:
        home: home that holds the table.
        table: name of the table.
        asked_ms: oldest instant to be read, epoch milliseconds.
        operation: name of the reading operation for the error, such as ``a replay``.

    Raises:
        FleetError: the instant lies before the retention floor.
    """
    kept_ms = oldest_kept_ms(home, table)
    if kept_ms is not None and asked_ms < kept_ms:
        raise FleetError(
            f"{operation} needs {table} since {format_instant(asked_ms)}; rows are kept since {format_instant(kept_ms)} "
            f"(setting keep_{table}); choose a later start, or restore a backup",
            code="rows-not-retained",
        )


def raise_floor(home: Home, table: str, kept_ms: int) -> None:
    """Raise the retention floor of a table, before older rows are removed.

    A floor never moves back.

    Args:
        home: home that holds the table.
        table: name of the table.
        kept_ms: new retention floor, epoch milliseconds.
    """
    known = _all(home)
    if known.get(table, kept_ms - 1) >= kept_ms:
        return
    atomic_write(home.path / _FILE, json.dumps({**known, table: kept_ms}, indent=1))


def _all(home: Home) -> dict[str, int]:
    path = home.path / _FILE
    try:
        return {str(name): int(kept_ms) for name, kept_ms in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise FleetError(
            f'the retention floors in "{path}" cannot be read ({error}); restore the file, or write each table\'s floor into it',
            code="retention-floor-damaged",
        ) from None
