"""Route of the modes over time, below ``/api/v1``.

Rule 1: `fleetpulse.reports.present.over_time` counts; the route checks the range and the filters.
Rule 2: the tables are read once for equal requests of a version of the facts, and for one request at a time.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.errors import Misuse
from fleetpulse.core.times import DAY_MS, HOUR_MS, parse_instant_ms
from fleetpulse.reports.present.over_time import modes_over_time
from fleetpulse.web.answers import facts, versioned
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.openapi import Operation, Parameter, array, counts, obj, text, whole
from fleetpulse.web.queries import MOST_TEXT

PATH: Final = "/fleet/modes"
_MOST_MS: Final = 366 * DAY_MS  # longest range
_MOST_KNOWN: Final = 50_000  # hours of all answers in memory
Wanted = tuple[int, int, str | None, str | None]  # range, site and class


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
            given: parameters of the request.

        Raises:
            Misuse: a parameter is invalid.
            FleetError: an instant is invalid.
        """
        reached = live.mirror.reached
        wanted = _wanted(given, reached.frontier_ms)
        with self._lock:
            if self._tag != reached.tag:
                self._tag, self._known = reached.tag, {}
            if wanted not in self._known:
                hours = modes_over_time(live.home, reached.frontier_ms, *wanted)
                if sum(map(_size, self._known.values())) + _size(hours) > _MOST_KNOWN:
                    self._known = {}
                self._known[wanted] = hours
            return {"hours": self._known[wanted]}


def _size(hours: list[dict[str, Any]]) -> int:
    return len(hours) + 1  # an answer without hours also has a size


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


def _modes(live: LiveFleet, request: Request) -> dict[str, Any]:
    known: KnownModes = request.app.state.modes
    return known.modes(live, request.query_params)


_ANSWER: Final = versioned(
    {
        "hours": array(
            obj({"hour_ms": whole("start of the hour, epoch milliseconds"), "devices": counts("number of devices by mode")}),
            "devices by mode at the end of each hour, or at the frontier",
        )
    }
)
OPERATIONS: Final = (
    Operation(
        PATH,
        "fleetModes",
        "Return numbers of devices by mode at the end of each hour.",
        facts(_modes, reads_tables=True),  # requests wait for one another: without a thread, which others need
        _ANSWER,
        (
            Parameter("from", "start of the range; default: one day before the end", text("instant")),
            Parameter("to", "end of the range; default: the frontier", text("instant")),
            Parameter("site", "site to filter by", text("name of a site", most=MOST_TEXT)),
            Parameter("class", "class to filter by", text("name of a class", most=MOST_TEXT)),
        ),
        is_tagged=True,
    ),
)
