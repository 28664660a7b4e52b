"""Command `fleet vitals`: windows of a device, newest first."""

import json

import pytest

from cli.commands.inspect.vitals import vitals
from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.tables import VITALS
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(10_000))]


@pytest.fixture
def shown(home: Home) -> Home:
    """Return a home with sixty windows of two metrics, and one row of late values."""
    rows = [
        {
            "device_id": device,
            "metric": metric,
            "window_start_ms": START + 60_000 * number,
            "window_end_ms": START + 60_000 * (number + 1),
            "site": "oslo",
            "late": metric == "heat",
            "closed_at_ms": START + 60_000 * (number + 1),
            "count": 2,
            "min": 1.0,
            "max": 2.5,
            "mean": 1.75,
            "last": 2.5,
            "last_at_ms": START + 60_000 * number + 5,
        }
        for device, metric, number in [("pump", "load", number) for number in range(60)]
        + [("pump", "heat", 3), ("fan", "load", 3)]
    ]
    tables.append(home, VITALS, tables.to_table(VITALS, rows), "test", 1)
    return home


def test_rows_are_those_of_the_device_newest_first(shown: Home, capsys: pytest.CaptureFixture[str]) -> None:
    since = format_instant(START + 60_000 * 3)
    vitals("pump", None, since, shown.path, json_lines=True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 57 + 1 and {one["device_id"] for one in found} == {"pump"}
    assert found == sorted(found, key=lambda one: one["window_end"], reverse=True)
    vitals("pump", "heat", None, shown.path, json_lines=True)
    (heat,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (heat["late"], heat["mean"], heat["last_at"]) == (True, 1.75, format_instant(START + 180_005))


def test_the_table_shows_the_newest_windows_and_their_width(shown: Home, capsys: pytest.CaptureFixture[str]) -> None:
    vitals("pump", None, None, shown.path, json_lines=False)
    output = capsys.readouterr().out
    assert "1.75" in output and "1m" in output and "first 50 rows" in output


def test_a_device_without_windows_names_the_conditions(shown: Home, capsys: pytest.CaptureFixture[str]) -> None:
    vitals("valve", None, None, shown.path, json_lines=False)
    assert "setting streams" in " ".join(capsys.readouterr().out.split())
