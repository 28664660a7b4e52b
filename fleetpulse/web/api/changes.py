"""Routes of the API about changes of modes: a list, a feed in commit order, and the feed as events."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.judgements import CHANGES
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.reports.history.feed import COLUMNS, NEWEST, changes_after, parse_cursor
from fleetpulse.reports.present.mirror import CHANGED, Reached
from fleetpulse.web import queries
from fleetpulse.web.api.answers import export_operations, facts, tables, versioned
from fleetpulse.web.api.devices import MODES, TRIGGERS, several
from fleetpulse.web.api.events import EVENTS, HEARTBEAT_S, MOST_STREAMS, stream_changes
from fleetpulse.web.api.openapi import Operation, Parameter, array, columns_of, flag, obj, optional, text, whole
from fleetpulse.web.api.parameters import PLACES, TEXT, limited
from fleetpulse.web.live import LiveFleet

_MOST_MINUTES: Final = 1_440


def transitions(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Return a page of the transitions of the last day that match, newest first."""
    given = request.query_params
    where, limit = queries.changes_sql(given, live.mirror.reached.frontier_ms), queries.limit_of(given, 50)
    rows = live.query(*queries.change_rows_sql(where, given.get("after", ""), limit))
    [count] = live.query(*queries.change_count_sql(where))
    following = queries.change_cursor(rows[-1]) if len(rows) == limit else None
    return {"transitions": rows, "count": count["n"], "next": following}


def _query(reached: Reached, given: Mapping[str, str]) -> tuple[str, list[Any]]:
    return queries.change_rows_sql(queries.changes_sql(given, reached.frontier_ms), "", None)


def feed(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Return the changes after a cursor."""
    log = DeltaLog(live.home.table(JUDGEMENTS.name))
    limit = queries.limit_of(request.query_params, queries.MOST_ROWS)
    found = changes_after(log, parse_cursor(request.query_params.get("after") or NEWEST, log), limit)
    return {"changes": found.rows, "next": str(found.following), "at_end": found.at_end}


_FILTER: Final = (
    Parameter("device", "id of the device", TEXT),
    *PLACES,
    Parameter("from_mode", "modes before", several(MODES)),
    Parameter("to_mode", "modes after", several(MODES)),
    Parameter("trigger", "triggers", several(TRIGGERS)),
    Parameter("since", "least event time, ISO 8601 with a zone or epoch milliseconds", TEXT),
    Parameter("until", "event time before which the transitions are", TEXT),
    Parameter("last", "number of minutes before the frontier", whole("", 1, _MOST_MINUTES)),
)
_AFTER: Final = 'place after which to begin: the `next` of an answer, "newest" or "oldest"; by default "newest"'
_CHANGE: Final = obj(
    {
        **columns_of(JUDGEMENTS.columns, COLUMNS, ("device_id",)),
        "kind": text("kind of the row", tuple(kind.value for kind in CHANGES)),
        "cursor": text("place after this row; continue with it as `after`"),
    }
)

OPERATIONS: Final = (
    Operation(
        "/transitions",
        "transitions",
        "List the transitions of the last day before the frontier, after amendments, newest first.",
        facts(transitions),
        versioned(
            {
                "transitions": array(obj(columns_of(JUDGEMENTS.columns, CHANGED, ("device_id", "event_time"))), "page"),
                "count": whole("number of transitions that match"),
                "next": optional(text("`after` of the next page; null on the last page")),
            }
        ),
        parameters=(
            *_FILTER,
            Parameter("after", "the `next` of the page before; with the same filter", text("")),
            limited("transitions"),
        ),
        is_tagged=True,
    ),
    *export_operations(
        "transitions",
        _query,
        _FILTER,
        "List all transitions of the last day that match",
        "The columns are those of the JSON answer.",
    ),
    Operation(
        "/transitions/feed",
        "feed",
        f"Follow the changes of modes in commit order: rows of kinds {', '.join(CHANGES)} as emitted.",
        tables(feed),
        obj(
            {
                "changes": array(_CHANGE, "rows in commit order"),
                "next": text("`after` of the next request"),
                "at_end": flag("whether no row follows at present; otherwise ask again at once"),
            }
        ),
        parameters=(
            Parameter("after", _AFTER, text("")),
            limited("rows", queries.MOST_ROWS),
        ),
        errors=(410,),
        notes="A client that continues with `next` receives each row once. To know all devices, list them, and follow the\nfeed "
        "from the `cursor` of the first page. A client that pauses for longer than `keep_judgement_versions` begins again.",
    ),
    Operation(
        "/transitions/events",
        "events",
        "Receive the feed as server-sent events.",
        stream_changes,
        None,
        parameters=(
            Parameter("after", _AFTER, text("")),
            Parameter("Last-Event-ID", "id of the last event received; replaces `after`", text(""), "header"),
        ),
        media=EVENTS,
        errors=(410,),
        notes=f"An event has the kind of the row as its type, the row as its data, and the cursor after it as its id. A comment "
        f"is sent every {HEARTBEAT_S:g} s. The server has at most {MOST_STREAMS} streams; further ones are refused with 503. "
        "If the feed cannot be continued, an event of type `error` is the last one.",
    ),
)
