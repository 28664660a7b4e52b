"""Routes of the API about the whole fleet: counts of devices, sites and classes."""

from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.judgements import AMENDMENTS, LISTED
from fleetpulse.core.lifecycle import TROUBLE
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports.frontiers import shards, sites_behind
from fleetpulse.reports.judgements import health
from fleetpulse.reports.operations.coverage import coverage_gaps
from fleetpulse.reports.present.devices import bronze_counts, counts_of_rows
from fleetpulse.reports.present.parts import UNJUDGED
from fleetpulse.web import queries
from fleetpulse.web.api.answers import current, facts, versioned
from fleetpulse.web.api.openapi import (
    Operation,
    Parameter,
    Schema,
    any_object,
    array,
    counts,
    obj,
    optional,
    text,
    whole,
)
from fleetpulse.web.api.parameters import CLASS, SITE, limited
from fleetpulse.web.live import LiveFleet

SLOW_S: Final = 5.0  # interval at which facts from tables are read again
_GAPS: Final = 100  # open coverage gaps in an answer
_ORDERS: Final = ("trouble", "devices", "name")

GAP: Final = obj(
    {
        "bridge": text("name of the bridge"),
        "since_ms": whole("start of the gap, epoch milliseconds"),
        "until_ms": optional(whole("its end, epoch milliseconds; null while it is open")),
        "why": optional(text("reason: start, broker, network, disk or bridge")),
    }
)
HEALTH: Final = optional(
    obj(
        {
            "newest": any_object("newest batch, with the columns of `stream_health`; instants are text"),
            "rated": array(any_object("metric with its thresholds, its value and its rating"), "one entry for each threshold"),
            "batches": whole("number of batches over which the worst value is computed"),
        },
        "health of the lifecycle job; null before its first batch",
    )
)


def slow_facts(home: Home) -> dict[str, Any]:
    """Return the facts of a fleet that are not in memory: messages, sites that are behind, health, open gaps."""
    judged = judged_ms(home.checkpoint)
    known = None if judged is None else shards(home, judged)
    return {
        **bronze_counts(home),
        "judged_received_at_ms": judged,
        "held_back": [] if known is None else sites_behind(known),
        "health": health(home),
        "coverage": coverage_gaps(home, _GAPS, only_open=True),
    }


def fleet(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Return counts of devices and rows, the progress of the job, and its health."""
    del request
    reached = live.mirror.reached
    with live.reading() as cursor:
        modes = [row for row in fetch(cursor, queries.MODES) if row["mode"] != UNJUDGED]
        clocks = fetch(cursor, queries.WRONG_CLOCKS)
    return {
        "devices": {row["mode"]: row["n"] for row in modes},
        "never_seen": sum(row["never_seen"] for row in modes),
        "clocks": {row["clock"]: row["n"] for row in clocks},
        **counts_of_rows(reached.kinds, reached.modes, reached.refused),
        **live.recent.get("fleet", SLOW_S, lambda: slow_facts(live.home)),
    }


def sites(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Return numbers of devices by mode, of each site and class."""
    given = request.query_params
    order, limit = queries.choice_of(given, "sort", _ORDERS, _ORDERS[0]), queries.limit_of(given, 100)
    where = queries.condition({name: given[name] for name in ("site", "class") if name in given})
    found = live.query(*queries.groups_sql("site", where, order, limit))
    classes = live.query(*queries.groups_sql("device_class", where, order, limit))
    return {"sites": found, "classes": classes}


def _group(noun: str) -> Schema:
    return array(
        obj(
            {
                "name": text(f"name of the {noun}; empty if it is unknown"),
                "devices": whole("number of judged devices"),
                "trouble": whole(f"number of devices in one of the modes {', '.join(TROUBLE)}"),
                "modes": counts("number of devices by mode"),
            }
        ),
        f"numbers of devices of each {noun}",
    )


OPERATIONS: Final = (
    Operation(
        "/fleet",
        "fleet",
        "Count devices by mode, and show the progress and the health of the job.",
        current(fleet),
        versioned(
            {
                "devices": counts("number of judged devices by mode"),
                "never_seen": whole("number of offline devices that were never heard"),
                "clocks": counts("number of devices with a wrong clock, by class of the clock"),
                "transitions": counts("number of transitions by mode, after amendments"),
                "judgements": counts(f"number of judgements by kind: transition, {', '.join(LISTED)}"),
                "amended": counts(f"number of amendments by kind: {', '.join(AMENDMENTS)}"),
                "quarantine": counts("number of quarantined messages by reason"),
                "messages": whole("number of landed messages"),
                "newest_received_at_ms": optional(whole("`received_at` of the newest message, epoch milliseconds")),
                "judged_received_at_ms": optional(whole("`received_at` up to which the job has judged, epoch milliseconds")),
                "held_back": array(
                    obj(
                        {
                            "sites": optional(array(text("site"), "sites; null: all that no coverage gap names")),
                            "bridges": array(text("bridge"), "bridges of these sites that are not listening"),
                            "frontier_ms": optional(whole("frontier of these sites, epoch milliseconds")),
                        }
                    ),
                    "sites whose frontier is behind others, because a bridge is not listening",
                ),
                "health": HEALTH,
                "coverage": array(GAP, "open coverage gaps"),
            }
        ),
        notes=f"The fields from `messages` on are at most {SLOW_S:g} s older than the others, so the answer has no ETag.",
    ),
    Operation(
        "/fleet/sites",
        "sites",
        "Count devices by mode, of each site and of each class.",
        facts(sites),
        versioned({"sites": _group("site"), "classes": _group("class")}),
        parameters=(
            Parameter("sort", "order of both lists", {**text("", _ORDERS), "default": _ORDERS[0]}),
            SITE,
            CLASS,
            limited("entries of each list", 100),
        ),
        is_tagged=True,
    ),
)
