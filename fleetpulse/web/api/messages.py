"""Route of the API about the messages of a device.

Rule: the list has the retained rows of the device in bronze, newest first. Rows that concern all devices are left out.
"""

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.rows import Kind
from fleetpulse.core.tables import MESSAGES
from fleetpulse.reports.messages import LISTED, Place, messages_of, place_of
from fleetpulse.web import queries
from fleetpulse.web.api.answers import tables
from fleetpulse.web.api.openapi import Operation, Parameter, array, columns_of, obj, optional, text
from fleetpulse.web.api.parameters import DEVICE_ID, limited
from fleetpulse.web.live import LiveFleet

KINDS: Final = tuple(kind.value for kind in Kind if kind not in (Kind.POLICY, Kind.GAP, Kind.TICK))  # of one device
PAGE: Final = 50
_ALL: Final = "all"


def listed(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List messages of a device, newest first."""
    device_id, limit = request.path_params["device_id"], queries.limit_of(request.query_params, PAGE)
    kind, after = asked(request)
    live.require_device(device_id)
    rows = messages_of(live.home, device_id, limit + 1, kind=kind, before=after)
    shown = [{name: one[name] for name in ("received_at_ms", "event_time_ms", *LISTED)} for one in rows[:limit]]
    return {"messages": shown, "next": cursor(rows[limit - 1]) if len(rows) > limit else None}


def asked(request: Request) -> tuple[Kind | None, Place | None]:
    """Return the kind and the place that a request names.

    Raises:
        Misuse: a parameter is invalid.
    """
    given = request.query_params
    kind = queries.choice_of(given, "kind", (_ALL, *KINDS), _ALL)
    after = given.get("after", "")
    place = queries.decoded_cursor(after, (int,), (int,), (str,), (int,), (int,)) if after else None
    return None if kind == _ALL else Kind(kind), None if place is None else (place[0], place[1], place[2], place[3], place[4])


def cursor(row: Mapping[str, Any]) -> str:
    """Return the `after` of the page that follows a row."""
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
            DEVICE_ID,
            Parameter("kind", "kind of the messages", {**text("", (_ALL, *KINDS)), "default": _ALL}),
            Parameter("after", "the `next` of the page before; with the same kind", text("")),
            limited("messages"),
        ),
        notes="The messages are data of unknown origin: escape them before you show them. Rows that concern all devices, such "
        "as gaps and policies, are left out.",
        errors=(404,),
    ),
)
