"""Geometry of stacked bars over time: batches by their parts, messages by their reason.

Rule: as in `charts`, a chart is a picture of a table beside it, in coordinates per mille. The class of a shape is
``p-`` and the place of its part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.web.pages.charts import SIZE, Bar, Range, Tick, ticks

_FILL: Final = 0.86  # share of its span that a bar covers


@dataclass(frozen=True, slots=True)
class StackedBars:
    """Chart of stacked bars.

    Attributes:
        parts: names of the parts, from the bottom.
        bars: rectangles; ``kind`` is the class.
        most: greatest sum of a bar.
        ticks: labels of the time axis.
    """

    parts: Sequence[str]
    bars: Sequence[Bar]
    most: float
    ticks: Sequence[Tick]


def stacked_bars(
    rows: Sequence[Mapping[str, Any]],
    parts: Sequence[str],
    axis: Range,
    bucket_ms: int,
    title: Callable[[Mapping[str, Any]], str],
) -> StackedBars:
    """Return the geometry of a chart.

    Args:
        rows: rows with ``from_ms``, the start of their span (epoch milliseconds), and an amount for each part.
        parts: names of the parts, from the bottom.
        axis: span of the time axis.
        bucket_ms: length of the span of a bar, milliseconds.
        title: function that describes a row for people.
    """
    most = max((sum(row[part] for part in parts) for row in rows), default=0)
    width = bucket_ms / (axis.to_ms - axis.from_ms) * SIZE
    bars: list[Bar] = []
    for row in rows:
        y = float(SIZE)
        for place, part in enumerate(parts):
            if (height := row[part] / most * SIZE if most else 0) > 0:
                y -= height
                x = axis.place(row["from_ms"]) + width * (1 - _FILL) / 2
                bars.append(Bar(f"p-{place}", round(x, 2), round(width * _FILL, 2), round(y, 2), round(height, 2), title(row)))
    return StackedBars(parts, bars, most, ticks(axis))
