"""Geometry of stacked bars: heights are shares of the greatest bar, and parts lie on each other."""

import pytest

from fleetpulse.web.pages.charts import SIZE, Range
from fleetpulse.web.pages.stacked_bars import stacked_bars

pytestmark = pytest.mark.unit
PARTS = ("a", "b")


def test_parts_lie_on_each_other_and_the_greatest_bar_fills_the_chart() -> None:
    rows = [{"from_ms": 0, "a": 1, "b": 3}, {"from_ms": 50, "a": 0, "b": 1}]
    chart = stacked_bars(rows, PARTS, Range(0, 100), 50, lambda row: f"at {row['from_ms']}")
    assert chart.most == 4
    assert [(one.kind, one.y, one.height, one.title) for one in chart.bars] == [
        ("p-0", SIZE * 3 / 4, SIZE / 4, "at 0"),
        ("p-1", 0, SIZE * 3 / 4, "at 0"),
        ("p-1", SIZE * 3 / 4, SIZE / 4, "at 50"),
    ]
    assert [one.x >= 0 and one.x + one.width <= SIZE for one in chart.bars] == [True] * 3
    assert chart.bars[0].x + chart.bars[0].width < chart.bars[2].x


def test_no_amount_is_no_bar() -> None:
    assert stacked_bars([{"from_ms": 0, "a": 0, "b": 0}], PARTS, Range(0, 100), 50, lambda _: "").bars == []
    assert stacked_bars([], PARTS, Range(0, 100), 50, lambda _: "").most == 0
