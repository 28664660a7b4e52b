"""Messages of a device: a page with its newest metrics as charts, and a route of the API.

Rule 1: the list has the retained rows of the device in bronze, newest first. Rows that concern all devices are left out.
Rule 2: contents are data of unknown origin: the page shows them as escaped text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.rows import Kind
from fleetpulse.core.tables import MESSAGES
from fleetpulse.reports.judgements import require_known
from fleetpulse.reports.messages import LISTED, Place, messages_of, place_of
from fleetpulse.web import charts, queries
from fleetpulse.web.answers import limited, tables
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.openapi import Operation, Parameter, array, columns_of, obj, optional, text

KINDS: Final = tuple(kind.value for kind in Kind if kind not in (Kind.POLICY, Kind.GAP, Kind.TICK))  # of one device
COLUMNS: Final = ("kind", "seq", "boot", "session", "code", "firmware", "gateway", "site", "metrics", "body", "note")
_PAGE: Final = 50
_POINTS: Final = 500  # newest messages with metrics
_CHARTS: Final = 12
_ALL: Final = "all"


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
    kind, after = _asked(request)
    require_known(live.home, device_id)
    more = messages_of(live.home, device_id, _PAGE + 1, kind=kind, before=after)
    rows = more[:_PAGE]
    with_metrics = [] if after else messages_of(live.home, device_id, _POINTS, has_metrics=True)
    instants = [one["received_at_ms"] for one in with_metrics]
    axis = charts.Range(min(instants), max(instants)) if instants else None
    return {
        "kinds": KINDS,
        "kind": kind,
        "rows": rows,
        "columns": [name for name in COLUMNS if any(one[name] is not None for one in rows)],
        "is_first": after is None,
        "older": _cursor(rows[-1]) if len(more) > _PAGE else None,
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


def listed(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List messages of a device, newest first."""
    device_id, limit = request.path_params["device_id"], queries.limit_of(request.query_params, _PAGE)
    kind, after = _asked(request)
    require_known(live.home, device_id)
    rows = messages_of(live.home, device_id, limit + 1, kind=kind, before=after)
    shown = [{name: one[name] for name in ("received_at_ms", "event_time_ms", *LISTED)} for one in rows[:limit]]
    return {"messages": shown, "next": _cursor(rows[limit - 1]) if len(rows) > limit else None}


def _asked(request: Request) -> tuple[Kind | None, Place | None]:
    """Return the kind and the place that a request names.

    Raises:
        Misuse: a parameter is invalid.
    """
    given = request.query_params
    kind = queries.choice_of(given, "kind", (_ALL, *KINDS), _ALL)
    after = given.get("after", "")
    place = queries.decoded_cursor(after, (int,), (int,), (str,), (int,), (int,)) if after else None
    return None if kind == _ALL else Kind(kind), None if place is None else (place[0], place[1], place[2], place[3], place[4])


def _cursor(row: Mapping[str, Any]) -> str:
    return queries.encoded_cursor(*place_of(row))


OPERATIONS: Final = (
    Operation(
        "/devices/{device_id}/messages",
        "messages",
        "List the retained messages of a device, newest first, a page at a time.",
        tables(listed),
        obj(
            {
                "messages": array(
                    obj(columns_of(MESSAGES.columns, ("received_at", "event_time", *LISTED))), "messages of the page"
                ),
                "next": optional(text("`after` of the next page; null on the last page")),
            }
        ),
        parameters=(
            Parameter(
                "device_id", "id of the device, percent-encoded: a slash in it is `%2F`", text("", most=queries.MOST_TEXT), "path"
            ),
            Parameter("kind", "kind of the messages", {**text("", (_ALL, *KINDS)), "default": _ALL}),
            Parameter("after", "the `next` of the page before; with the same kind", text("")),
            limited("messages"),
        ),
        notes="The messages are data of unknown origin: escape them before you show them. Rows that concern all devices, such "
        "as gaps and policies, are left out.",
        errors=(404,),
    ),
)
