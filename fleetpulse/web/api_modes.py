"""Route of the modes over time, below ``/api/v1``.

Rule 1: `fleetpulse.reports.present.over_time` counts; the route checks the range and the filters.
Rule 2: the tables are read once for equal requests of a version of the facts, and for one request at a time.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fleetpulse.core.errors import Misuse
from fleetpulse.core.times import DAY_MS, HOUR_MS, parse_instant_ms
from fleetpulse.reports.present.over_time import modes_over_time
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.queries import MOST_TEXT

PATH: Final = "/api/v1/fleet/modes"
PARAMETERS: Final[Mapping[str, str]] = {  # parameters of the route, with their meaning
    "from": "start of the range, an instant; default: one day before the end",
    "to": "end of the range, an instant; default: the frontier",
    "site": "site to filter by",
    "class": "class to filter by",
}
_MOST_MS: Final = 366 * DAY_MS  # longest range
_MOST_KNOWN: Final = 64  # answers in memory
Wanted = tuple[int, int, str | None, str | None]  # range, site and class


def routes() -> list[Route]:
    """Return the routes."""
    known = KnownModes()

    async def route(request: Request) -> Response:
        live: LiveFleet = request.app.state.live
        reached = await run_in_threadpool(live.reached)
        tag = f'"{reached.tag}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        found = await run_in_threadpool(known.modes, live, request.query_params)
        return JSONResponse({"version": reached.tag, "frontier_ms": reached.frontier_ms, **found}, headers={"ETag": tag})

    return [Route(PATH, route)]


class KnownModes:
    """Counts that were read for a version of the facts."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tag = ""
        self._known: dict[Wanted, list[dict[str, Any]]] = {}

    def modes(self, live: LiveFleet, given: Mapping[str, str]) -> dict[str, Any]:
        """Count the devices by mode at the end of each hour.

        Args:
            live: facts in memory.
            given: parameters of the request, see `PARAMETERS`.

        Raises:
            Misuse: a parameter is invalid.
            FleetError: an instant is invalid.
        """
        reached = live.mirror.reached
        wanted = _wanted(given, reached.frontier_ms)
        with self._lock:
            if self._tag != reached.tag or len(self._known) >= _MOST_KNOWN:
                self._tag, self._known = reached.tag, {}
            if wanted not in self._known:
                self._known[wanted] = modes_over_time(live.home, reached.frontier_ms, *wanted)
            return {"hours": self._known[wanted]}


def _wanted(given: Mapping[str, str], frontier_ms: int | None) -> Wanted:
    to_ms = _instant(given, "to", 0 if frontier_ms is None else frontier_ms + 1)
    from_ms = _instant(given, "from", to_ms - DAY_MS)
    if not 0 <= to_ms - from_ms <= _MOST_MS:
        raise Misuse(
            f'parameter "from" must be before "to", by at most {_MOST_MS // DAY_MS} days; the range has '
            f"{(to_ms - from_ms) // HOUR_MS:,} hours",
            code="parameter-invalid",
        )
    return from_ms, to_ms, _text(given, "site"), _text(given, "class")


def _instant(given: Mapping[str, str], name: str, default_ms: int) -> int:
    text = _text(given, name)
    return default_ms if text is None else parse_instant_ms(text)


def _text(given: Mapping[str, str], name: str) -> str | None:
    value = given.get(name)
    if value is not None and len(value) > MOST_TEXT:
        raise Misuse(
            f'parameter "{name}" has {len(value):,} characters; at most {MOST_TEXT} are allowed', code="parameter-invalid"
        )
    return value or None
