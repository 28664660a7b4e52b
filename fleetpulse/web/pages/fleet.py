"""Pages Fleet and Changes: counts, sites, modes over the last day, and recent transitions.

Rule 1: modes in the past are the present counts less the transitions since then, see `_modes_over_time`.
Rule 2: a range "last hour" ends at the frontier, not at the clock of the reader.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fleetpulse.core.times import DAY_MS, HOUR_MS, MINUTE_MS, format_instant, parse_instant_ms
from fleetpulse.reports.present.parts import UNJUDGED
from fleetpulse.web import queries
from fleetpulse.web.api.routes import exported
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages import charts
from fleetpulse.web.pages.facts import PageFacts
from fleetpulse.web.pages.rendering import query_of

RANGES: Final = {15: "15 min", 60: "1 h", 360: "6 h", 1_440: "24 h"}  # minutes -> label
SITES: Final = 15  # of the first view
_ALL_SITES: Final = 1_000
_STEP_MS: Final = 15 * 60_000  # of the chart of modes
_STEPS: Final = DAY_MS // _STEP_MS
_GROUPS: Final = 12
_MOST_GROUPS: Final = 20
_CHANGES: Final = 50  # on a page: the browser lays out all rows before it paints
_COLUMNS: Final = 48  # of the chart of changes
_FILTERS: Final = {
    "site": "site", "class": "class", "gateway": "gateway", "device": "device", "from_mode": "from", "to_mode": "to",
    "trigger": "trigger", "since": "since", "until": "until",
}  # fmt: skip


def facts_of(live: LiveFleet, request: Request) -> PageFacts:
    """Return the facts of pages that the application shares."""
    state = request.app.state
    if not hasattr(state, "page_facts"):
        state.page_facts = PageFacts(live)
    return state.page_facts


def mode_counts(live: LiveFleet, request: Request) -> Sequence[Mapping[str, Any]]:
    """Return the rows of `queries.MODES` for the version in memory."""
    return facts_of(live, request).cached("modes", lambda: live.query(queries.MODES))


def fleet(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page Fleet."""
    facts, frontier_ms = facts_of(live, request), live.mirror.reached.frontier_ms
    by, shown = request.query_params.get("sites", ""), request.query_params.get("by", "")
    by_mode = mode_counts(live, request)
    counts: dict[str, int] = {row["mode"]: row["n"] for row in by_mode}
    context: dict[str, Any] = {
        "counts": {mode: counts.get(mode, 0) for mode in (*charts.ORDER, UNJUDGED) if counts.get(mode)},
        "total": sum(n for mode, n in counts.items() if mode in charts.IN_SERVICE),
        "never_seen": sum(row["never_seen"] for row in by_mode),
        "problems": facts.problems(),
        "held_back": facts.held_back(),
        "all_sites": by == "all",
        "by": "count" if shown == "count" else "share",
    }
    if frontier_ms is None:
        return {**context, "changed": {}, "groups": [], "modes": None, "sites": [], "site_count": 0, "gaps": [], "hour_ms": 0}
    end_ms = -(-frontier_ms // MINUTE_MS) * MINUTE_MS  # numbers of transitions are by minute, see `PresentMirror`
    axis = charts.Range(end_ms - DAY_MS, end_ms)
    over_time, changed = facts.cached("over time", lambda: _modes_over_time(live, counts, end_ms))
    gaps = facts.gaps(axis.from_ms, axis.to_ms)
    limit = _ALL_SITES if context["all_sites"] else SITES
    sites, site_count = facts.cached(("sites", context["by"], limit), lambda: _sites(live, end_ms, context["by"], limit))
    return {
        **context,
        "changed": changed,
        "modes": {
            "areas": charts.stacked(over_time),
            "gaps": charts.gap_bars(((one.since_ms, one.until_ms) for one in gaps), axis),
            "ticks": charts.ticks(axis),
            "hourly": _hourly(over_time, axis),
            "names": [mode for mode in charts.IN_SERVICE if any(over_time.get(mode, ()))],
        },
        "gaps": gaps,
        "groups": facts.cached("hour", lambda: _groups(live, end_ms - HOUR_MS)),
        "sites": sites,
        "site_count": site_count,
        "hour_ms": end_ms - HOUR_MS,
    }


def _modes_over_time(live: LiveFleet, counts: Mapping[str, int], end_ms: int) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the number of devices in each mode in service at each step of the last day, and its change in an hour."""
    rows = live.query(
        f"""SELECT greatest(0, ({end_ms} - minute_ms) // {_STEP_MS})::INT AS step, from_mode, to_mode,
            sum(n)::BIGINT AS n FROM live.minutes WHERE minute_ms > {end_ms - DAY_MS} GROUP BY ALL"""
    )
    gained: list[dict[str, int]] = [{} for _ in range(_STEPS)]
    for row in rows:
        step = gained[min(row["step"], _STEPS - 1)]
        step[row["to_mode"]] = step.get(row["to_mode"], 0) + row["n"]
        step[row["from_mode"]] = step.get(row["from_mode"], 0) - row["n"]
    found: dict[str, list[int]] = {}
    for mode in charts.IN_SERVICE:
        n = counts.get(mode, 0)
        backwards = [n]
        for step in gained:
            n = max(0, n - step.get(mode, 0))
            backwards.append(n)
        found[mode] = backwards[::-1]
    changed: dict[str, int] = {
        mode: sum(step.get(mode, 0) for step in gained[: HOUR_MS // _STEP_MS]) for mode in charts.IN_SERVICE
    }
    return found, changed


def _hourly(over_time: Mapping[str, Sequence[int]], axis: charts.Range) -> list[dict[str, Any]]:
    """Return the rows of the table beneath the chart, newest first."""
    each = HOUR_MS // _STEP_MS
    return [
        {"at_ms": axis.from_ms + step * _STEP_MS, **{mode: values[step] for mode, values in over_time.items()}}
        for step in range(_STEPS, -1, -each)
    ]


def _groups(live: LiveFleet, since_ms: int) -> list[dict[str, Any]]:
    return live.query(
        f"""SELECT from_mode, to_mode, "trigger", count(*) AS n, count(DISTINCT device_id) AS devices FROM live.changes
            WHERE event_ms > {since_ms} GROUP BY ALL ORDER BY n DESC, from_mode, to_mode, "trigger" LIMIT {_GROUPS}"""
    )


def _sites(live: LiveFleet, end_ms: int, by: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return the sites, trouble first, and their number."""
    rows = live.query(queries.sites_sql(charts.IN_SERVICE, end_ms - HOUR_MS, limit, by_share=by == "share"))
    shown = [{**row, "bars": charts.share_bars({mode: row["modes"].get(mode, 0) for mode in charts.IN_SERVICE})} for row in rows]
    return shown, rows[0]["site_count"] if rows else 0


def changes(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page Changes."""
    parameters, frontier_ms = _with_range(request.query_params), live.mirror.reached.frontier_ms
    where, axis = queries.changes_sql(parameters, frontier_ms), _axis(parameters, frontier_ms)
    after = _after(request.query_params.get("after", ""))
    rows = live.query(*_page(where, after, _CHANGES))
    facts = facts_of(live, request)
    total, groups, chart = facts.cached(("changes", where.sql, tuple(where.values), axis), lambda: _summary(live, where, axis))
    gaps = [] if axis is None else facts.gaps(axis.from_ms, axis.to_ms)
    filters = {name: value for name, value in request.query_params.items() if name != "after"}
    return {
        "filters": _FILTERS,
        "parameters": filters,
        "range": parameters.get("last"),
        "ranges": RANGES,
        "axis": axis,
        "total": total,
        "groups": groups,
        "rows": rows,
        "most_groups": _MOST_GROUPS,
        "older": _cursor(rows[-1]) if len(rows) == _CHANGES else None,
        "is_first": after is None,
        "chart": chart,
        "gaps": gaps,
        "chart_gaps": [] if axis is None else charts.gap_bars(((one.since_ms, one.until_ms) for one in gaps), axis),
        "absolute": _absolute(filters, axis),
    }


def _summary(
    live: LiveFleet, where: queries.Condition, axis: charts.Range | None
) -> tuple[int, list[dict[str, Any]], dict[str, Any] | None]:
    """Return the number of changes that match, their largest groups, and their chart."""
    [count] = live.query(*queries.change_count_sql(where))
    by = 'site, from_mode, to_mode, "trigger"'
    same = " AND ".join(f"one.{name} IS NOT DISTINCT FROM shown.{name}" for name in by.split(", "))
    # Only the devices of the groups that are shown are counted: counting devices takes longer than counting transitions.
    groups = live.query(
        f"""WITH matching AS (SELECT device_id, event_ms, {by} FROM live.changes WHERE {where.sql}),
            shown AS (SELECT {by}, count(*) AS n, max(event_ms) AS newest_ms FROM matching
                GROUP BY ALL ORDER BY n DESC, newest_ms DESC, {by} LIMIT {_MOST_GROUPS})
            SELECT shown.*, count(DISTINCT one.device_id) AS devices FROM shown JOIN matching AS one ON {same}
            GROUP BY ALL ORDER BY n DESC, newest_ms DESC, {by}""",
        where.values,
    )
    return count["n"], groups, _columns(live, where, axis)


def _with_range(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters with a range of one hour if they have none."""
    parameters = dict(given)
    if not parameters.get("since") and not parameters.get("until") and not parameters.get("last"):
        parameters["last"] = "60"
    return parameters


def _axis(parameters: Mapping[str, str], frontier_ms: int | None) -> charts.Range | None:
    """Return the range of a request within the last day before the frontier; None before the first batch."""
    if frontier_ms is None:
        return None
    last = int(parameters.get("last") or 1_440) * 60_000
    since_ms = max(parse_instant_ms(parameters["since"]) if parameters.get("since") else 0, frontier_ms - last)
    until_ms = min(parse_instant_ms(parameters["until"]) if parameters.get("until") else frontier_ms, frontier_ms)
    since_ms = min(since_ms, frontier_ms)
    return charts.Range(min(since_ms, until_ms), max(since_ms, until_ms))


def _absolute(filters: Mapping[str, str], axis: charts.Range | None) -> str:
    """Return the query of a link whose range does not move."""
    if axis is None:
        return query_of(filters)
    instants = {"since": format_instant(axis.from_ms), "until": format_instant(axis.to_ms + 1)}
    return query_of({**filters, "last": None, **instants})


def _columns(live: LiveFleet, where: queries.Condition, axis: charts.Range | None) -> dict[str, Any] | None:
    """Return the chart of changes over time, by the mode to which they lead."""
    if axis is None or axis.to_ms == axis.from_ms:
        return None
    step_ms = max(1, -(-(axis.to_ms - axis.from_ms) // _COLUMNS))
    rows = live.query(
        f"""SELECT least({_COLUMNS - 1}, greatest(0, (event_ms - {axis.from_ms}) // {step_ms}))::INT AS step, to_mode,
            count(*) AS n FROM live.changes WHERE {where.sql} GROUP BY ALL""",
        where.values,
    )
    counts: list[dict[str, int]] = [{} for _ in range(_COLUMNS)]
    for row in rows:
        counts[row["step"]][row["to_mode"]] = row["n"]
    bars, most = charts.columns(counts)
    names = [mode for mode in charts.ORDER if any(mode in one for one in counts)]
    table = [{"at_ms": axis.from_ms + place * step_ms, **one} for place, one in enumerate(counts) if one]
    return {"bars": bars, "most": most, "ticks": charts.ticks(axis), "names": names, "table": table, "step_ms": step_ms}


_ORDER: Final = "event_ms DESC, device_id, epoch_ms(life), coalesce(transition_no, 0), coalesce(amendment_no, 0)"


def _page(where: queries.Condition, after: list[Any] | None, limit: int | None) -> tuple[str, list[Any]]:
    """Return SQL and parameters for transitions, newest first; those of one instant are ordered by device."""
    condition, values = where.sql, list(where.values)
    if after is not None:
        at_ms, *rest = after
        condition += """ AND (event_ms < ? OR (event_ms = ? AND
            (device_id, epoch_ms(life), coalesce(transition_no, 0), coalesce(amendment_no, 0)) > (?, ?, ?, ?)))"""
        values += [at_ms, at_ms, *rest]
    limited = "" if limit is None else f"LIMIT {limit}"
    return f"SELECT {queries.CHANGE_COLUMNS} FROM live.changes WHERE {condition} ORDER BY {_ORDER} {limited}", values


def _cursor(row: Mapping[str, Any]) -> str:
    numbers = (row[name] or 0 for name in ("life_ms", "transition_no", "amendment_no"))
    return queries.encoded_cursor(row["event_time_ms"], row["device_id"], *numbers)


def _after(text: str) -> list[Any] | None:
    return queries.decoded_cursor(text, (int,), (str,), (int,), (int,), (int,)) if text else None


def export_changes(request: Request) -> Response:
    """Return all transitions that match, as CSV or NDJSON, newest first."""
    live: LiveFleet = request.app.state.live
    frontier_ms = live.reached().frontier_ms
    where = queries.changes_sql(_with_range(request.query_params), frontier_ms)
    return exported(live, request.path_params["form"], "changes", *_page(where, None, None))
