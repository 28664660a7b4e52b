"""Modes by hour: the kept differences with newer rows equal the fleet at the end of each hour."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.io.tables.tables import reading
from fleetpulse.reports.history.time_travel import READ, Moment, fleet_of
from fleetpulse.reports.present import hourly, over_time
from fleetpulse.reports.present.kept import keep_present, open_present
from fleetpulse.reports.present.over_time import modes_over_time
from tests.support.floors import Floor
from tests.support.form import examples
from tests.support.histories.histories import START
from tests.support.histories.strategies import DEPLOYMENTS, histories
from tests.support.homes.batches import BatchedHome

HOUR_MS: Final = 20_000  # histories last some minutes
FROM_MS: Final = START - 3 * HOUR_MS
CUTS: Final = st.lists(st.integers(0, 60), min_size=2, max_size=4)
ADDED, HOURS = Floor(2), Floor(20)
Counts = list[dict[str, Any]]


def _defined(landed: BatchedHome, frontier_ms: int, where: dict[str, str]) -> Counts:
    first_ms = FROM_MS // HOUR_MS * HOUR_MS
    found: Counts = []
    with reading(landed.home, READ) as tables:
        for hour_ms in range(first_ms, frontier_ms + 1, HOUR_MS):
            fleet = fleet_of(tables, Moment(hour_ms + HOUR_MS - 1, judged_to_ms=frontier_ms))
            counted = Counter(one["mode"] for one in fleet if all(one[name] == value for name, value in where.items()))
            found.append({"hour_ms": hour_ms, "devices": dict(sorted(counted.items()))})
    return found


@ADDED.over_all_examples
@HOURS.over_all_examples
@settings(max_examples=examples(8))
@given(histories(), CUTS, DEPLOYMENTS, st.data())
def test_modes_by_hour_equal_the_fleet_at_the_end_of_each_hour(
    rows: list[Row], drawn_cuts: list[int], deployment: Deployment, data: st.DataObject
) -> None:
    cuts = sorted({len(rows), *(1 + cut % len(rows) for cut in drawn_cuts)})
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        for module in (hourly, over_time):
            patched.setattr(module, "HOUR_MS", HOUR_MS)
        landed = BatchedHome(Path(folder) / "home", rows, deployment)
        for _, cut in pairwise([0, *cuts]):
            landed.land(cut, amending=data.draw(st.booleans()))
            frontier_ms = landed.frontier_ms
            if frontier_ms is not None:
                where = data.draw(st.sampled_from([{}, {}, {"site": "north"}, {"device_class": "quick"}]))
                shown = modes_over_time(landed.home, frontier_ms, FROM_MS, frontier_ms + HOUR_MS, **where)
                assert shown == _defined(landed, frontier_ms, where)
                HOURS.met(sum(bool(one["devices"]) for one in shown))
                with open_present(landed.home, frontier_ms) as present:
                    ADDED.met(present.position is not None and hourly.is_kept(landed.home, present))
            if data.draw(st.integers(0, 2)):
                keep_present(landed.home, frontier_ms)
