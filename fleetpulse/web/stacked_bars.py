"""Geometry of stacked bars over time, which templates draw as SVG.

Rule 1: a chart has no style of its own: each part has a class. A table beside it has the same figures.
Rule 2: instants and amounts are numbers of the rows; nothing is rounded but coordinates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 960
HEIGHT: Final = 150  # of the bars
LEFT: Final = 56  # width of the labels of the vertical axis
_STEPS: Final = (1, 2, 5)
_TICKS: Final = 6  # instants on the horizontal axis


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a bar.

    Attributes:
        part: index of the part.
        y: upper edge.
        height: height.
    """

    part: int
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of one span of time.

    Attributes:
        x: left edge.
        width: width.
        title: figures of the bar, as text.
        segments: parts, from the bottom.
    """

    x: float
    width: float
    title: str
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class Chart:
    """Stacked bars.

    Attributes:
        parts: names of the parts, from the bottom.
        bars: bars, oldest first.
        lines: heights of the horizontal lines, with their amounts as text.
        ticks: positions on the horizontal axis, with their instants (epoch milliseconds).
    """

    parts: Sequence[str]
    bars: Sequence[Bar]
    lines: Sequence[tuple[float, str]]
    ticks: Sequence[tuple[float, int]]


def stacked_bars(
    rows: Sequence[Mapping[str, Any]],
    parts: Sequence[str],
    span: tuple[int, int, int],
    amount: Callable[[float], str],
    title: Callable[[Mapping[str, Any]], str],
) -> Chart:
    """Return the geometry of a chart.

    Args:
        rows: rows with ``from_ms``, the start of their span, and an amount for each part.
        parts: names of the parts, from the bottom.
        span: start and end of the horizontal axis, and length of the span of a bar; milliseconds.
        amount: function that formats an amount.
        title: function that describes a row.
    """
    from_ms, to_ms, bucket_ms = span
    ceiling = _ceiling(max((sum(row[part] or 0 for part in parts) for row in rows), default=0))
    scale = (WIDTH - LEFT) / max(1, to_ms - from_ms)
    bars: list[Bar] = []
    for row in rows:
        segments: list[Segment] = []
        top = float(HEIGHT)
        for index, part in enumerate(parts):
            height = (row[part] or 0) / ceiling * HEIGHT
            top -= height
            if height > 0:
                segments.append(Segment(index, round(top, 2), round(height, 2)))
        width = max(1.0, bucket_ms * scale - 1)
        bars.append(Bar(round(LEFT + (row["from_ms"] - from_ms) * scale, 2), round(width, 2), title(row), segments))
    lines = [(round(HEIGHT * (1 - share), 2), amount(ceiling * share)) for share in (0.5, 1.0)]
    return Chart(parts, bars, lines, ticks(from_ms, to_ms))


def ticks(from_ms: int, to_ms: int) -> list[tuple[float, int]]:
    """Return positions on a horizontal axis, with their instants (epoch milliseconds)."""
    scale = (WIDTH - LEFT) / max(1, to_ms - from_ms)
    step_ms = (to_ms - from_ms) // _TICKS
    return [(round(LEFT + number * step_ms * scale, 2), from_ms + number * step_ms) for number in range(_TICKS)]


def _ceiling(greatest: float) -> float:
    """Return the least number of the form 1, 2 or 5 times a power of ten that is not below an amount."""
    power = 1.0
    while power * 10 <= greatest:
        power *= 10
    return next((step * power for step in _STEPS if step * power >= greatest), 10 * power)
