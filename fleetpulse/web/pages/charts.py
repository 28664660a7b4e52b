"""Geometry of charts that the server draws as SVG: stacked modes over time, bars, bands of states.

Rule 1: a chart is a picture of a table that stands beneath it. It has no facts of its own.
Rule 2: shapes have classes, not styles: the content security policy forbids inline styles.
Rule 3: coordinates are per mille of the chart, so that it fits every width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.times import DAY_MS, HOUR_MS, MINUTE_MS

SIZE: Final = 1_000
IN_SERVICE: Final = (  # order of modes in a stack, from the bottom
    Mode.ONLINE, Mode.DEGRADED, Mode.FLAGGED, Mode.MAINTENANCE, Mode.UPDATING, Mode.UNREACHABLE, Mode.OFFLINE,
)  # fmt: skip
ORDER: Final = (*IN_SERVICE, Mode.PROVISIONED, Mode.DECOMMISSIONED, Mode.FORGOTTEN)
_STEPS_MS: Final = (
    *(n * MINUTE_MS for n in (1, 2, 5, 10, 15, 30)), *(n * HOUR_MS for n in (1, 2, 3, 6, 12)),
    *(n * DAY_MS for n in (1, 2, 7, 14, 30, 90, 365)),
)  # fmt: skip
_TICKS: Final = 7


@dataclass(frozen=True, slots=True)
class Range:
    """Span of a time axis, epoch milliseconds.

    Attributes:
        from_ms: first instant.
        to_ms: last instant.
    """

    from_ms: int
    to_ms: int

    def place(self, at_ms: int) -> float:
        """Return the place of an instant on the axis, within it."""
        share = (at_ms - self.from_ms) / max(1, self.to_ms - self.from_ms)
        return round(min(1.0, max(0.0, share)) * SIZE, 2)


@dataclass(frozen=True, slots=True)
class Tick:
    """Label of an axis.

    Attributes:
        place: place in per cent.
        text: label; instants are in UTC.
    """

    place: float
    text: str


def ticks(axis: Range) -> list[Tick]:
    """Return the labels of a time axis, at round instants in UTC."""
    span_ms = axis.to_ms - axis.from_ms
    step_ms = next((one for one in _STEPS_MS if span_ms / one <= _TICKS), _STEPS_MS[-1])
    first_ms = -(-axis.from_ms // step_ms) * step_ms
    found = list[Tick]()
    for at_ms in range(first_ms, axis.to_ms + 1, step_ms):
        place = axis.place(at_ms) / 10
        if 3 <= place <= 97:  # a label at the edge would be cut
            moment = datetime.fromtimestamp(at_ms // 1000, UTC)
            found.append(Tick(place, f"{moment:%-d %b}" if at_ms % DAY_MS == 0 else f"{moment:%H:%M}"))
    return found


@dataclass(frozen=True, slots=True)
class Bar:
    """Rectangle of a chart, per mille.

    Attributes:
        kind: class: a mode, or ``gap``.
        x: left edge.
        width: width.
        y: upper edge.
        height: height.
        title: text for people.
        at_ms: instant to which the bar leads; None if it leads nowhere.
    """

    kind: str
    x: float
    width: float
    y: float = 0
    height: float = SIZE
    title: str = ""
    at_ms: int | None = None


def gap_bars(gaps: Iterable[tuple[int, int | None]], axis: Range) -> list[Bar]:
    """Return bars of coverage gaps; an open gap lasts to the end of the axis."""
    bars = list[Bar]()
    for opened_ms, closed_ms in gaps:
        until_ms = axis.to_ms if closed_ms is None else closed_ms
        if opened_ms < axis.to_ms and until_ms > axis.from_ms:
            x = axis.place(opened_ms)
            bars.append(Bar("gap", x, round(max(2.0, axis.place(until_ms) - x), 2), title="not listening"))
    return bars


def share_bars(counts: Mapping[str, int]) -> list[Bar]:
    """Return a stack from left to right of the modes of a group, worst first."""
    total, x, bars = sum(counts.values()), 0.0, list[Bar]()
    for mode in reversed(ORDER):
        if n := counts.get(mode, 0):
            width = n / total * SIZE
            bars.append(Bar(mode, round(x, 2), round(width, 2), title=f"{mode} {n:,}"))
            x += width
    return bars


def columns(counts: Sequence[Mapping[str, int]]) -> tuple[list[Bar], int]:
    """Return stacked columns of equal width, and the greatest sum."""
    most = max((sum(one.values()) for one in counts), default=0)
    bars, width = list[Bar](), SIZE / max(1, len(counts))
    for place, one in enumerate(counts):
        y = float(SIZE)
        for mode in ORDER:
            if n := one.get(mode, 0):
                height = n / most * SIZE
                y -= height
                bars.append(
                    Bar(mode, round(place * width + width * 0.08, 2), round(width * 0.84, 2), round(y, 2), round(height, 2))
                )
    return bars, most


@dataclass(frozen=True, slots=True)
class Area:
    """Area of one mode in a stack.

    Attributes:
        mode: mode.
        path: outline, per mille.
    """

    mode: str
    path: str


def stacked(counts: Mapping[str, Sequence[int]]) -> list[Area]:
    """Return the areas of modes over time, from the bottom.

    Args:
        counts: number of devices at each edge, by mode; the edges have equal distances.
    """
    shown = [mode for mode in IN_SERVICE if any(counts.get(mode, ()))]
    edges = len(next(iter(counts.values()), ()))
    if edges < 2 or not shown:
        return []
    total = max(sum(counts[mode][edge] for mode in shown) for edge in range(edges))
    base, areas = [0] * edges, list[Area]()
    for mode in shown:
        top = [below + n for below, n in zip(base, counts[mode], strict=True)]
        upper = [_point(edge, edges, value, total) for edge, value in enumerate(top)]
        lower = [_point(edge, edges, value, total) for edge, value in reversed(list(enumerate(base)))]
        areas.append(Area(mode, f"M{'L'.join((*upper, *lower))}Z"))
        base = top
    return areas


def _point(edge: int, edges: int, value: int, total: int) -> str:
    return f"{edge / (edges - 1) * SIZE:.4g} {SIZE - value / max(1, total) * SIZE:.5g}"


def line(points: Sequence[tuple[int, float]], axis: Range) -> str:
    """Return the path of a line through values over time, per mille; the greatest value is at the top.

    Args:
        points: instants, epoch milliseconds, and values, in the order of time.
        axis: axis of time.
    """
    values = [value for _, value in points]
    least, span = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    places = (f"{axis.place(at_ms):g} {SIZE - ((value - least) / span if span else 0.5) * SIZE:.5g}" for at_ms, value in points)
    return f"M{'L'.join(places)}" if points else ""
