"""Routes of the API about devices: lists, one device, and the explanation of its mode."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.judgements import CHANGES
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.rows import Trust
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports.device_judgements import reading_device
from fleetpulse.reports.judgements import require_status, transitions_of
from fleetpulse.reports.plain import numbered_row, plain, plain_levels, plain_row
from fleetpulse.reports.present.mirror import Reached
from fleetpulse.reports.present.parts import UNJUDGED
from fleetpulse.reports.why import why as explanation
from fleetpulse.web import queries
from fleetpulse.web.api.answers import current, export_operations, facts, tables, versioned
from fleetpulse.web.api.openapi import (
    Operation,
    Parameter,
    Schema,
    any_object,
    array,
    columns_of,
    flag,
    obj,
    optional,
    text,
    whole,
)
from fleetpulse.web.api.parameters import DEVICE_ID, PLACES, TEXT, limited
from fleetpulse.web.live import LiveFleet

_FACETS: Final = 20  # values of a facet
MODES: Final = tuple(mode.value for mode in Mode)
TRIGGERS: Final = tuple(one.value for one in Trigger)


def devices(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Return a page of devices that match, with their number and the values of the wanted facets."""
    given = request.query_params
    wanted = queries.device_filter(given)
    names = list(dict.fromkeys(queries.choices_of(given, "facets", queries.FACETS)))
    with live.searching() as (cursor, ids):
        where = queries.search(cursor, ids, wanted.where)
        rows = queries.device_rows(cursor, replace(wanted, where=where))
        count, facets = queries.facets_of(fetch(cursor, *queries.facets_sql(where, names, _FACETS)), names)
    following = queries.cursor_of(rows[-1], wanted) if len(rows) == wanted.limit else None
    return {"devices": [queries.shown_device(row) for row in rows], "count": count, "next": following, "facets": facets}


def _query(_reached: Reached, given: Mapping[str, str]) -> tuple[str, list[Any]]:
    return queries.devices_sql(queries.device_filter(given), paged=False)


def device(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Return a device: its row of the list, its status, its transitions, and retracted spans of offline."""
    device_id, given = request.path_params["device_id"], request.query_params
    is_all, limit = queries.flag_of(given, "all"), queries.limit_of(given, queries.MOST_ROWS)
    status = require_status(live.home, device_id, judged_ms(live.home.checkpoint))
    if is_all:
        with reading_device(live.home, device_id) as opened:
            timeline = transitions_of(opened, device_id, limit, everything=True)
    else:
        timeline = status.transitions[-limit:]
    found = live.query(*queries.device_sql(device_id))
    return {
        "device": queries.shown_device(found[0]) if found else None,
        "status": plain_row(status.summary),
        "timeline": [_timed(row) for row in timeline],
        "retracted_offline": status.retracted_offline,
    }


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    return {**numbered_row(row), "last_errors": plain(row["last_errors"], "last_errors")}


def why(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Explain the mode of a device."""
    at_ms = queries.instant_of(request.query_params, "at")
    return plain_levels(explanation(live.home, request.path_params["device_id"], judged_ms(live.home.checkpoint), at_ms))


def several(choices: tuple[str, ...]) -> Schema:
    """Return the schema of a parameter with several words, comma-separated."""
    return array(text("", choices))


_FILTER: Final = (
    Parameter("q", "text within the id; upper and lower case are the same", TEXT),
    Parameter("mode", "modes", several((*MODES, UNJUDGED))),
    *PLACES,
    Parameter("trigger", "triggers of the newest transition", several(TRIGGERS)),
    Parameter("clock", "classes of the clock", several(tuple(one.value for one in Trust))),
    Parameter("never_seen", "whether to list only the offline devices that were never heard", {**flag(""), "default": False}),
    Parameter("sort", "order; a minus sign reverses it", {**text("", queries.SORT_KEYS), "default": "-since"}),
)
_DEVICE: Final = obj(
    {
        "device_id": text("id of the device"),
        "mode": text("mode", (*MODES, UNJUDGED)),
        "since_ms": optional(whole("start of the mode, epoch milliseconds")),
        "trigger": optional(text("trigger of the newest transition")),
        "site": optional(text("site")),
        "device_class": optional(text("class")),
        "gateway": optional(text("gateway")),
        "last_seen_ms": optional(whole("last signal as of the newest transition, epoch milliseconds")),
        "never_seen": flag("whether it is offline and was never heard"),
        "clock": optional(text("description of a wrong clock")),
        "clock_offset_ms": optional(whole("event time less `received_at` of the newest signal, milliseconds")),
        "transitions": whole("number of transitions in this life"),
        "runtime_ms": optional(whole("cumulative runtime, milliseconds")),
        "reason": optional(text("reason why it has no mode, or was never seen")),
    }
)
_TIMELINE: Final = (
    "device_id", "life", "transition_no", "from_mode", "to_mode", "trigger", "event_time", "site", "device_class", "gateway",
    "last_seen", "runtime_ms", "reason", "policy_version", "received_at", "judged_at", "kind", "amendment_no",
)  # fmt: skip

OPERATIONS: Final = (
    Operation(
        "/devices",
        "devices",
        "List devices that match, a page at a time.",
        facts(devices),
        versioned(
            {
                "devices": array(_DEVICE, "devices of the page"),
                "count": whole("number of devices that match"),
                "next": optional(text("`after` of the next page; null on the last page")),
                "facets": {
                    "type": "object",
                    "description": f"most frequent values of each wanted facet among the devices that match, at most {_FACETS}",
                    "propertyNames": {"enum": list(queries.FACETS)},
                    "additionalProperties": array(obj({"value": text("value"), "n": whole("number of devices")})),
                },
            }
        ),
        parameters=(
            *_FILTER,
            Parameter("after", "the `next` of the page before; with the same filter and order", text("")),
            limited("devices"),
            Parameter("facets", "facets whose values are counted", several(queries.FACETS)),
        ),
        is_tagged=True,
    ),
    *export_operations(
        "devices",
        _query,
        _FILTER,
        "List all devices that match",
        "The columns are those of a device in the JSON answer; `clock` is the class of the clock.",
    ),
    Operation(
        "/devices/{device_id}/why",
        "why",
        "Explain the mode of a device: reason, arithmetic, messages and rule.",
        tables(why),
        obj(
            {
                "device_id": text("id of the device"),
                "mode": text("mode", (*MODES, UNJUDGED)),
                "since": optional(text("start of the mode")),
                "sentence": text("reason"),
                "transition": optional(any_object("transition that began the mode")),
                "terms": array(any_object("instant, or span that is added"), "arithmetic of the deadline"),
                "rule": optional(any_object("rule of the policy in force")),
                "evidence": array(any_object("row"), "messages and other rows that count"),
                "otherwise": text("what would have prevented the transition; may be empty"),
                "judged": optional(any_object("time, generation and batch of the judgement")),
                "amendments": array(any_object("transition"), "transitions of this life that amendments retracted or added"),
                "late": array(any_object("message"), "late messages that the amendment counts"),
                "next": optional(any_object("next deadline")),
                "note": text("note if rows are missing; may be empty"),
            }
        ),
        parameters=(
            DEVICE_ID,
            Parameter("at", "instant whose mode is explained, ISO 8601 with a zone; by default the present", TEXT),
        ),
        notes="The answer is that of `./fleet why DEVICE --json`: instants are text.",
        errors=(404,),
    ),
    Operation(
        "/devices/{device_id}",
        "device",
        "Show a device: its status and its transitions.",
        current(device, reads_tables=True),
        versioned(
            {
                "device": optional({**_DEVICE, "description": "its row of the list; null if it is not in memory yet"}),
                "status": any_object("facts that `./fleet device DEVICE --json` prints; instants are text"),
                "timeline": array(
                    obj({**columns_of(JUDGEMENTS.columns, _TIMELINE, ("kind", "device_id")),
                         "last_errors": array(text("error code"), "last error codes, oldest first")}),
                    "newest transitions, oldest first",
                ),
                "retracted_offline": array(
                    obj({"since_ms": whole("start, epoch milliseconds"), "until_ms": optional(whole("end, epoch milliseconds"))}),
                    "retracted spans of offline: judged offline, but alive according to late messages",
                ),
            }
        ),
        parameters=(
            DEVICE_ID,
            Parameter(
                "all",
                f"whether to list all rows of kinds {', '.join(CHANGES)} as emitted, instead of the amended transitions",
                {**flag(""), "default": False},
            ),
            limited("transitions", queries.MOST_ROWS),
        ),
        errors=(404,),
    ),
)  # fmt: skip
