"""From when on a table has all its rows: what maintenance has promised not to have removed.

Rule: it is written down before the first row goes, so that it never says more than is there.
"""

import json

from fleetpulse.core.errors import FleetError
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write

_FILE = "kept.json"


def oldest_kept_ms(home: Home, table: str) -> int | None:
    """Return the instant from which on a table of a home has all its rows, epoch milliseconds; None where none was removed.

    Of ``messages`` that is ``received_at``: what was received before is gone, but for our own rows.
    """
    return _all(home).get(table)


def require_kept(home: Home, table: str, asked_ms: int, what: str) -> None:
    """Refuse what reads further back than a table goes.

    Args:
        home: the home.
        table: the table's name.
        asked_ms: the oldest instant that is to be read, epoch milliseconds.
        what: what asks, as in ``a replay``.

    Raises:
        FleetError: it is older than what is kept; it says from when on rows are kept, and which setting decides.
    """
    kept_ms = oldest_kept_ms(home, table)
    if kept_ms is not None and asked_ms < kept_ms:
        raise FleetError(
            f"{what} needs {table} from {format_instant(asked_ms)} on; kept are those from {format_instant(kept_ms)} on "
            f"(the setting keep_{table}); begin there or later, or restore a backup",
            code="rows-not-retained",
        )


def promise(home: Home, table: str, kept_ms: int) -> None:
    """Write down that rows older than an instant are about to go; one that was written before never moves back."""
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
            f'"{path}" cannot be read ({error}); restore it, or write into it from when on each table is kept',
            code="retention-floor-damaged",
        ) from None
