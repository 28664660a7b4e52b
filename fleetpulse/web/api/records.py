"""Routes of the API about records of the operation: refused messages, gaps, the job, generations and data quality."""

import json
from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.judgements import LISTED
from fleetpulse.core.tables import JUDGEMENTS, QUALITY_FAILURES, QUALITY_RESULTS, QUARANTINE, STREAM_HEALTH
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.reports.judgements import health, newest_batches, unjudged
from fleetpulse.reports.judgements import quarantine as quarantined
from fleetpulse.reports.operations import quality as quality_reports
from fleetpulse.reports.operations.coverage import coverage_gaps
from fleetpulse.reports.plain import numbered_row
from fleetpulse.web import queries
from fleetpulse.web.api.answers import tables
from fleetpulse.web.api.fleet import GAP, HEALTH
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
from fleetpulse.web.api.parameters import TEXT, limited
from fleetpulse.web.live import LiveFleet

_ALL: Final = "all"
_KINDS: Final = (*(kind.value for kind in LISTED), _ALL)
_MOST_RUNS: Final = 100
_COUNTED: Final = ("devices", "judgements", "source_offset")  # columns of batches that are JSON


def late(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List messages that were not judged, newest first."""
    given = request.query_params
    kind = queries.choice_of(given, "kind", _KINDS, _KINDS[0])
    rows = unjudged(live.home, None if kind == _ALL else kind, queries.limit_of(given, 50))
    return {"messages": [numbered_row(row) for row in reversed(rows)]}


def quarantine(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List messages that could not be decoded, newest first."""
    rows = quarantined(live.home, queries.limit_of(request.query_params, 50))
    return {"messages": [{name: value for name, value in numbered_row(row).items() if name in _SHOWN} for row in reversed(rows)]}


def coverage(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List coverage gaps, newest first."""
    given = request.query_params
    bridge = queries.text_of(given, "bridge")
    limit, only_open = queries.limit_of(given, 50), queries.flag_of(given, "open")
    return {"gaps": coverage_gaps(live.home, limit, only_open=only_open, bridge=bridge)}


def stream(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Show the health of the lifecycle job, and its newest batches."""
    batches = newest_batches(live.home, queries.limit_of(request.query_params, 50))
    return {"health": health(live.home), "batches": [_batch(row) for row in batches]}


def _batch(row: dict[str, Any]) -> dict[str, Any]:
    return numbered_row({**row, **{name: json.loads(row[name]) if row[name] else None for name in _COUNTED}})


def generations(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List the generations of the lifecycle job, newest first."""
    record = load_generations(live.home.lifecycle)
    found = [record.known[number] for number in sorted(record.known, reverse=True)] or [live.home.generation()]
    return {
        "current": record.current,
        "generations": [asdict(one) for one in found[: queries.limit_of(request.query_params, 50)]],
    }


def quality(live: LiveFleet, request: Request) -> dict[str, Any]:
    """List the newest runs of data quality, with the results and the failed rows of the newest one."""
    limit = queries.limit_of(request.query_params, 10, _MOST_RUNS)
    return {
        "runs": [numbered_row(row) for row in quality_reports.quality_runs(live.home, limit)],
        "results": [numbered_row(row) for row in quality_reports.results_of(live.home, 1)],
        "failures": [numbered_row(row) for row in quality_reports.failed_rows(live.home, 1)],
    }


def _batch_columns() -> dict[str, Schema]:
    found = columns_of(STREAM_HEALTH.columns, [column.name for column in STREAM_HEALTH.columns])
    return {**found, **{name: optional(any_object(str(found[name]["description"]))) for name in _COUNTED}}


_LATE: Final = (
    "kind", "device_id", "message_kind", "seq", "event_time", "received_at", "late_by_ms", "reason", "site", "gateway",
    "judged_at", "messages", "event_time_until",
)  # fmt: skip
_QUARANTINE: Final = ("received_at", "topic", "reason", "detail", "payload_bytes", "messages")
_SHOWN: Final = frozenset({"received_at_ms", "payload", *_QUARANTINE})
_NUMBER: Final = whole("number of expectations")

OPERATIONS: Final = (
    Operation(
        "/late",
        "late",
        "List late messages, or messages that were not judged for another reason, newest first.",
        tables(late),
        obj({"messages": array(obj(columns_of(JUDGEMENTS.columns, _LATE, ("kind",))), "messages")}),
        parameters=(
            Parameter("kind", "kind of judgement", {**text("", _KINDS), "default": _KINDS[0]}),
            limited("messages, the newest"),
        ),
    ),
    Operation(
        "/quarantine",
        "quarantine",
        "List messages that could not be decoded, newest first.",
        tables(quarantine),
        obj(
            {
                "messages": array(
                    obj(
                        {
                            **columns_of(QUARANTINE.columns, _QUARANTINE),
                            "payload": text("beginning of the payload as text; bytes that are not UTF-8 are escaped"),
                        }
                    ),
                    "messages",
                )
            }
        ),
        parameters=(limited("messages, the newest"),),
        notes="Payloads and topics are data of unknown origin: escape them before you show them.",
    ),
    Operation(
        "/coverage",
        "coverage",
        "List coverage gaps: spans in which a bridge was not listening, newest first.",
        tables(coverage),
        obj({"gaps": array(GAP, "gaps")}),
        parameters=(
            Parameter("bridge", "name of the bridge", TEXT),
            Parameter("open", "whether to list open gaps only", {**flag(""), "default": False}),
            limited("gaps, the newest"),
        ),
    ),
    Operation(
        "/stream",
        "stream",
        "Show the health of the lifecycle job, and its newest batches.",
        tables(stream),
        obj({"health": HEALTH, "batches": array(obj(_batch_columns()), "batches, newest first")}),
        parameters=(limited("batches, the newest"),),
    ),
    Operation(
        "/generations",
        "generations",
        "List the generations of the lifecycle job, newest first.",
        tables(generations),
        obj(
            {
                "current": whole("number of the current generation"),
                "generations": array(
                    obj(
                        {
                            "number": whole("number"),
                            "key_groups": whole("number of key groups"),
                            "form": whole("version of the stored form"),
                            "made_by": text("command that created it"),
                            "made_from": any_object("source of its state"),
                            "made_at_ms": whole("time of its creation, epoch milliseconds; 0 if it is not recorded"),
                            "status": text("new, held, current, retired, discarded or pruned"),
                            "position": any_object("position at a switch; depends on the status"),
                            "asked_by": text("user or run that requested it; may be empty"),
                        }
                    ),
                    "generations",
                ),
            }
        ),
        parameters=(limited("generations, the newest"),),
    ),
    Operation(
        "/quality",
        "quality",
        "List the newest runs of data quality, with the results and the failed rows of the newest one.",
        tables(quality),
        obj(
            {
                "runs": array(
                    obj(
                        {
                            **columns_of(QUALITY_RESULTS.columns, ("run_id", "began_at", "subject")),
                            "suites": whole("number of suites"),
                            **dict.fromkeys(("passed", "failed", "skipped", "fault"), _NUMBER),
                            "first": optional(text("most severe failure")),
                        }
                    ),
                    "runs",
                ),
                "results": array(
                    obj(columns_of(QUALITY_RESULTS.columns, [column.name for column in QUALITY_RESULTS.columns])),
                    "results of the newest run",
                ),
                "failures": array(
                    obj(columns_of(QUALITY_FAILURES.columns, [column.name for column in QUALITY_FAILURES.columns])),
                    "failed rows of the newest run",
                ),
            }
        ),
        parameters=(limited("runs, the newest", 10, _MOST_RUNS),),
    ),
)
