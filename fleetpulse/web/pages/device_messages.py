"""Messages of a device: a page with its newest metrics as charts.

Rule: contents are data of unknown origin: the page shows them as escaped text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.reports.messages import messages_of
from fleetpulse.web.api.messages import KINDS, PAGE, asked, cursor
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages import charts

COLUMNS: Final = ("kind", "seq", "boot", "session", "code", "firmware", "gateway", "site", "metrics", "body", "note")
_POINTS: Final = 500  # newest messages with metrics
_CHARTS: Final = 12


@dataclass(frozen=True, slots=True)
class Metric:
    """Numbers of one metric over time.

    Attributes:
        name: name of the metric, any text.
        line: line of its chart, see `charts.line`.
        newest: newest value.
        least: least value.
        greatest: greatest value.
        count: number of values.
    """

    name: str
    line: str
    newest: float
    least: float
    greatest: float
    count: int


def page(live: LiveFleet, request: Request, device_id: str) -> dict[str, Any]:
    """Return the context of the page: messages, and on the first page charts of the newest metrics.

    Raises:
        FleetError: the device was never registered or heard, or a parameter is invalid.
    """
    kind, after = asked(request)
    live.require_device(device_id)
    more = messages_of(live.home, device_id, PAGE + 1, kind=kind, before=after)
    rows = more[:PAGE]
    with_metrics = [] if after else messages_of(live.home, device_id, _POINTS, has_metrics=True)
    instants = [one["received_at_ms"] for one in with_metrics]
    axis = charts.Range(min(instants), max(instants)) if instants else None
    return {
        "kinds": KINDS,
        "kind": kind,
        "rows": rows,
        "columns": [name for name in COLUMNS if any(one[name] is not None for one in rows)],
        "is_first": after is None,
        "older": cursor(rows[-1]) if len(more) > PAGE else None,
        "axis": axis,
        "ticks": [] if axis is None else charts.ticks(axis),
        "metrics": [] if axis is None else metrics_of(with_metrics, axis)[:_CHARTS],
        "read": len(with_metrics),
    }


def metrics_of(rows: Sequence[Mapping[str, Any]], axis: charts.Range) -> list[Metric]:
    """Return the metrics of messages that are numbers, by name.

    Args:
        rows: rows of `messages_of` with metrics, newest first.
        axis: axis of the charts; a value is at the time of its receipt.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for one in reversed(rows):
        content = json.loads(one["metrics"])
        for name, value in content.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.setdefault(name, []).append((one["received_at_ms"], float(value)))
    return [
        Metric(name, charts.line(points, axis), points[-1][1], min(values), max(values), len(values))
        for name, points in sorted(found.items())
        for values in [[value for _, value in points]]
    ]
