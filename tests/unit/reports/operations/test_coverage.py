"""Coverage gaps of bridges, from the rows that open and close them."""

from typing import Any

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import COVERAGE
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.operations.coverage import coverage_gaps
from tests.support.histories.histories import START

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(10_000))]


def _write(home: Home, *rows: tuple[str, str, int, int]) -> None:
    entries: list[dict[str, Any]] = [
        {"bridge": bridge, "op": op, "at_ms": START + at_s * 1000, "received_at_ms": START + received_s * 1000,
         "why": f"why{at_s}", "origin": "bridge", "segment": 1}
        for bridge, op, at_s, received_s in rows
    ]  # fmt: skip
    tables.append(home, COVERAGE, tables.to_table(COVERAGE, entries), "test", 1)


def _gaps(home: Home, last: int = 10, **more: Any) -> list[tuple[str, int, int | None, str]]:
    return [
        (one["bridge"], (one["since_ms"] - START) // 1000, one["until_ms"] and (one["until_ms"] - START) // 1000, one["why"])
        for one in coverage_gaps(home, last, **more)
    ]


def test_a_gap_ends_at_the_next_close_of_its_bridge(home: Home) -> None:
    _write(home, ("a", "open", 10, 12), ("b", "open", 11, 13), ("a", "close", 20, 20), ("b", "close", 40, 41))
    assert _gaps(home) == [("b", 11, 40, "why11"), ("a", 10, 20, "why10")]


def test_a_gap_that_is_opened_twice_begins_once(home: Home) -> None:
    _write(home, ("a", "open", 10, 12), ("a", "open", 9, 15), ("a", "close", 20, 20), ("a", "open", 30, 30))
    assert _gaps(home) == [("a", 30, None, "why30"), ("a", 10, 20, "why10")]


def test_an_end_without_a_beginning_is_no_gap(home: Home) -> None:
    _write(home, ("a", "close", 10, 10), ("a", "close", 11, 11), ("a", "open", 12, 12))
    assert _gaps(home) == [("a", 12, None, "why12")]


def test_an_outage_of_one_instant_is_a_gap(home: Home) -> None:
    _write(home, ("a", "close", 10, 10), ("a", "open", 5, 10))
    assert _gaps(home) == [("a", 5, 10, "why5")]


def test_gaps_are_filtered_and_limited(home: Home) -> None:
    assert _gaps(home) == []
    _write(home, ("a", "open", 10, 12), ("a", "close", 20, 20), ("b", "open", 30, 30), ("a", "open", 40, 40))
    assert _gaps(home, only_open=True) == [("a", 40, None, "why40"), ("b", 30, None, "why30")]
    assert _gaps(home, bridge="a") == [("a", 40, None, "why40"), ("a", 10, 20, "why10")]
    assert _gaps(home, last=1) == [("a", 40, None, "why40")]
    after = _gaps(home, ends_after_ms=START + 20_000)
    assert after == [("a", 40, None, "why40"), ("b", 30, None, "why30")], "a gap that ends at the instant is over"
    assert len(_gaps(home, ends_after_ms=START + 19_999)) == 3
