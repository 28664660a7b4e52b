"""Newest instant of the results of a stream, from the statistics of the files of its table."""

from collections.abc import Iterable

from fleetpulse.core.tables import Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import files_of


def newest_ms(home: Home, table: Table, columns: Iterable[str]) -> int | None:
    """Return the newest instant in some columns of a table, epoch milliseconds; None without rows. No file is opened."""
    greatest = [file.greatest for name in columns for file in files_of(home, table, name) if file.greatest is not None]
    return round(max(greatest).timestamp() * 1000) if greatest else None
