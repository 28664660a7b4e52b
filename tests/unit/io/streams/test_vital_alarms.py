"""Alarms of metrics: runs of windows beyond a bound, however their windows are closed by batches."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.tables import VITALS
from fleetpulse.core.streams.vitals import Vital, VitalsSpan
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.vital_alarms import alarms_in
from fleetpulse.io.tables import tables

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(10_000))]
MINUTE_MS = 60_000
CHANGE = 60  # minute from which the second policy is in force
SPANS = (
    VitalsSpan(0, {"battery": Vital(MINUTE_MS, MINUTE_MS, below=3.2, for_ms=150_000)}),
    VitalsSpan(
        CHANGE * MINUTE_MS,
        {
            "battery": Vital(MINUTE_MS, MINUTE_MS, below=3.2, for_ms=MINUTE_MS),
            "load": Vital(2 * MINUTE_MS, MINUTE_MS, above=90, for_ms=4 * MINUTE_MS),
        },
    ),
)


def _windows(seed: int) -> list[dict[str, Any]]:
    """Return windows in the order in which they close; some are missing, and late values are listed beside them."""
    random, rows = Random(seed), list[dict[str, Any]]()
    for minute in range(120):
        for device in ("a", "b"):
            for metric, width, levels in (("battery", 1, (3.0, 3.0, 3.0, 3.3)), ("load", 2, (95.0, 95.0, 95.0, 80.0))):
                if random.random() < 0.1:
                    continue
                level = random.choice(levels)
                spread = random.choice([0, 0, 0.5])
                rows.append(
                    {
                        "device_id": device,
                        "metric": metric,
                        "window_start_ms": minute * MINUTE_MS,
                        "window_end_ms": (minute + width) * MINUTE_MS,
                        "site": "oslo",
                        "late": False,
                        "closed_at_ms": (minute + width) * MINUTE_MS,
                        "count": 1,
                        "min": level,
                        "max": level + spread,
                        "last": level,
                    }
                )
                rows.append(
                    {**rows[-1], "late": True, "min": 1.0, "max": 1.0}
                    if random.random() < 0.1
                    else {**rows[-1], "site": "bergen"}
                )
    return sorted(rows, key=lambda one: one["window_end_ms"])


def _expected(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, int, int]]:
    """Return the alarms: device, site, metric, start of the run and instant, minutes."""
    found: list[tuple[str, str, str, int, int]] = []
    by_key = {
        (one["device_id"], one["site"], one["metric"], one["window_start_ms"] // MINUTE_MS): one
        for one in rows
        if not one["late"]
    }

    def is_broken(key: tuple[str, str, str, int]) -> bool:
        one = by_key.get(key)
        return one is not None and (one["max"] < 3.2 if key[2] == "battery" else one["min"] > 90)

    for device, site, metric, minute in by_key:
        if metric == "load" and minute < CHANGE:
            continue
        needed, width = (3, 2) if metric == "load" else (3 if minute < CHANGE else 1, 1)
        run = 0
        while is_broken((device, site, metric, minute - run)):
            run += 1
        if run == needed:
            found.append((device, site, metric, minute - needed + 1, minute + width))
    return sorted(found)


def test_each_run_of_broken_windows_raises_one_alarm_for_any_batches(home: Home) -> None:
    rows = _windows(1)
    ends = sorted({one["window_end_ms"] for one in rows})
    cuts = sorted(Random(2).sample(ends, 9))
    found: list[tuple[str, str, str, int, int]] = []
    for number, (begin, end) in enumerate(pairwise([-1, *cuts, ends[-1]]), 1):
        closed = tables.to_table(VITALS, [one for one in rows if begin < one["window_end_ms"] <= end])
        if number % 2:
            tables.append(home, VITALS, closed, "test", number)
        for one in alarms_in(home, closed, SPANS).to_pylist():
            minutes = (round(one[name].timestamp() * 1000) // MINUTE_MS for name in ("broken_from", "raised_at"))
            found.append((one["device_id"], one["site"], one["metric"], *minutes))
        if not number % 2:
            tables.append(home, VITALS, closed, "test", number)
    expected = _expected(rows)
    assert sorted(found) == expected
    assert len(expected) > 20 and {one[2] for one in expected} == {"battery", "load"}


def test_an_alarm_names_its_bound_and_the_last_value(home: Home) -> None:
    rows = [one for one in _windows(1) if one["metric"] == "load" and not one["late"]]
    alarm = alarms_in(home, tables.to_table(VITALS, rows), SPANS).to_pylist()[0]
    assert (alarm["below"], alarm["above"], alarm["for_ms"], alarm["last"]) == (None, 90.0, 240_000, 95.0)


def test_a_window_that_a_rebuild_reads_in_part_raises_no_alarm(home: Home) -> None:
    [window, *_] = [one for one in _windows(1) if one["metric"] == "battery" and not one["late"]]
    whole = {**window, "count": 2, "min": 3.0, "max": 3.3, "last": 3.0}
    part = {**window, "count": 1, "min": 3.0, "max": 3.0, "last": 3.0}
    spans = (VitalsSpan(0, {"battery": Vital(MINUTE_MS, MINUTE_MS, below=3.2, for_ms=MINUTE_MS)}),)
    assert alarms_in(home, tables.to_table(VITALS, [part]), spans).num_rows == 1
    tables.append(home, VITALS, tables.to_table(VITALS, [whole]), "test", 1)
    assert alarms_in(home, tables.to_table(VITALS, [part]), spans).num_rows == 0, "the rows before its span are missing"


def test_windows_of_a_policy_without_bounds_raise_no_alarm(home: Home) -> None:
    closed = tables.to_table(VITALS, _windows(1))
    assert alarms_in(home, closed, (VitalsSpan(0, {"battery": Vital(MINUTE_MS, MINUTE_MS)}),)).num_rows == 0
    assert alarms_in(home, closed, ()).num_rows == 0


def test_bound_may_be_any_number_of_a_double(home: Home) -> None:
    [window, *_] = _windows(1)
    for bound, count in ((10**100, 1), (-(10**100), 0)):
        spans = (VitalsSpan(0, {window["metric"]: Vital(MINUTE_MS, MINUTE_MS, below=bound, for_ms=MINUTE_MS)}),)
        assert alarms_in(home, tables.to_table(VITALS, [window]), spans).num_rows == count
