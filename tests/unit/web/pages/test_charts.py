"""Geometry of the charts of the page."""

import pytest

from fleetpulse.core.times import DAY_MS, HOUR_MS
from fleetpulse.web.pages.charts import SIZE, Range, columns, gap_bars, line, share_bars, stacked, ticks

pytestmark = pytest.mark.unit
DAY = Range(0, DAY_MS)


def test_an_instant_has_a_place_within_the_axis() -> None:
    assert [DAY.place(at) for at in (-1, 0, DAY_MS // 4, 2 * DAY_MS)] == [0, 0, 250, 1000]
    assert Range(5, 5).place(5) == 0


def test_labels_are_at_round_instants() -> None:
    assert [one.text for one in ticks(Range(10 * DAY_MS + 1, 11 * DAY_MS + HOUR_MS))] == ["06:00", "12:00", "18:00", "12 Jan"]
    assert [one.text for one in ticks(Range(0, HOUR_MS))] == ["00:10", "00:20", "00:30", "00:40", "00:50"]


def test_gaps_are_cut_at_the_axis_and_stay_visible() -> None:
    found = gap_bars([(-HOUR_MS, 6 * HOUR_MS), (12 * HOUR_MS, 12 * HOUR_MS + 1), (18 * HOUR_MS, None), (2 * DAY_MS, None)], DAY)
    assert [(one.x, one.width) for one in found] == [(0, 250), (500, 2), (750, 250)]


def test_shares_fill_the_bar() -> None:
    found = share_bars({"online": 3, "offline": 1})
    assert [(one.kind, one.x, one.width) for one in found] == [("offline", 0, 250), ("online", 250, 750)]
    assert share_bars({}) == []


def test_columns_are_stacked_to_the_greatest_sum() -> None:
    bars, most = columns([{"online": 1, "offline": 3}, {}, {"online": 2}])
    assert most == 4
    assert [(one.kind, one.y, one.height) for one in bars] == [("online", 750, 250), ("offline", 0, 750), ("online", 500, 500)]


def test_areas_are_stacked_from_the_bottom() -> None:
    found = stacked({"online": [3, 1], "offline": [1, 3], "flagged": [0, 0]})
    assert [one.mode for one in found] == ["online", "offline"]
    assert found[0].path == "M0 250L1000 750L1000 1000L0 1000Z"
    assert found[1].path == "M0 0L1000 0L1000 750L0 250Z"
    assert stacked({"online": [1]}) == stacked({}) == []
    assert SIZE == 1000


def test_a_line_has_its_greatest_value_at_the_top() -> None:
    assert line([(0, -2.5), (DAY_MS // 2, 7.5), (DAY_MS, 2.5)], DAY) == "M0 1000L500 0L1000 500"
    assert line([(DAY_MS, 3.0)], DAY) == "M1000 500"
    assert line([], DAY) == ""
