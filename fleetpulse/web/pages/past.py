"""Pages of the past: the fleet, or the life of a device, as of an instant, as known now or as known then.

Rule 1: the pages show the rows of `fleetpulse.reports.history.time_travel`, as ``./fleet rewind`` does. They read tables, not the
facts in memory.
Rule 2: the instant and the knowledge are in the address, so that a link shows the same facts again.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.lifecycle import PRESENT, Mode
from fleetpulse.core.times import DAY_MS, END_OF_TIME_MS, HOUR_MS, format_instant
from fleetpulse.reports.history.time_travel import Moment, life
from fleetpulse.reports.moments import began_ms, fleet_page, moment_of
from fleetpulse.web import queries
from fleetpulse.web.actions import command
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages import charts
from fleetpulse.web.pages.facts import SLOW_S

FILTERS: Final = {"q": "id has", "mode": "mode", "site": "site", "class": "class", "gateway": "gateway", "trigger": "trigger"}
KNOWN: Final = ("now", "then")
STEPS_MS: Final = {"1 d": DAY_MS, "1 h": HOUR_MS, "10 min": 600_000, "1 min": 60_000}
SLIDE_MS: Final = 60_000  # step of the slider
_PAGE: Final = 50
_SPANS: Final = 200  # rows of a life
_BAND_MS: Final = 7 * DAY_MS  # greatest span of the chart of a life
_LOCAL: Final = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d{1,3})?)?")  # value of a field of a form: UTC


def fleet(live: LiveFleet, request: Request) -> Mapping[str, Any]:
    """Return the context of the page of the fleet as of an instant."""
    given = request.query_params
    known = queries.choice_of(given, "known", KNOWN, KNOWN[0])
    moment = _moment(live, given, known)
    where = queries.condition({name: given[name] for name in FILTERS if name in given})
    after = queries.text_of(given, "after")
    found = fleet_page(live.home, moment, where.sql, where.values, after=after, limit=_PAGE + 1)
    rows = found.rows[:_PAGE]
    parameters = {name: value for name, value in given.items() if name != "after"} | {"at": str(moment.at_ms)}
    return {
        **_of_moment(live, moment, known, "/past", parameters),
        "rows": rows,
        "present": PRESENT,
        "modes": {mode: found.modes[mode] for mode in charts.ORDER if mode in found.modes},
        "count": found.count,
        "of_all": sum(found.modes.values()),
        "filters": FILTERS,
        "is_filtered": any(parameters.get(name) for name in FILTERS),
        "is_first": not after,
        "next": rows[-1]["device_id"] if len(found.rows) > _PAGE else None,
        "typed": command(live.home, ("rewind", "--to", format_instant(moment.at_ms), "--known", known)),
    }


def device(live: LiveFleet, request: Request, device_id: str) -> dict[str, Any]:
    """Return the context of the page of a device as of an instant.

    Raises:
        FleetError: the device was never registered or heard.
    """
    given = request.query_params
    known = queries.choice_of(given, "known", KNOWN, KNOWN[0])
    live.require_device(device_id)
    moment = _moment(live, given, known)
    spans = life(live.home, device_id, moment)
    end_ms = min(moment.at_ms, moment.judged_to_ms) if spans else moment.at_ms
    began_ms = min((one["since_ms"] for one in spans), default=end_ms)
    axis = charts.Range(min(max(began_ms, end_ms - _BAND_MS), end_ms - 1), end_ms)
    parameters = {"at": str(moment.at_ms), "known": given.get("known"), "id": given.get("id")}
    words = ("rewind", "--to", format_instant(moment.at_ms), "--known", known, "--device", "{device}")
    return {
        **_of_moment(live, moment, known, "", parameters),
        "now_mode": spans[-1] if spans else None,
        "spans": spans[::-1][:_SPANS],
        "more": max(0, len(spans) - _SPANS),
        "bars": _band(spans, axis),
        "ticks": charts.ticks(axis),
        "typed": command(live.home, words, device_id),
    }


def _moment(live: LiveFleet, given: Mapping[str, str], known: str) -> Moment:
    """Return the instants of a request; without one, the instant is the frontier.

    Raises:
        FleetError: an instant is invalid, in the future, or before the history.
    """
    text = given.get("at", "")
    asked_ms = queries.instant_of({"at": f"{text}Z" if _LOCAL.fullmatch(text) else text}, "at")
    at_ms = live.mirror.reached.frontier_ms or 0 if asked_ms is None else asked_ms
    return moment_of(live.home, at_ms, at_ms if known == "then" else END_OF_TIME_MS, first_ms=_first_ms(live))


def _of_moment(live: LiveFleet, moment: Moment, known: str, path: str, parameters: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of the form and of the links to other instants.

    Args:
        live: facts in memory, whose frontier bounds the links.
        moment: shown instants.
        known: whether all verdicts count, or those of then.
        path: path of the page; empty for that of a device.
        parameters: parameters of the links.
    """
    frontier_ms = live.mirror.reached.frontier_ms
    latest_ms = moment.at_ms if frontier_ms is None else frontier_ms
    return {
        "at_ms": moment.at_ms,
        "field": format_instant(moment.at_ms // 1000 * 1000).removesuffix(".000Z"),
        "known": known,
        "slider": _slider(live, latest_ms),
        "is_beyond": moment.judged_to_ms < moment.at_ms,
        "judged_to_ms": None if moment.judged_to_ms < 0 else moment.judged_to_ms,
        "path": path,
        "parameters": {name: value for name, value in parameters.items() if value},
        "slide_ms": SLIDE_MS,
        "earlier": {label: moment.at_ms - step_ms for label, step_ms in STEPS_MS.items()},
        "later": {label: moment.at_ms + one for label, one in reversed(STEPS_MS.items()) if moment.at_ms + one <= latest_ms},
    }


def _first_ms(live: LiveFleet) -> int:
    """Return the first instant of the history."""
    return live.recent.get("history", SLOW_S, lambda: began_ms(live.home))


def _slider(live: LiveFleet, latest_ms: int) -> charts.Range | None:
    """Return the first and the last instant of the slider, whole steps of the history; None if it is too short."""
    found = charts.Range(-(-_first_ms(live) // SLIDE_MS) * SLIDE_MS, latest_ms // SLIDE_MS * SLIDE_MS)
    return found if found.from_ms < found.to_ms else None


def _band(spans: list[dict[str, Any]], axis: charts.Range) -> list[charts.Bar]:
    """Return the modes of a life as bars."""
    bars = list[charts.Bar]()
    for one in spans:
        until_ms = axis.to_ms if one["until_ms"] is None else one["until_ms"]
        if one["mode"] == Mode.FORGOTTEN or until_ms <= axis.from_ms or one["since_ms"] >= axis.to_ms:
            continue
        x = axis.place(one["since_ms"])
        width = max(1.5, axis.place(until_ms) - x)
        bars.append(charts.Bar(one["mode"], x, round(width, 2), title=one["mode"], at_ms=max(one["since_ms"], axis.from_ms)))
    return bars
