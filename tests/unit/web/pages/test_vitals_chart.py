"""Geometry of the chart of a metric."""

from typing import Any

import pytest

from fleetpulse.web.pages.charts import SIZE
from fleetpulse.web.pages.vitals_chart import chart_of

pytestmark = pytest.mark.unit
HOUR_MS = 3_600_000


def _row(start_ms: int, end_ms: int, least: float, mean: float | None, most: float) -> dict[str, Any]:
    return {"window_start_ms": start_ms, "window_end_ms": end_ms, "min": least, "mean": mean, "max": most}


def test_windows_are_ranges_with_a_mark_at_the_mean() -> None:
    chart = chart_of([_row(HOUR_MS, 2 * HOUR_MS, 5, 7.5, 10), _row(0, HOUR_MS, 0, 0, 0)])
    assert chart is not None and (chart.least, chart.most) == (0, 10)
    ranges = [bar for bar in chart.bars if bar.kind == "range"]
    means = [bar for bar in chart.bars if bar.kind == "mean"]
    assert [(bar.x, bar.width) for bar in ranges] == [(50, 400), (550, 400)], "the oldest is on the left"
    assert ranges[1].y == 40 and ranges[1].y + ranges[1].height == SIZE / 2
    assert ranges[0].y == SIZE - 40 and ranges[0].height > 0, "a window of one value is visible"
    assert means[1].y + means[1].height / 2 == pytest.approx(270, abs=5)
    assert "min 5, mean 7.5, max 10" in ranges[1].title


def test_windows_that_overlap_share_their_time() -> None:
    chart = chart_of([_row(0, 2 * HOUR_MS, 1, 1, 1), _row(HOUR_MS, 3 * HOUR_MS, 1, None, 1)])
    assert chart is not None
    ranges = [bar for bar in chart.bars if bar.kind == "range"]
    assert ranges[0].x + ranges[0].width <= ranges[1].x
    assert all(0 <= bar.y <= SIZE for bar in ranges), "equal values are in the middle"
    assert len(chart.bars) == 3, "a window without a mean has no mark"


def test_no_windows_have_no_chart() -> None:
    assert chart_of([]) is None
