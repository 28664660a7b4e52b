"""``fleet status``, and the other views of the current results.

Registers also ``devices``, ``transitions``, ``late``, ``quarantine`` and ``listen``.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption, check_mode
from cli.common.output import (
    DURATIONS,
    TRANSITION_COLUMNS,
    as_json,
    as_table,
    cell,
    console,
    instant_ms,
    plain_row,
    show,
)
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.monitoring.health import measure
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.embedded import broker_log
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.tables import one_instance

if TYPE_CHECKING:
    from rich.console import Console

LastOption = Annotated[int, typer.Option("--last", min=1, help="Number of newest rows to show.")]

_NEVER = datetime.min.replace(tzinfo=UTC)
_SLACK = timedelta(minutes=2)  # maximum time from judging to writing; parallel writers differ in speed
_LIST_THEM = ("  (why: fleet late --kind all)", "")

_LIFE_COLUMNS = ("event_time", "transition_no", "from_mode", "to_mode", "trigger", "runtime_ms", "life")


class _Unjudged(StrEnum):
    LATE = JudgementKind.LATE.value
    CLOCK = JudgementKind.CLOCK.value
    IDENTITY_CONFLICT = JudgementKind.IDENTITY_CONFLICT.value
    DUPLICATE = JudgementKind.DUPLICATE.value
    AFTER_DECOMMISSION = JudgementKind.AFTER_DECOMMISSION.value
    UNKNOWN_DEVICE = JudgementKind.UNKNOWN_DEVICE.value
    REFUSED = JudgementKind.REFUSED.value
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("devices")(devices)
    app.command("transitions")(transitions)
    app.command("late")(late)
    app.command("quarantine")(quarantine)
    app.command("listen")(listen)


def _opened(home: Path) -> Home:
    opened = Home(home)
    opened.record()  # raises if there is no fleet
    return opened


def status(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False) -> None:
    """Show devices by mode, message counts, the frontier, and the jobs' health.

    The exit code does not depend on the health.
    """
    show_status(_opened(home), json_lines=json_lines)


def status_facts(home: Home) -> dict[str, Any]:
    """Return the facts that `fleet status` shows, by name."""
    from fleetpulse.reports import frontiers
    from fleetpulse.reports import judgements as reports
    from fleetpulse.reports.operations.stream import running
    from fleetpulse.reports.present import devices as present

    judged = judged_ms(home.checkpoint)
    known = None if judged is None else frontiers.shards(home, judged)
    frontier_ms = known.frontier_ms if known is not None else frontiers.frontier_ms(home, judged)
    facts = present.counts(home, frontier_ms)
    facts["judged_received_at_ms"] = judged
    facts["frontier_ms"] = frontier_ms
    facts["held_back"] = frontiers.sites_behind(known) if known is not None else []
    facts["health"] = reports.health(home)
    return {**facts, **running(home)}


def show_status(home: Home, *, json_lines: bool) -> None:
    """Print the status of a home."""
    facts = status_facts(home)
    if json_lines:
        as_json([facts])
        return
    shown = console()
    modes = [{"mode": mode, "devices": count} for mode, count in facts["devices"].items()]
    shown.print(as_table(modes, ("mode", "devices"), "devices by mode") if modes else "devices by mode: none yet")
    if facts["never_seen"]:
        shown.print(f"offline and never seen: {facts['never_seen']:,}")
    if facts["clocks"]:
        clocks = ", ".join(f"{count:,} {_CLOCKS[trust]}" for trust, count in facts["clocks"].items())
        shown.print(f"devices with a wrong clock: {clocks}  (list them: fleet devices)")
    transitions = ", ".join(f"{count:,} to {mode}" for mode, count in facts["transitions"].items()) or "none"
    shown.print(f"transitions: {transitions}")
    others = {kind: count for kind, count in facts["judgements"].items() if kind != "transition"}
    shown.print(
        "not judged: " + (", ".join(f"{count:,} {kind}" for kind, count in others.items()) or "none") + _LIST_THEM[not others]
    )
    if facts["amended"]:
        shown.print("amended: " + ", ".join(f"{count:,} {kind}" for kind, count in facts["amended"].items()))
    refused = ", ".join(f"{count:,} {reason}" for reason, count in facts["quarantine"].items()) or "none"
    shown.print(f"messages: {facts['messages']:,} landed; quarantined: {refused}")
    for label, name in (("newest received", "newest_received_at_ms"), ("judged up to (frontier)", "frontier_ms")):
        shown.print(f"{label}: {format_instant(facts[name]) if facts[name] is not None else 'nothing yet'}")
    for one in facts["held_back"]:
        sites, bridges = "all other sites" if one["sites"] is None else ", ".join(one["sites"]), ", ".join(one["bridges"])
        reached = "not judged yet" if one["frontier_ms"] is None else f"judged up to {format_instant(one['frontier_ms'])}"
        shown.print(f"held back: {sites}: {reached}; not listening: {bridges}")
    states = {name: ", ".join([str(state), *facts["troubles"].get(name, ())]) for name, state in facts["processes"].items()}
    running = ", ".join(f"{name} ({state_text})" for name, state_text in states.items())
    shown.print(f"running: {running or 'nothing'}")
    if refusals := broker_log.refusals_of(facts["broker"]):
        shown.print(f"{refusals}; see logs/broker.log", markup=False, highlight=False)
    if facts["services"]:
        shown.print(f"running as services: {', '.join(facts['services'])}")
    for one in facts["takeovers"]:
        ends = f"newest from {one['address']}, replaced {one['replaced_address']}"
        shown.print(f"client id {one['client_id']} taken over {one['times']:,} times in an hour: {ends}", markup=False)
    _show_health(shown, facts["health"])


_CLOCKS = {"late": "behind, or with delayed messages", "invalid": "not set", "ahead": "ahead", "behind": "not set, or set back"}
_RATING_COLOURS = {"good": "green", "warning": "yellow", "critical": "red"}


def _show_health(shown: "Console", health: dict[str, Any] | None) -> None:
    if health is None:
        shown.print("health of the lifecycle job: no batches yet")
        return
    rows = [
        {
            "metric": one["metric"],
            "rating": one["rating"] and f"{one['rating']}",
            **{name: measure(one["column"], one[name]) for name in ("value", "worst", "good_below", "critical_above")},
        }
        for one in health["rated"]
    ]
    worst = f"worst of {health['batches']}"
    table = as_table(
        [{**row, worst: row["worst"]} for row in rows],
        ("metric", "rating", "value", worst, "good_below", "critical_above"),
        "health of the lifecycle job",
        colours={"rating": _RATING_COLOURS},
    )
    newest = health["newest"]
    shown.print(table)
    parts = f"batch {newest['batch_id']}, started {newest['began_at']}: {newest['batch_ms']:,} ms{_parts_of(newest)}"
    if newest["input_rows"] is not None:
        parts += f" for {newest['input_rows']:,} rows"
    if newest["input_rows_per_s"] is not None:
        parts += f", input {newest['input_rows_per_s']:,.0f} rows per second"
    late = "" if newest["rows_late"] is None else f"; {newest['rows_late']:,} rows late"
    shown.print(f"{parts}{late}; state: {newest['state_rows']:,} values")


_PARTS = {"finding new rows": "latest_offset_ms", "planning": "query_planning_ms", "judging and writing": "add_batch_ms"}


def _parts_of(batch: Mapping[str, Any]) -> str:
    """Format the durations of a batch's main phases."""
    known = [f"{name} {batch[column]:,}" for name, column in _PARTS.items() if batch[column] is not None]
    return f" ({', '.join(known)})" if known else ""


def devices(
    home: HomeOption = DEFAULT_HOME,
    mode: Annotated[str | None, typer.Option("--mode", help="Show only devices in this mode.")] = None,
    json_lines: RowsOption = False,
    last: Annotated[int, typer.Option("--last", min=1, help="Number of devices: those with the newest mode changes.")] = 200,
) -> None:
    """List devices with their mode, its start, and the time of the last signal."""
    from fleetpulse.reports import frontiers
    from fleetpulse.reports.present import devices as present

    opened = _opened(home)
    check_mode(mode, "unjudged")
    frontier_ms = frontiers.frontier_ms(opened, judged_ms(opened.checkpoint))
    columns = ("device_id", "mode", "since", "last_seen", "site", "device_class", "transitions", "messages", "clock", "reason")
    if json_lines:
        rows = present.devices(opened, frontier_ms, mode)
        count = len(rows)
    else:
        rows, count = present.newest_devices(opened, frontier_ms, mode, last)
    left_out = f"{last:,} of {count:,} devices, those with the newest mode changes" if count > len(rows) else ""
    show(rows, columns, "devices", json_lines=json_lines, left_out=left_out)


def transitions(
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
    last: LastOption = 50,
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new transitions until Ctrl-C.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="Show only this device.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show transitions as first emitted, and all retractions and additions.")
    ] = False,
) -> None:
    """List mode changes in order of event time, with amendments applied."""
    from fleetpulse.reports import judgements as reports

    opened = _opened(home)
    before = _recently_judged(opened, None) if follow else []
    rows = reports.transitions(opened, device, None if json_lines else last, everything=everything)
    if device is not None and not rows and not follow:
        reports.require_known(opened, device)
    columns = ("kind", "amendment_no", *TRANSITION_COLUMNS) if everything else TRANSITION_COLUMNS
    show(rows, columns, "transitions", json_lines=json_lines)
    if follow:
        _follow(opened, [*before, *rows], device, json_lines=json_lines)


def _id(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["device_id"], row["life"], row["transition_no"], row["amendment_no"]


def _recently_judged(home: Home, newest: datetime | None) -> list[dict[str, Any]]:
    """Return the transitions judged since `_SLACK` before the newest one.

    Parallel writers can commit out of order: a row judged later may be written earlier.
    """
    from fleetpulse.reports import judgements as reports

    newest = newest or reports.newest_judged_at(home)
    return reports.transitions_since(home, None if newest is None else newest - _SLACK)


def _follow(home: Home, shown_rows: list[dict[str, Any]], device: str | None, *, json_lines: bool) -> None:
    from fleetpulse.io.tables import tables

    shown = console()
    seen = {_id(row): row["judged_at"] or _NEVER for row in shown_rows}
    judgements, seen_version = home.table(JUDGEMENTS.name), -1
    try:
        while True:
            time.sleep(1)
            if not holds_table(judgements) or (version := tables.version(judgements)) == seen_version:
                continue  # there may be a million recent rows, so read them only after new judgements
            seen_version = version
            newest = max((at for at in seen.values() if at != _NEVER), default=None)
            fresh = _recently_judged(home, newest)
            seen = {one: at for one, at in seen.items() if newest is None or at >= newest - _SLACK}
            for row in fresh:
                if _id(row) in seen:
                    continue
                seen[_id(row)] = row["judged_at"] or _NEVER
                if device is not None and row["device_id"] != device:
                    continue
                if json_lines:
                    as_json([row])
                else:
                    cells = (cell(name, row[name]) for name in ("event_time", "device_id", "from_mode", "to_mode", "trigger"))
                    shown.print("  ".join(cells))
    except KeyboardInterrupt:
        return


def late(
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
    last: LastOption = 50,
    kind: Annotated[_Unjudged, typer.Option("--kind", help="Kind of messages to list.")] = _Unjudged.LATE,
) -> None:
    """List late messages, or messages not judged for another reason (--kind).

    A message is late if the frontier has passed its event time when it arrives. A row with a number
    of messages stands for several of one minute, from the least event time on.
    """
    from fleetpulse.reports import judgements as reports

    rows = reports.unjudged(_opened(home), None if kind is _Unjudged.ALL else kind.value, None if json_lines else last)
    columns = ("received_at", "kind", "device_id", "message_kind", "seq", "event_time", "late_by_ms", "messages", "reason")
    shown = columns if kind is _Unjudged.ALL else tuple(name for name in columns if name != "kind")
    title = "late messages" if kind is _Unjudged.LATE else f"not judged: {kind.value.replace('_', ' ')}"
    show(rows, shown, title, json_lines=json_lines)


def quarantine(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False, last: LastOption = 50) -> None:
    """List messages that could not be decoded, with the reason and the beginning of the payload.

    A row of a flood stands for several messages.
    """
    from fleetpulse.reports import judgements as reports

    rows = reports.quarantine(_opened(home), None if json_lines else last)
    shown = rows if json_lines else [{**row, "payload": row["payload"][:60]} for row in rows]
    columns = ("received_at", "topic", "reason", "detail", "messages", "payload_bytes", "payload")
    show(shown, columns, "quarantine", json_lines=json_lines)


def show_device(home: Home, device_id: str, *, json_lines: bool) -> None:
    """Print the status of a device, and the transitions of its life.

    Raises:
        FleetError: the device was never registered or heard, or has not been judged yet.
    """
    from fleetpulse.reports import judgements as reports

    with one_instance():
        status = reports.require_status(home, device_id, judged_ms(home.checkpoint))
    if json_lines:
        retracted = [plain_row(one) for one in status.retracted_offline]
        as_json([{**status.summary, "timeline": [plain_row(row) for row in status.transitions], "retracted_offline": retracted}])
        return
    shown = console()
    for name, value in status.summary.items():
        if value is None or value is False or name == "device_id":
            continue
        if name.endswith("_ms") and name not in DURATIONS:
            name, value = name.removesuffix("_ms"), f"{format_instant(value)}  {_from_now(value)}"
        else:
            if hasattr(value, "timestamp"):
                value = f"{cell(name, value)}  {_from_now(instant_ms(value))}"
            value = cell(name, value)
        shown.print(f"{name.removesuffix('_ms').replace('_', ' '):>18}  {value}", highlight=False)
    shown.print(as_table(status.transitions[-50:], _LIFE_COLUMNS, f"life of {device_id}, newest 50 transitions"))
    if status.retracted_offline:
        spans = [{name: one[name] and format_instant(one[name]) for name in one} for one in status.retracted_offline[-50:]]
        title = "retracted offline: judged offline, but alive according to late messages"
        shown.print(as_table(spans, ("since_ms", "until_ms"), title))


def _from_now(instant: int) -> str:
    distance_ms = instant - wall_clock_ms()
    text = format_duration(abs(distance_ms) // 1000 * 1000)
    return f"(in {text})" if distance_ms > 0 else f"({text} ago)"


def listen(
    home: HomeOption = DEFAULT_HOME,
    topic: Annotated[str, typer.Option("--topic", help="MQTT topic filter.")] = "#",
    for_s: Annotated[float, typer.Option("--for", min=1, help="Stop after this many seconds.")] = 3600.0,
    last: Annotated[int, typer.Option("--last", min=0, help="First show this many earlier messages; only without --topic.")] = 5,
    json_lines: RowsOption = False,
) -> None:
    """Show messages as they arrive, on any topic, and the result of each.

    A pending message is shown again when it has been judged. Canary messages of the bridge are left
    out; show them with --topic fleet/_/+/tick.
    """
    from cli.commands.inspect.listen import listen as run

    run(_opened(home), topic, for_s, last, json_lines=json_lines)
