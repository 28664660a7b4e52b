"""Streams over a recorded real fleet: sessions and vitals equal independent SQL over its bronze.

The recording has no commands. It has arrivals up to 49 minutes late, restarts of counters and silences of months.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest import recording
from fleetpulse.io.streams.runner import start_stream
from tests.support.histories.histories import positioned, row, tick
from tests.support.histories.recordings import NEEDS_RECORDED_FLEET, RECORDED_FLEET
from tests.support.histories.session_sql import sessions_by_sql
from tests.support.histories.sessions import counted, defined, written
from tests.support.histories.vital_sql import require_equal_windows, windows_by_sql, windows_of
from tests.support.homes.homes import empty, land

pytestmark = [pytest.mark.spark, pytest.mark.extended, NEEDS_RECORDED_FLEET]
DEPLOYMENT: Final = Deployment(allowed_lateness_ms=300_000)
OPTIONS: Final = StreamOptions((StreamName.SESSIONS, StreamName.VITALS), every_ms=0, silence_ms=3_600_000)
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
WINDOWS: Final = {"rssi": (DAY_MS, DAY_MS), "batteryVoltage": (HOUR_MS, HOUR_MS), "temperature": (HOUR_MS, HOUR_MS // 4)}
VITALS: Final = {
    name: {"window": f"{width // 60_000}m", "slide": f"{slide // 60_000}m"} for name, (width, slide) in WINDOWS.items()
}


def _bronze() -> list[Row]:
    """Return the rows of the recording between a policy and ticks that close all windows and sessions."""
    recorded = [*recording.rows(RECORDED_FLEET)]
    first_ms, last_ms = recorded[0].received_at_ms, recorded[-1].received_at_ms
    body = {"policy": parse_policy({"vitals": VITALS}).normalised(), "effective_from": 0}
    policy = replace(row(0, "fleet/_/_/policy", **body), received_at_ms=first_ms - 1)
    return positioned([policy, *recorded, *(replace(tick(0), received_at_ms=last_ms + days * DAY_MS) for days in (3, 4))])


def _run(spark: SparkSession, home: Home, name: StreamName) -> None:
    query = start_stream(spark, home, name, OPTIONS)
    assert query.awaitTermination(600)
    dropped = [one["numRowsDroppedByWatermark"] for each in query.recentProgress for one in each["stateOperators"]]
    assert not any(dropped)


def test_sessions_and_vitals_of_a_recorded_fleet_equal_sql_over_its_bronze(spark: SparkSession, tmp_path: Path) -> None:
    rows, home = _bronze(), empty(tmp_path / "home", DEPLOYMENT)
    edges = [0, len(rows) // 2, len(rows) - 1, len(rows)]  # the last batch closes the windows
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        land(home, rows[begin:end], number)
        for name in OPTIONS.names:
            _run(spark, home, name)
    found = written(home)
    assert found == counted(sessions_by_sql(home, OPTIONS.silence_ms)) == defined(rows, OPTIONS.silence_ms)
    assert found.total() > 10_000
    windows = windows_of(home)
    closed_ms = rows[-2].received_at_ms - DEPLOYMENT.allowed_lateness_ms
    require_equal_windows(windows, windows_by_sql(home, [(rows[0].received_at_ms + 1, WINDOWS)], closed_ms))
    assert {(one["metric"], one["late"]) for one in windows} == {(name, late) for name in WINDOWS for late in (True, False)}
