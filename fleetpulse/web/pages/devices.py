"""Pages Devices and Device: the list with filters and facets, and one device with its timeline and its *why*.

Rule 1: the list, the facets and the count read the same rows in memory with the same condition.
Rule 2: the page of a device needs the facts in memory only. Its history, its messages and its explanation are
parts that a browser asks for afterwards, or a link if it has no JavaScript.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fleetpulse.core.errors import FleetError
from fleetpulse.core.lifecycle import PRESENT, Mode, Trigger
from fleetpulse.core.rows import Trust
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports import judgements as reports
from fleetpulse.reports.device_judgements import reading_device
from fleetpulse.reports.messages import errors_of
from fleetpulse.reports.present import devices as present
from fleetpulse.reports.registry import entries
from fleetpulse.reports.why import why as explained
from fleetpulse.web import queries
from fleetpulse.web.actions import MOST_LISTED, OF_DEVICE, list_offers, offers
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages import charts, device_messages
from fleetpulse.web.pages import past as past_pages
from fleetpulse.web.pages.fleet import facts_of, mode_counts
from fleetpulse.web.pages.rendering import device_of, page
from fleetpulse.web.pages.streams import device_part

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

FILTERS: Final = {
    "q": "id has", "mode": "mode", "site": "site", "class": "class", "gateway": "gateway", "trigger": "trigger", "clock": "clock",
    "never_seen": "never seen",
}  # fmt: skip
SPANS: Final = {"24h": DAY_MS, "7d": 7 * DAY_MS, "30d": 30 * DAY_MS, "all": 0}
NEXT: Final = {  # deadlines that lead to a mode which depends on the facts about the device
    Trigger.UNTIL: "end of maintenance or update",
    Trigger.RECOVERED: "end of the count of errors",
    Trigger.HOLD_OVER: "end of the flag",
    Trigger.SESSION_OVER: "end of the session that is held for review",
}
_SHOWN: Final = 8  # values of a facet
_FROM_TABLES: Final = ("at", "why", "facts", "streams")  # parameters of the page of a device for parts that read tables
_HEAD: Final = (("device", "device"), ("mode", "mode"), ("since", "since"), ("site", "site"), ("class", "class"))
_ERRORS: Final = 20
_ROWS: Final = 200  # rows of a timeline in its table
_EVIDENCE: Final = (
    "role", "received_at_ms", "event_time_ms", "kind", "device_id", "site", "seq", "boot", "code", "firmware", "gateway", "body",
)  # fmt: skip


def devices(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page Devices."""
    given = request.query_params
    wanted = queries.device_filter(given)
    before = bool(given.get("before"))
    if before:
        wanted = replace(wanted, after=queries.device_filter({**given, "after": given["before"]}).after)
    with live.searching() as (cursor, ids):
        found = queries.search(cursor, ids, wanted.where)
        more = queries.device_rows(cursor, replace(wanted, where=found, limit=wanted.limit + 1), backwards=before)
        searched = _facets(cursor, found) if found.is_kept else None
    count, facets = searched or _known_facets(live, request, wanted.where)
    rows = more[: wanted.limit]
    is_last, is_first = len(more) <= wanted.limit, wanted.after is None
    if before:
        rows, is_first, is_last = rows[::-1], is_last, False
    parameters = {name: value for name, value in given.items() if name not in ("after", "before")}
    filters = {name: parameters[name] for name in FILTERS if parameters.get(name)}
    return {
        "rows": [queries.shown_device(row) for row in rows],
        "present": PRESENT,
        "count": count,
        "of_all": sum(row["n"] for row in mode_counts(live, request)),
        "facets": facets,
        "filters": FILTERS,
        "parameters": parameters,
        "is_filtered": bool(filters),
        "sort": ("-" if wanted.descending else "") + wanted.sort,
        "head": dict(_HEAD),
        "offers": list_offers(request, filters, count) if filters and 0 < count <= MOST_LISTED else [],
        "newer": None if is_first or not rows else queries.cursor_of(rows[0], wanted),
        "older": None if is_last or not rows else queries.cursor_of(rows[-1], wanted),
    }


def _known_facets(live: LiveFleet, request: Request, where: queries.Condition) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Do as `_facets`, once for a version of the facts."""

    def read() -> Any:
        with live.reading() as cursor:
            return _facets(cursor, where)

    return facts_of(live, request).cached(("facets", where.sql, tuple(where.values)), read)


def _facets(cursor: "DuckDBPyConnection", where: queries.Condition) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the number of devices that match, and the most frequent values of each facet among them."""
    names = queries.ALL_FACETS
    count, found = queries.facets_of(fetch(cursor, *queries.facets_sql(where, names, _SHOWN + 1)), names)
    return count, {**found, "clock": [one for one in found["clock"] if one["value"] != Trust.ON_TIME]}


async def device(request: Request) -> Response:
    """Answer with the page of a device, or with one part of it."""
    device_id, part = device_of(request)
    views = {
        "": ("device.html", _device),
        "why": ("device_why.html", _why_part),
        "facts": ("device_facts.html", _facts_part),
        "messages": ("device_messages.html", device_messages.page),
        "past": ("device_past.html", past_pages.device),
        "streams": ("device_streams.html", device_part),
    }
    if part not in views:
        raise FleetError(f'a device has no page "{part[:50]}"', code="page-unknown")
    template, view = views[part]
    given = request.query_params
    reads_tables = bool(part) or given.get("span", "24h") != "24h" or any(map(given.get, _FROM_TABLES))
    shown = page(
        template, lambda live, request: {"device_id": device_id, **view(live, request, device_id)}, reads_tables=reads_tables
    )
    return await shown(request)


def _present(live: LiveFleet, device_id: str) -> dict[str, Any]:
    """Return the row of a device.

    Raises:
        FleetError: the device was never registered or heard.
    """
    if found := live.query(*queries.device_sql(device_id)):
        return queries.shown_device(found[0])
    listed = present.devices(live.home, live.mirror.reached.frontier_ms, device_id=device_id)  # heard since the facts were loaded
    if not listed:
        raise FleetError(
            f'no device "{device_id}" was registered or heard; find it in the list of devices', code="device-unknown"
        )
    [row] = listed
    instants = {f"{name}_ms": row[name] and round(row[name].timestamp() * 1000) for name in ("since", "last_seen")}
    return {**dict.fromkeys(queries.LISTED), **row, **instants}


def _device(live: LiveFleet, request: Request, device_id: str) -> dict[str, Any]:
    """Return the context of a device's page."""
    given = request.query_params
    row, frontier_ms = _present(live, device_id), live.mirror.reached.frontier_ms
    span = given.get("span") if given.get("span") in SPANS else "24h"
    facts = facts_of(live, request)
    wants_why = bool(given.get("at") or given.get("why"))
    context: dict[str, Any] = {
        "row": row,
        "is_present": row["mode"] in PRESENT,
        "span": span,
        "spans": list(SPANS),
        "is_still": wants_why or bool(given.get("facts") or given.get("streams")),
        "why": _explained(live.home, device_id, given.get("at"), given.get("to")) if wants_why else None,
        "at": given.get("at"),
        "to_mode": given.get("to"),
        "facts": _facts(live.home, device_id) if given.get("facts") else None,
        "beside": None,
        **(device_part(live, request, device_id) if given.get("streams") else {}),
        "offers": offers(request, *OF_DEVICE, device=device_id),
    }
    if frontier_ms is None:
        return {**context, "timeline": None, "changes": [], "more": 0, "gaps": []}
    changes = facts.cached(("changes", device_id, span), lambda: _changes(live, device_id, span or "24h", frontier_ms))
    axis = _axis(span or "24h", frontier_ms, changes, row)
    gaps = [gap for gap in facts.gaps_of_site(row["site"]) if gap[0] < axis.to_ms and (gap[1] is None or gap[1] > axis.from_ms)]
    return {
        **context,
        "timeline": {
            "bars": _band(changes, row, axis),
            "gaps": charts.gap_bars(gaps, axis),
            "ticks": charts.ticks(axis),
            "axis": axis,
        },
        "changes": changes[:_ROWS],
        "more": max(0, len(changes) - _ROWS),
        "gaps": gaps,
    }


def _changes(live: LiveFleet, device_id: str, span: str, frontier_ms: int) -> list[dict[str, Any]]:
    """Return the transitions of a device within a span before the frontier, newest first."""
    if span == "24h":  # the span of the facts in memory
        found = live.query(*queries.device_changes_sql(device_id))
    else:
        with reading_device(live.home, device_id) as tables:
            found = [_in_ms(one) for one in reports.transitions_of(tables, device_id)]
    since_ms = frontier_ms - SPANS[span] if SPANS[span] else 0
    kept = [one for one in found if one["event_time_ms"] > since_ms]
    return sorted(kept, key=lambda one: (one["event_time_ms"], one["transition_no"] or one["amendment_no"] or 0), reverse=True)


def _in_ms(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its instants as epoch milliseconds, as in the facts in memory."""
    instants = ("event_time", "last_seen", "judged_at", "life")
    return {**row, **{f"{name}_ms": row[name] and round(row[name].timestamp() * 1000) for name in instants}}


def _axis(span: str, frontier_ms: int, changes: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> charts.Range:
    if SPANS[span]:
        return charts.Range(frontier_ms - SPANS[span], frontier_ms)
    known = [one[name] for one in changes for name in ("event_time_ms", "life_ms") if one[name]] + [
        row["since_ms"] or frontier_ms
    ]
    return charts.Range(min([*known, frontier_ms - 60_000]), frontier_ms)


def _band(changes: Sequence[Mapping[str, Any]], row: Mapping[str, Any], axis: charts.Range) -> list[charts.Bar]:
    """Return the modes of a device over time, from its transitions, newest first."""
    spans = list[tuple[str, int, int]]()
    until_ms = axis.to_ms
    if not changes or (row["since_ms"] or 0) > changes[0]["event_time_ms"]:  # a mode that no transition began
        since_ms = max(row["since_ms"] or axis.to_ms, axis.from_ms)
        spans, until_ms = [(row["mode"], since_ms, axis.to_ms)], since_ms
    for one in changes:
        spans.append((one["to_mode"], one["event_time_ms"], until_ms))
        until_ms = one["event_time_ms"]
    if changes:
        begun_ms = changes[-1]["life_ms"] or axis.from_ms
        spans.append((changes[-1]["from_mode"], max(begun_ms, axis.from_ms), until_ms))
    bars = list[charts.Bar]()
    for mode, from_ms, to_ms in reversed(spans):
        if mode == Mode.FORGOTTEN or to_ms <= axis.from_ms or from_ms >= to_ms:
            continue
        x = axis.place(from_ms)
        width = max(1.5, axis.place(to_ms) - x)
        bars.append(charts.Bar(mode, x, round(width, 2), title=mode, at_ms=max(from_ms, axis.from_ms)))
    return bars


def _why_part(live: LiveFleet, request: Request, device_id: str) -> dict[str, Any]:
    at, to_mode = request.query_params.get("at"), request.query_params.get("to")
    return {"why": _explained(live.home, device_id, at, to_mode), "at": at}


def _explained(home: Home, device_id: str, at: str | None, to_mode: str | None) -> dict[str, Any]:
    """Return an explanation with its arithmetic as a bar, or the reason why there is none."""
    try:
        found = explained(home, device_id, judged_ms(home.checkpoint), queries.instant_of({"at": at or ""}, "at"), to_mode)
    except FleetError as error:
        if error.code == "device-unknown":
            raise
        return {"refused": str(error)}
    coming = found["next"]
    return {
        **found,
        "refused": "",
        "bar": _arithmetic(found["terms"]),
        "columns": _used(found["evidence"], _EVIDENCE),
        "next_text": coming and (coming["mode"] or NEXT[coming["trigger"]]),
    }


def _used(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the columns that have a value in some row."""
    held = list(rows)
    return [name for name in names if any(row.get(name) is not None for row in held)]


def _arithmetic(terms: Sequence[Mapping[str, Any]]) -> list[charts.Bar]:
    """Return the spans of an explanation as parts of a bar; those in which nobody listened are hatched."""
    total, x, bars = sum(one.get("span_ms", 0) for one in terms), 0.0, list[charts.Bar]()
    for one in terms:
        if span_ms := one.get("span_ms"):
            width = span_ms / total * charts.SIZE
            kind = "gap" if one["meaning"].startswith("not listening") else "span"
            bars.append(charts.Bar(kind, round(x, 2), round(width, 2), title=one["meaning"]))
            x += width
    return bars


def _facts_part(live: LiveFleet, request: Request, device_id: str) -> dict[str, Any]:
    del request
    return {"facts": _facts(live.home, device_id)}


def _facts(home: Home, device_id: str) -> dict[str, Any]:
    """Return the life of a device, its errors, its registry entries and its amendments.

    Raises:
        FleetError: the device was never registered or heard.
    """
    status = reports.device_status(home, device_id, judged_ms(home.checkpoint))
    if status is None:
        raise FleetError(f'no device "{device_id}" was registered or heard', code="device-unknown")
    with reading_device(home, device_id) as tables:
        emitted = [_in_ms(one) for one in reports.transitions_of(tables, device_id, everything=True)]
    amended = [one for one in emitted if one["kind"] != "transition"]
    return {
        "summary": {name: value for name, value in status.summary.items() if value is not None},
        "retracted": status.retracted_offline,
        "amended": amended[::-1],
        "entries": entries(home, device_id)[::-1],
        "errors": errors_of(home, device_id, _ERRORS),
        "last_errors": json.loads(status.transitions[-1]["last_errors"] or "[]") if status.transitions else [],
    }
