"""A clean day raises nothing, in short: ``./fleet bench quality`` has all of it."""

import pytest

from bench.quality import bench_quality
from fleetpulse.core.quality.table_suites import SUITES

pytestmark = [
    pytest.mark.property,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Great Expectations' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # likewise
]


def test_a_clean_day_raises_nothing_and_every_suite_looks_at_it() -> None:
    [*suites, made, looked] = bench_quality(quick=True, say=lambda words: None)
    assert [one["what"] for one in suites] == [suite.name for suite in SUITES]
    assert made["rows"] > 50_000 and looked["raised"] == 0
    empty = {one["what"] for one in suites if not one["rows"]}
    unseen = {"recordings", "amendments", "clocks", "quarantine table", "gateways table", "stream_health table"}
    assert empty <= unseen, "no job ran, all was well"
