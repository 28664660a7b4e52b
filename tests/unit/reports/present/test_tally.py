"""Numbers of devices beside the facts in memory: differences, and rows that are joined."""

from collections.abc import Iterator

import pytest
from duckdb import DuckDBPyConnection

from fleetpulse.io.tables.tables import connect
from fleetpulse.reports.present import tally
from fleetpulse.reports.present.tally import COUNTED, Tally

pytestmark = pytest.mark.unit
_NUMBERS = "SELECT mode, sum(n) FROM live.counted GROUP BY mode ORDER BY mode"


def _devices(connection: DuckDBPyConnection, name: str, *modes: str) -> None:
    others = ", ".join(f'NULL AS "{column}"' for column in COUNTED[1:])
    connection.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT unnest(?::VARCHAR[]) AS mode, {others}", [list(modes)])


@pytest.fixture
def connection() -> Iterator[DuckDBPyConnection]:
    with connect() as opened:
        opened.execute("ATTACH ':memory:' AS live")
        _devices(opened, "live.devices", "online", "online", "offline")
        yield opened


def test_replaced_devices_change_the_numbers(connection: DuckDBPyConnection) -> None:
    counted = Tally(connection)
    _devices(connection, "earlier", "online", "offline")
    _devices(connection, "later", "offline", "offline", "updating")
    counted.replace("earlier", "later")
    assert connection.execute(_NUMBERS).fetchall() == [("offline", 2), ("online", 1), ("updating", 1)]
    counted.replace("earlier", "earlier")
    assert connection.execute(_NUMBERS).fetchall() == [("offline", 2), ("online", 1), ("updating", 1)]


def test_rows_with_the_same_values_are_joined(connection: DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "_FEW", 4)
    counted, rows = Tally(connection), list[int]()
    _devices(connection, "earlier", "online")
    _devices(connection, "later", "offline")
    for number in range(8):
        counted.replace(*(("earlier", "later"), ("later", "earlier"))[number % 2])
        rows += connection.execute("SELECT count(*) FROM live.counted").fetchone() or ()
        assert connection.execute(_NUMBERS).fetchall() == [("offline", 2 - number % 2), ("online", 1 + number % 2)]
    assert rows == [4, 2, 4, 2, 4, 2, 4, 2]
