"""Routes of the API about the streams beside the lifecycle: commands, twins, sessions and vitals."""

from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.streams.tables import COMMANDS, SESSIONS, VITAL_ALARMS, VITALS
from fleetpulse.core.tables import Table
from fleetpulse.io.home.home import Home
from fleetpulse.reports.plain import numbered_row
from fleetpulse.reports.streams.lists import COMMAND_LIST, SESSION_LIST
from fleetpulse.reports.streams.twin import twin as twin_of
from fleetpulse.reports.streams.vitals import alarms, windows
from fleetpulse.web import queries
from fleetpulse.web.api import listing
from fleetpulse.web.api.answers import tables
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
from fleetpulse.web.api.parameters import DEVICE_ID, TEXT, limited
from fleetpulse.web.live import LiveFleet

_SPAN: Final = (
    Parameter("device", "device", TEXT),
    Parameter(
        "since", "least instant, ISO 8601 with a zone; by default a day before the newest one, or none with a device", TEXT
    ),
)
_STATUS: Final = Parameter("status", "state", text("", listing.STATUSES))
_OPEN: Final = Parameter("open", "true for open sessions only, false for ended ones only", flag(""))
_REASON: Final = Parameter("ended_by", "reason of the end", text("", listing.REASONS))
_AFTER: Final = Parameter("after", "`next` of the page before", TEXT)
_NOTES: Final = "A file has the rows of the list; objects are JSON texts, and instants are epoch milliseconds."


def commands(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List commands with their states, newest first."""
    return _page(live.home, request, listing.COMMANDS)


def sessions(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List sessions by the instant of their end or, if they are open, of their start; newest first."""
    return _page(live.home, request, listing.SESSIONS)


def _page(home: Home, request: Request, of: listing.Listing) -> dict[str, Any]:
    wanted = of.wanted(home, request.query_params)
    rows, following = of.page(home, wanted, queries.limit_of(request.query_params, 50))
    return {of.noun: rows, "since_ms": wanted.since_ms, "next": following}


def twin(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Show the desired and the reported state of a device."""
    device_id = request.path_params["device_id"]
    live.require_device(device_id)
    found = asdict(twin_of(live.home, device_id))
    return {**found, "commands": [numbered_row(row) for row in found["commands"]]}


def vitals(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List the closed windows and the alarms of a device, newest first."""
    device_id, given = request.path_params["device_id"], request.query_params
    metric, since_ms = queries.text_of(given, "metric") or None, queries.instant_of(given, "since")
    limit = queries.limit_of(given, queries.MOST_ROWS)
    live.require_device(device_id)
    return {
        "windows": windows(live.home, device_id, metric, since_ms, limit),
        "alarms": alarms(live.home, device_id, metric, limit),
    }


def _columns(columns: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, Schema]:
    known = {column.name for column in columns}
    return columns_of(columns, [name for name in names if name in known])


def _all_columns(table: Table) -> Schema:
    return obj(columns_of(table.columns, [column.name for column in table.columns]))


_COMMAND: Final = obj(
    {
        **_columns(COMMANDS.columns, COMMAND_LIST.columns),
        "payload": optional(any_object("payload of the command")),
        "reported": optional(any_object("state that the device reported with the answer")),
        "answers": whole("number of answers; the first one counts", 0),
    }
)
_SESSION: Final = obj(
    {
        **_columns(SESSIONS.columns, SESSION_LIST.columns),
        "last_seen_ms": optional(whole("received_at of its newest signal; null while it is open; epoch milliseconds")),
        "messages": optional(whole("number of its signals, copies included; null while it is open")),
        "duration_ms": optional(whole("time from its start to its end, or to the newest message that the stream has read")),
    }
)
_SINCE: Final = optional(whole("least instant of the list, epoch milliseconds; null if it has all"))
_NEXT: Final = optional(text("cursor of the next page; null after the last one"))

OPERATIONS: Final = (
    Operation(
        "/commands",
        "commands",
        "List commands with their states, and answers without a command, newest first.",
        tables(commands),
        obj({"commands": array(_COMMAND, "commands"), "since_ms": _SINCE, "next": _NEXT}),
        parameters=(*_SPAN, _STATUS, _AFTER, limited("commands")),
        notes="The stream `commands` writes them. Payloads and reported states are data of unknown origin.",
    ),
    *listing.COMMANDS.files((*_SPAN, _STATUS), "List commands with their states", _NOTES),
    Operation(
        "/sessions",
        "sessions",
        "List connection sessions by their end, or by their start if they are open; newest first.",
        tables(sessions),
        obj({"sessions": array(_SESSION, "sessions"), "since_ms": _SINCE, "next": _NEXT}),
        parameters=(*_SPAN, _OPEN, _REASON, _AFTER, limited("sessions")),
        notes="The stream `sessions` writes them. An open session that began before the span is not listed.",
    ),
    *listing.SESSIONS.files((*_SPAN, _OPEN, _REASON), "List connection sessions", _NOTES),
    Operation(
        "/devices/{device_id}/twin",
        "device_twin",
        "Show the desired and the reported state of a device, and their difference.",
        tables(twin),
        obj(
            {
                "device_id": text("id of the device"),
                "desired": any_object("state that the commands ask for"),
                "reported": any_object("state that the device reported"),
                "difference": any_object("part of the desired state that the reported state does not have"),
                "metrics": any_object("metrics of the newest message with metrics"),
                "commands": array(_COMMAND, "pending commands and the newest ones, oldest first"),
            }
        ),
        parameters=(DEVICE_ID,),
        notes="The answer is that of `./fleet twin DEVICE --json`, with instants as numbers.",
        errors=(404,),
    ),
    Operation(
        "/devices/{device_id}/vitals",
        "device_vitals",
        "List the closed windows of the metrics of a device, and its alarms, newest first.",
        tables(vitals),
        obj({"windows": array(_all_columns(VITALS), "windows"), "alarms": array(_all_columns(VITAL_ALARMS), "newest alarms")}),
        parameters=(
            DEVICE_ID,
            Parameter("metric", "name of a metric; all by default", TEXT),
            Parameter("since", "instant after which the windows end, ISO 8601 with a zone; all by default", TEXT),
            limited("windows, the newest", queries.MOST_ROWS),
        ),
        notes="The stream `vitals` writes them; the policy names the metrics.",
        errors=(404,),
    ),
)
