"""Quality benchmark in short: a day without faults fails no expectation; see ``./fleet bench quality``."""

import pytest

from bench.quality import bench_quality
from fleetpulse.core.quality.table_suites import SUITES

pytestmark = [
    pytest.mark.property,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # emitted by Great Expectations
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # likewise
]


def test_a_day_without_faults_fails_no_expectation_of_any_suite() -> None:
    [*suites, judging, evaluation] = bench_quality(quick=True, report=lambda line: None)
    assert [one["what"] for one in suites] == [suite.name for suite in SUITES]
    assert judging["rows"] > 50_000 and evaluation["raised"] == 0
    without_rows = {one["what"] for one in suites if not one["rows"]}
    expected = {"recordings", "amendments", "clocks", "quarantine table", "gateways table", "stream_health table"}
    expected |= {"sessions table", "vitals table", "commands table"}
    assert without_rows <= expected, "only suites about jobs, faults, gateways and streams have no rows"
