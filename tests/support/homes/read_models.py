"""Tables of judgements and devices as reports read them, without Delta."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from duckdb import DuckDBPyConnection

from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES, JUDGEMENTS
from fleetpulse.io.tables import tables as delta
from tests.support.histories.histories import registry_entries


@contextmanager
def judgements_in_duckdb(judgements: Sequence[dict[str, Any]], rows: Sequence[Row]) -> Iterator[DuckDBPyConnection]:
    """Open tables with judgements and with the registry entries of rows."""
    with delta.connect() as connection:
        for table, content in ((JUDGEMENTS, judgements), (DEVICES, registry_entries(rows))):
            held = delta.to_table(table, content)
            connection.register(f"{table.name}_held", held)
            connection.execute(f"CREATE TABLE {table.name} AS SELECT * FROM {table.name}_held")
        delta.open_views_in(connection)
        yield connection
