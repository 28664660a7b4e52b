"""Geometry of the chart of a metric: its range from minimum to maximum, and its mean, by window.

Rule: as in `charts`, a chart is a picture of the table beside it, in coordinates per mille.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from fleetpulse.core.times import format_instant
from fleetpulse.web.pages.charts import SIZE, Bar, Range, Tick, ticks

_FILL: Final = 0.8  # share of its place that a window covers
_LEAST: Final = 4.0  # height of a window whose values are equal
_MARGIN: Final = 40.0  # above the greatest and below the least value


@dataclass(frozen=True, slots=True)
class MetricChart:
    """Chart of a metric.

    Attributes:
        bars: rectangles: ``range`` from minimum to maximum, ``mean`` for the mean.
        least: least value.
        most: greatest value.
        ticks: labels of the time axis.
    """

    bars: Sequence[Bar]
    least: float
    most: float
    ticks: Sequence[Tick]


def chart_of(rows: Sequence[Mapping[str, Any]]) -> MetricChart | None:
    """Return the chart of windows of one metric; None without windows.

    Args:
        rows: windows as of `reports.streams.vitals.windows`, in any order.
    """
    if not rows:
        return None
    axis = Range(min(row["window_start_ms"] for row in rows), max(row["window_end_ms"] for row in rows))
    least, most = min(row["min"] for row in rows), max(row["max"] for row in rows)
    bars = list[Bar]()
    for row in sorted(rows, key=lambda row: row["window_end_ms"]):
        x, until = axis.place(row["window_start_ms"]), axis.place(row["window_end_ms"])
        width = max(1.0, _width(rows, axis, until - x) * _FILL)
        left = round((x + until - width) / 2, 2)
        top, bottom = _height(row["max"], least, most), _height(row["min"], least, most)
        title = f"{format_instant(row['window_start_ms'])}: min {row['min']:g}, mean {_shown(row['mean'])}, max {row['max']:g}"
        bars.append(Bar("range", left, round(width, 2), top, round(max(_LEAST, bottom - top), 2), title))
        if row["mean"] is not None:
            middle = _height(row["mean"], least, most)
            bars.append(Bar("mean", left, round(width, 2), round(middle - _LEAST / 2, 2), _LEAST * 2, title))
    return MetricChart(bars, least, most, ticks(axis))


def _width(rows: Sequence[Mapping[str, Any]], axis: Range, window: float) -> float:
    """Return the width of a window's place: windows of a slide overlap, and share their time."""
    ends = sorted({row["window_end_ms"] for row in rows})
    if len(ends) < 2:
        return window
    slide_ms = min(later - earlier for earlier, later in pairwise(ends))
    return min(window, slide_ms / max(1, axis.to_ms - axis.from_ms) * SIZE)


def _height(value: float, least: float, most: float) -> float:
    share = (value - least) / (most - least) if most > least else 0.5
    return round(SIZE - _MARGIN - share * (SIZE - 2 * _MARGIN), 2)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
