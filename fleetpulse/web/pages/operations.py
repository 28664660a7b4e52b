"""Pages about the operation of a fleet: the stream, the state, data quality, and backtests.

Rule 1: a page computes no verdict; it shows rows of `fleetpulse.reports` and records of the home.
Rule 2: content of devices and of reports is untrusted: it is escaped, and the page of a backtest is served in a
sandbox without scripts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from fleetpulse.core.catalog import TABLES
from fleetpulse.core.errors import Misuse
from fleetpulse.core.monitoring.health import measure
from fleetpulse.core.times import HOUR_MS, format_instant, parse_instant_ms
from fleetpulse.io.home.desired_state import get_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.mqtt.embedded.broker_log import refusals_of
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.reports import judgements, not_judged
from fleetpulse.reports.backtests.backtest_list import backtests, page_of
from fleetpulse.reports.operations import quality, stream
from fleetpulse.reports.operations.coverage import coverage_gaps
from fleetpulse.reports.operations.generations import generations
from fleetpulse.web.actions import offers, state_forms
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages.charts import Range, gap_bars
from fleetpulse.web.pages.facts import SLOW_S
from fleetpulse.web.pages.fleet import facts_of
from fleetpulse.web.pages.rendering import error_page, page
from fleetpulse.web.pages.stacked_bars import stacked_bars
from fleetpulse.web.pages.streams import TABS

RANGES: Final = (1, 6, 24, 168)  # hours
_BARS: Final = 72
_RUNS: Final = 12  # quality runs in the grid
_MOST_GAPS: Final = 500
_SAMPLES: Final = 20
_SNAPSHOTS: Final = 50
_SHOWN: Final = 400  # characters of a payload
_REASONS: Final = 7  # parts of a chart; the others are summed
_OTHERS: Final = "others"
_SANDBOX: Final = {
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'",
    "Referrer-Policy": "no-referrer",
}


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route("/stream", page("stream.html", stream_page)),
        Route("/state", page("state.html", state_page)),
        Route("/quality", page("quality.html", quality_page, reads_tables=True)),
        Route("/backtest", page("backtest.html", backtest_page)),
        Route("/backtest/{name:str}", backtest_report),
    ]


def _axis(request: Request, hours: int) -> tuple[int, Range, int]:
    """Return the requested hours, their axis, and the duration of a bar in milliseconds.

    Raises:
        Misuse: the number of hours is not one of `RANGES`.
    """
    text = request.query_params.get("last") or str(hours)
    if text not in map(str, RANGES):
        choices = ", ".join(map(str, RANGES))
        raise Misuse(f'parameter "last" must be a number of hours: {choices}; got {text[:20]!r}', code="parameter-invalid")
    bucket_ms = int(text) * HOUR_MS // _BARS
    to_ms = (wall_clock_ms() // bucket_ms + 1) * bucket_ms
    return int(text), Range(to_ms - _BARS * bucket_ms, to_ms), bucket_ms


def stream_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the facts of the page of the stream."""
    home = live.home
    hours, axis, bucket_ms = _axis(request, 6)
    found = live.recent.get(f"batches {hours}", SLOW_S, lambda: stream.batches(home, axis.from_ms, bucket_ms))
    running = stream.running(home)
    return {
        "hours": hours,
        "ranges": RANGES,
        "rows": found,
        "chart": stacked_bars(found, (*stream.PARTS, "other"), axis, bucket_ms, _batch_title),
        "health": live.recent.get("health", SLOW_S, lambda: _health(home)),
        "desired": get_desired(home),
        "generation": home.generation(),
        "ms": _milliseconds,
        "held_back": facts_of(live, request).held_back(),
        "coverage": live.recent.get(f"coverage {hours}", SLOW_S, lambda: _coverage(home, axis)),
        "refusals": refusals_of(running["broker"]),
        "streams": stream.streams_beside(home),
        "tabs": TABS,
        **running,
    }


def _milliseconds(value: float) -> str:
    return str(measure("ms", value))


def _batch_title(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {_milliseconds(row[name])}" for name in (*stream.PARTS, "other"))
    return f"{format_instant(row['from_ms'])}: {row['batches']:,} batches, mean {_milliseconds(row['batch_ms'])} ({parts})"


def _health(home: Home) -> dict[str, Any] | None:
    """Return the newest batch and the rated metrics with units; None before the first batch."""
    found = judgements.health(home)
    if found is None:
        return None
    rated = [
        {**one, **{name: measure(one["column"], one[name]) for name in ("value", "worst", "good_below", "critical_above")}}
        for one in found["rated"]
    ]
    return {**found, "rated": rated, "began_at_ms": parse_instant_ms(found["newest"]["began_at"])}


def _coverage(home: Home, axis: Range) -> list[dict[str, Any]]:
    """Return each bridge with its coverage gaps within a range, and their bars."""
    now_ms = wall_clock_ms()
    by_bridge: dict[str, list[dict[str, Any]]] = {bridge: [] for bridge in home.bridges()}
    for gap in coverage_gaps(home, _MOST_GAPS, ends_after_ms=axis.from_ms)[::-1]:
        by_bridge.setdefault(gap["bridge"], []).append(gap)
    return [
        {
            "bridge": bridge,
            "gaps": found,
            "bars": gap_bars([(gap["since_ms"], gap["until_ms"] or now_ms) for gap in found], axis),
            "width": axis.place(now_ms),
        }
        for bridge, found in sorted(by_bridge.items())
    ]


def state_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the facts of the page of the state."""
    home = live.home
    known = snapshots(home)
    floors = {table.name: floor_ms for table in TABLES if (floor_ms := oldest_kept_ms(home, table.name)) is not None}
    return {
        "generations": generations(home),
        "snapshots": known[:_SNAPSHOTS],
        "snapshot_count": len(known),
        "floors": floors,
        "desired": get_desired(home),
        "holder": home.state_holder(),
        "forms": state_forms(request),
        "offers": offers(request, "snapshot", "maintain", "amend", "report"),
    }


def quality_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the facts of the page of data quality."""
    home = live.home
    hours, axis, bucket_ms = _axis(request, 24)
    outcomes = quality.suite_outcomes(home, _RUNS)
    runs: dict[str, Mapping[str, Any]] = {}
    cells: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in outcomes:
        runs.setdefault(row["run_id"], row)
        cells.setdefault(row["suite"], {})[row["run_id"]] = {**row, "outcome": _worst(row)}
    run, suite = request.query_params.get("run", ""), request.query_params.get("suite", "")
    chosen = quality.results_of_suite(home, run, suite) if run and suite else []
    return {
        "hours": hours,
        "ranges": RANGES,
        "runs": list(runs.values()),
        "cells": dict(sorted(cells.items())),
        "chosen": chosen,
        "asked": {"run": run, "suite": suite} if run and suite else None,
        "failed": _failed(home, run, suite) if chosen else [],
        "quarantined": _over_time(not_judged.quarantined(home, axis.from_ms, bucket_ms), axis, bucket_ms),
        "unjudged": _over_time(not_judged.unjudged(home, axis.from_ms, bucket_ms), axis, bucket_ms),
        "samples": [{**row, "payload": shown_text(row["payload"])} for row in reversed(judgements.quarantine(home, _SAMPLES))],
        "offers": offers(request, "quality"),
    }


def _failed(home: Home, run: str, suite: str) -> list[dict[str, Any]]:
    """Return the failed rows of a suite in a run, each with the device that its key or its values name."""
    rows = quality.failed_rows_of(home, run, suite)
    return [{**row, "device_id": row["key"].get("device_id") or row["content"].get("device_id")} for row in rows]


def _worst(row: Mapping[str, Any]) -> str:
    """Return the outcome by which a cell of the grid is shown."""
    if row["fault"]:
        return "fault"
    if row["failed"]:
        return "failed" if row["critical"] else "warning"
    return "passed" if row["passed"] else "skipped"


def _over_time(rows: Sequence[Mapping[str, Any]], axis: Range, bucket_ms: int) -> dict[str, Any]:
    """Return a chart of numbers of messages by reason, with the totals; the rarest reasons are summed."""
    totals: dict[str, int] = {}
    for row in rows:
        totals[row["reason"]] = totals.get(row["reason"], 0) + row["messages"]
    ordered = sorted(totals, key=lambda reason: (-totals[reason], reason))
    parts = ordered if len(ordered) <= _REASONS else [*ordered[: _REASONS - 1], _OTHERS]
    by_span: dict[int, dict[str, Any]] = {}
    for row in rows:
        bar = by_span.setdefault(row["from_ms"], {"from_ms": row["from_ms"], **dict.fromkeys(parts, 0)})
        bar[row["reason"] if row["reason"] in parts else _OTHERS] += row["messages"]

    def title(bar: Mapping[str, Any]) -> str:
        return f"{format_instant(bar['from_ms'])}: " + ", ".join(f"{bar[part]:,} {part}" for part in parts if bar[part])

    bars = list(by_span.values())
    chart = stacked_bars(bars, parts, axis, bucket_ms, title)
    return {"chart": chart, "rows": bars, "totals": {reason: totals[reason] for reason in ordered}}


def shown_text(text: str) -> str:
    """Return the beginning of a text with its control and direction characters as escapes."""
    cut = text[:_SHOWN]
    escaped = "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in cut)
    return escaped + ("…" if len(text) > _SHOWN else "")


def backtest_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the facts of the page of the backtests."""
    return {"backtests": backtests(live.home), "offers": offers(request, "backtest")}


async def backtest_report(request: Request) -> Response:
    """Answer with the page of a backtest, which browsers show in a sandbox."""
    found = await run_in_threadpool(page_of, request.app.state.home, request.path_params["name"])
    if found is None:
        text = "there is no such backtest: a failed one has no page, and pages older than keep_logs are deleted"
        return error_page(request, 404, "backtest-unknown", text)
    return FileResponse(found, media_type="text/html; charset=utf-8", headers=_SANDBOX)
