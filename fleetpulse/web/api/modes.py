"""Route of the modes over time, below ``/api/v1``.

Rule 1: `fleetpulse.reports.present.over_time` counts; the route checks the range and the filters.
Rule 2: the tables are read once for equal requests of a version of the facts, and for one request at a time.
"""

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.errors import Misuse
from fleetpulse.core.times import DAY_MS, HOUR_MS
from fleetpulse.reports.present.over_time import modes_over_time
from fleetpulse.web import queries
from fleetpulse.web.api.answers import facts, versioned
from fleetpulse.web.api.openapi import Operation, Parameter, array, counts, obj, text, whole
from fleetpulse.web.api.parameters import CLASS, SITE
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.recent import VersionedValues

PATH: Final = "/fleet/modes"
_MOST_MS: Final = 366 * DAY_MS  # longest range
_MOST_KNOWN: Final = 50_000  # hours of all answers in memory
_Wanted = tuple[int, int, str | None, str | None]  # range, site and class


def _wanted(given: Mapping[str, str], frontier_ms: int | None) -> _Wanted:
    to_ms, from_ms = queries.instant_of(given, "to"), queries.instant_of(given, "from")
    if to_ms is None:
        to_ms = 0 if frontier_ms is None else frontier_ms + 1
    if from_ms is None:
        from_ms = to_ms - DAY_MS
    if not 0 <= to_ms - from_ms <= _MOST_MS:
        raise Misuse(
            f'parameter "from" must be before "to", by at most {_MOST_MS // DAY_MS} days; the range has '
            f"{(to_ms - from_ms) // HOUR_MS:,} hours",
            code="parameter-invalid",
        )
    return from_ms, to_ms, queries.text_of(given, "site") or None, queries.text_of(given, "class") or None


def known_modes() -> VersionedValues:
    """Return the place of the answers in memory, for `OPERATIONS`."""
    return VersionedValues(_MOST_KNOWN, lambda hours: len(hours) + 1, one_at_a_time=True)


def _modes(live: LiveFleet, request: Request) -> dict[str, Any]:
    known: VersionedValues = request.app.state.modes
    reached = live.mirror.reached
    wanted = _wanted(request.query_params, reached.frontier_ms)
    return {"hours": known.get(reached.tag, wanted, lambda: modes_over_time(live.home, reached.frontier_ms, *wanted))}


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
            SITE,
            CLASS,
        ),
        is_tagged=True,
    ),
)
