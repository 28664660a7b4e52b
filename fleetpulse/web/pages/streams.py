"""Pages of the streams beside the lifecycle: Sessions, Vitals, Commands, Rollouts, and their part of a device's page.

Rule 1: a page shows the rows of the API with the same filters; its links to files have them too.
Rule 2: a page without rows says whether its stream is on, and which setting switches it on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.routing import Route

from fleetpulse.core.rollouts.rollout import Rollout, Status
from fleetpulse.core.rollouts.verdict import judge_cohort
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.times import HOUR_MS, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.reports.operations.stream import streams_beside
from fleetpulse.reports.plain import numbered_row
from fleetpulse.reports.rollouts.newest import observe_newest
from fleetpulse.reports.rollouts.plain import listed
from fleetpulse.reports.streams.twin import twin
from fleetpulse.reports.streams.vitals import alarms, windows
from fleetpulse.web import queries
from fleetpulse.web.actions import command, offers
from fleetpulse.web.api import listing
from fleetpulse.web.api.rollouts import all_rollouts, rollout_of
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages.facts import SLOW_S
from fleetpulse.web.pages.rendering import page, query_of
from fleetpulse.web.pages.vitals_chart import chart_of

TABS: Final = (
    ("Lifecycle", "/stream"), ("Sessions", "/stream/sessions"), ("Vitals", "/stream/vitals"), ("Commands", "/stream/commands"),
    ("Rollouts", "/stream/rollouts"),
)  # fmt: skip
RANGES: Final = {"24": "24 h", "168": "7 d", "720": "30 d", "all": "all"}  # hours before the newest result -> label
STATES: Final = ("open", "ended", *listing.REASONS)  # of sessions
_ROWS: Final = 50
_FEW: Final = 20  # rows of one of two lists on a page
_OF_DEVICE: Final = 5  # sessions, and windows of each metric, on the page of a device
_NEWEST: Final = 200  # windows in which the metrics of a device are found
_WINDOWS: Final = 500  # of a chart


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route("/stream/sessions", page("sessions.html", sessions_page, reads_tables=True)),
        Route("/stream/vitals", page("vitals.html", vitals_page, reads_tables=True)),
        Route("/stream/commands", page("commands.html", commands_page, reads_tables=True)),
        Route("/stream/rollouts", page("rollouts.html", rollouts_page, reads_tables=True)),
        Route("/stream/rollouts/{name:str}", page("rollout.html", rollout_page, reads_tables=True)),
    ]


def _context(live: LiveFleet, stream: StreamName) -> dict[str, Any]:
    [state] = [one for one in streams_beside(live.home) if one.name == stream]
    return {"tabs": TABS, "stream": state, "ranges": RANGES}


def _span(live: LiveFleet, of: listing.Listing, given: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the chosen range, and the parameters of the API for it.

    Raises:
        Misuse: the range is none of `RANGES`.
    """
    has_device = bool(given.get("device"))
    last = queries.choice_of(given, "last", tuple(RANGES), "all" if has_device else "24")
    newest = of.of.newest_ms(live.home) or 0
    since_ms = 0 if last == "all" else max(0, newest - int(last) * HOUR_MS)
    return last, {"since": format_instant(since_ms)}


def commands_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page Commands."""
    given = request.query_params
    last, since = _span(live, listing.COMMANDS, given)
    asked = {name: given.get(name, "") for name in ("device", "status", "after")} | since
    rows, following = listing.COMMANDS.page(live.home, listing.COMMANDS.wanted(live.home, asked), _ROWS)
    return {
        **_context(live, StreamName.COMMANDS),
        "last": last,
        "rows": rows,
        "older": following,
        "statuses": listing.STATUSES,
        "export": query_of({**asked, "after": None}),
        "example": command(live.home, ("device", "command", given.get("device") or "DEVICE", "NAME")),
    }


def sessions_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page Sessions: open and ended ones, or those of one state."""
    given = request.query_params
    last, since = _span(live, listing.SESSIONS, given)
    state = queries.choice_of(given, "state", ("", *STATES), "")
    asked = {name: given.get(name, "") for name in ("device", "after")} | since
    lists = list[dict[str, Any]]()
    for one in (state,) if state else ("open", "ended"):
        of_state = _of_state(one)
        wanted = listing.SESSIONS.wanted(live.home, {**asked, **of_state})
        rows, following = listing.SESSIONS.page(live.home, wanted, _ROWS if state else _FEW)
        lists.append({"state": one, "rows": rows, "older": following, "export": query_of({**asked, **of_state, "after": None})})
    return {**_context(live, StreamName.SESSIONS), "last": last, "state": state, "states": STATES, "lists": lists}


def _of_state(state: str) -> dict[str, str]:
    """Return the parameters of the API for sessions of a state."""
    return {"open": "true" if state == "open" else "false"} if state in ("open", "ended") else {"ended_by": state}


def vitals_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page Vitals: windows of one metric of a device."""
    given, home = request.query_params, live.home
    device_id, wanted = queries.text_of(given, "device"), queries.text_of(given, "metric")
    last = queries.choice_of(given, "last", tuple(RANGES), "24")
    newest = windows(home, device_id, limit=_NEWEST) if device_id else []
    metrics = sorted({row["metric"] for row in newest})
    metric = wanted or (metrics[0] if metrics else "")
    rows = _windows(home, device_id, metric, last, newest[0]["window_end_ms"]) if newest else []
    return {
        **_context(live, StreamName.VITALS),
        "device_id": device_id,
        "metrics": metrics,
        "metric": metric,
        "last": last,
        "rows": rows,
        "most": _WINDOWS,
        "alarms": alarms(home, device_id, limit=_FEW) if device_id else [],
        "chart": chart_of([row for row in rows if not row["late"]]),
    }


def _windows(home: Home, device_id: str, metric: str, last: str, newest_end_ms: int) -> list[dict[str, Any]]:
    since_ms = None if last == "all" else newest_end_ms - int(last) * HOUR_MS
    return windows(home, device_id, metric, since_ms, _WINDOWS)


def rollouts_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page Rollouts."""
    return {
        **_context(live, StreamName.COMMANDS),
        "rollouts": [{**listed(one), "verdict": one.current.verdict if one.cohorts else None} for one in all_rollouts(live.home)],
        "offers": offers(request, "rollout"),
    }


def rollout_page(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page of one rollout."""
    found, home = rollout_of(live.home, request.path_params["name"]), live.home
    name = found.plan.name
    steps: Sequence[tuple[str, str, tuple[str, ...]]] = ()
    if found.status is Status.RUNNING:
        steps = (
            ("Judge the newest cohort", "Stops the rollout if a bound is exceeded.", ("rollout", "check", name)),
            ("Start the next cohort", "Refused until the newest one has passed.", ("rollout", "advance", name)),
            ("Stop the rollout", "No further device gets the firmware.", ("rollout", "stop", name)),
        )
    return {
        **_context(live, StreamName.COMMANDS),
        "rollout": listed(found),
        "plan": found.plan.content(),
        "soak_ms": found.plan.soak_ms,
        "judged": _judged(live, found) if steps and queries.flag_of(request.query_params, "judge") else None,
        "cohorts": [
            {"number": number, "share": share, "step": found.cohorts[number - 1] if number <= len(found.cohorts) else None}
            for number, share in enumerate(found.plan.cohorts, 1)
        ],
        "commands": [{"title": title, "effect": effect, "command": command(home, words)} for title, effect, words in steps],
    }


def _judged(live: LiveFleet, found: Rollout) -> dict[str, Any]:
    """Return the present verdict about the newest cohort, which is not recorded."""

    def read() -> dict[str, Any]:
        [commands_] = [one for one in streams_beside(live.home) if one.name is StreamName.COMMANDS]
        seen = observe_newest(live.home, found, expects_answers=commands_.is_on)
        groups = {"cohort": seen.cohort, "the rest": seen.rest, "cohort before": seen.before}
        return {
            "verdict": judge_cohort(found.plan, seen),
            "groups": groups,
            "answers": seen.answers,
            "through_ms": seen.through_ms,
        }

    return live.recent.get(f"rollout {found.plan.name} {found.current.number}", SLOW_S, read)


def device_part(live: LiveFleet, request: Request, device_id: str) -> dict[str, Any]:
    """Return the context of the part of a device's page about the streams."""
    del request
    home = live.home
    found = twin(home, device_id)
    rows, _ = listing.SESSIONS.page(home, listing.SESSIONS.wanted(home, {"device": device_id}), _OF_DEVICE)
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for row in windows(home, device_id, limit=_NEWEST):
        if not row["late"]:
            by_metric.setdefault(row["metric"], []).append(row)
    return {
        "beside": {one.name.value: one for one in streams_beside(home)},
        "sessions": rows,
        "twin": found,
        "commands": [numbered_row(row) for row in reversed(found.commands)],
        "vitals": [rows[0] for _, rows in sorted(by_metric.items())],
    }
