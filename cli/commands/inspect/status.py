"""The verbs that look: what came of the messages."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from heapq import nlargest
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
    measure,
    plain_row,
    show,
)
from cli.supervisor.progress import judged_ms, troubles
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.home.services import runs, services
from fleetpulse.io.system.process import read_status
from fleetpulse.io.system.wall_clock import wall_clock_ms

if TYPE_CHECKING:
    from rich.console import Console

LastOption = Annotated[int, typer.Option("--last", min=1, help="So many rows, the newest.")]

_NEVER = datetime.min.replace(tzinfo=UTC)
_SLACK = timedelta(minutes=2)  # between judging and having written: of several who write, one may be faster
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
    """Add the verbs."""
    app.command("status")(status)
    app.command("devices")(devices)
    app.command("transitions")(transitions)
    app.command("late")(late)
    app.command("quarantine")(quarantine)
    app.command("listen")(listen)


def _opened(home: Path) -> Home:
    opened = Home(home)
    opened.record()  # says so where there is no fleet
    return opened


def status(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False) -> None:
    """Show devices by mode, counts, and how far everything is."""
    show_status(_opened(home), json_lines=json_lines)


def status_facts(home: Home) -> dict[str, Any]:
    """Return what `fleet status` shows."""
    from fleetpulse.reports import devices as present
    from fleetpulse.reports import judgements as reports

    judged = judged_ms(home)
    known = None if judged is None else reports.shards(home, judged)
    frontier_ms = known.frontier_ms if known is not None else reports.frontier_ms(home, judged)
    facts = present.counts(home, frontier_ms)
    facts["clocks"] = present.clocks(home)
    facts["judged_received_at_ms"] = judged
    facts["frontier_ms"] = frontier_ms
    facts["held_back"] = reports.held_back(known) if known is not None else []
    facts["health"] = reports.health(home)
    running = {
        name: status
        for name in (*map(bridge_job, home.bridges()), "landing", "lifecycle", "simulator")
        if (status := read_status(home.run(name))) and runs(home, name)
    }
    facts["processes"] = {name: status.get("state", "running") for name, status in running.items()}
    facts["troubles"] = {name: words for name, status in running.items() if (words := troubles(status))}
    facts["services"] = list(services(home))
    return facts


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
        shown.print(f"clocks that are not right: {clocks}  (fleet devices shows which)")
    became = ", ".join(f"{count:,} times {mode}" for mode, count in facts["transitions"].items()) or "none"
    shown.print(f"transitions: {became}")
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
    told = {name: ", ".join([str(state), *facts["troubles"].get(name, ())]) for name, state in facts["processes"].items()}
    running = ", ".join(f"{name} ({words})" for name, words in told.items())
    shown.print(f"running: {running or 'nothing'}")
    if facts["services"]:
        shown.print(f"as services: {', '.join(facts['services'])}")
    _show_health(shown, facts["health"])


_CLOCKS = {"late": "behind, or with messages held up", "invalid": "not set", "ahead": "ahead", "behind": "not set, or set back"}
_RATING_COLOURS = {"good": "green", "warning": "yellow", "critical": "red"}


def _show_health(shown: "Console", health: dict[str, Any] | None) -> None:
    if health is None:
        shown.print("health of the lifecycle job: no batch yet")
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
    parts = f"batch {newest['batch_id']} of {newest['began_at']}: {newest['batch_ms']:,} ms{_parts_of(newest)}"
    if newest["input_rows"] is not None:
        parts += f" for {newest['input_rows']:,} rows"
    if newest["input_rows_per_s"] is not None:
        parts += f", {newest['input_rows_per_s']:,.0f} a second came in"
    late = "" if newest["rows_late"] is None else f"; {newest['rows_late']:,} rows late"
    shown.print(f"{parts}{late}; {newest['state_rows']:,} values in the state")


_PARTS = {"looking for rows": "latest_offset_ms", "planning": "query_planning_ms", "judging and writing": "add_batch_ms"}


def _parts_of(batch: Mapping[str, Any]) -> str:
    """Say what most of a batch's time went into."""
    known = [f"{name} {batch[column]:,}" for name, column in _PARTS.items() if batch[column] is not None]
    return f" ({', '.join(known)})" if known else ""


def devices(
    home: HomeOption = DEFAULT_HOME,
    mode: Annotated[str | None, typer.Option("--mode", help="Only devices in this mode.")] = None,
    json_lines: RowsOption = False,
    last: Annotated[int, typer.Option("--last", min=1, help="So many devices, those whose mode changed last.")] = 200,
) -> None:
    """List devices with their mode, since when, and when they were last heard."""
    from fleetpulse.reports import devices as present
    from fleetpulse.reports import judgements as reports

    opened = _opened(home)
    check_mode(mode, "unjudged")
    rows = present.devices(opened, reports.frontier_ms(opened, judged_ms(opened)), mode)
    columns = ("device_id", "mode", "since", "last_seen", "site", "device_class", "transitions", "messages", "clock", "reason")
    left_out = f"the {last:,} of {len(rows):,} whose mode changed last" if len(rows) > last else ""
    show(rows if json_lines else _changed_last(rows, last), columns, "devices", json_lines=json_lines, left_out=left_out)


def _changed_last(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return so many devices as changed their mode last, in the order in which they came."""
    if len(rows) <= count:
        return rows
    newest = nlargest(count, enumerate(rows), key=lambda each: (each[1]["since"] or _NEVER, -each[0]))
    return [row for _, row in sorted(newest, key=lambda each: each[0])]


def transitions(
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
    last: LastOption = 50,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="Of this device only.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="What was judged, and what amendments took back and added, row by row.")
    ] = False,
) -> None:
    """List mode changes, in order of event time, as far as is known by now; --all with what was taken back."""
    from fleetpulse.reports import judgements as reports

    opened = _opened(home)
    before = _judged_lately(opened, None) if follow else []
    rows = reports.transitions(opened, device, None if json_lines else last, everything=everything)
    if device is not None and not rows and not follow:
        reports.require_known(opened, device)
    columns = ("kind", "amendment_no", *TRANSITION_COLUMNS) if everything else TRANSITION_COLUMNS
    show(rows, columns, "transitions", json_lines=json_lines)
    if follow:
        _follow(opened, [*before, *rows], device, json_lines=json_lines)


def _id(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["device_id"], row["life"], row["transition_no"], row["amendment_no"]


def _judged_lately(home: Home, newest: datetime | None) -> list[dict[str, Any]]:
    """Return what was judged up to `_SLACK` before the newest: who judges later may be done with writing sooner."""
    from fleetpulse.reports import judgements as reports

    newest = newest or reports.newest_judged_at(home)
    return reports.transitions_since(home, None if newest is None else newest - _SLACK)


def _follow(home: Home, told: list[dict[str, Any]], device: str | None, *, json_lines: bool) -> None:
    from fleetpulse.io.tables import tables

    shown = console()
    seen = {_id(row): row["judged_at"] or _NEVER for row in told}
    judgements, looked_at = home.table(JUDGEMENTS.name), -1
    try:
        while True:
            time.sleep(1)
            if not holds_table(judgements) or (version := tables.version(judgements)) == looked_at:
                continue  # what was judged lately may be a million rows, and stays lately for as long as nothing is judged
            looked_at = version
            newest = max((at for at in seen.values() if at != _NEVER), default=None)
            fresh = _judged_lately(home, newest)
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
                    words = (cell(name, row[name]) for name in ("event_time", "device_id", "from_mode", "to_mode", "trigger"))
                    shown.print("  ".join(words))
    except KeyboardInterrupt:
        return


def late(
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
    last: LastOption = 50,
    kind: Annotated[_Unjudged, typer.Option("--kind", help="What else was not judged: of this kind, or all.")] = _Unjudged.LATE,
) -> None:
    """List messages that came when their time had been judged; with --kind, whatever else was not judged, and why."""
    from fleetpulse.reports import judgements as reports

    rows = reports.unjudged(_opened(home), None if kind is _Unjudged.ALL else kind.value, None if json_lines else last)
    columns = ("received_at", "kind", "device_id", "message_kind", "seq", "event_time", "late_by_ms", "reason")
    shown = columns if kind is _Unjudged.ALL else tuple(name for name in columns if name != "kind")
    title = "late messages" if kind is _Unjudged.LATE else f"not judged: {kind.value.replace('_', ' ')}"
    show(rows, shown, title, json_lines=json_lines)


def quarantine(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False, last: LastOption = 50) -> None:
    """List messages that could not be decoded, with the reason and the raw payload."""
    from fleetpulse.reports import judgements as reports

    rows = reports.quarantine(_opened(home), None if json_lines else last)
    shown = rows if json_lines else [{**row, "payload": row["payload"][:60]} for row in rows]
    show(shown, ("received_at", "topic", "reason", "detail", "payload"), "quarantine", json_lines=json_lines)


def show_device(home: Home, device_id: str, *, json_lines: bool) -> None:
    """Print how a device stands, and its life.

    Raises:
        FleetError: nobody has heard of it, or nothing of it was judged yet.
    """
    from fleetpulse.reports import judgements as reports

    standing = reports.standing(home, device_id, judged_ms(home))
    if standing is None:
        reports.require_known(home, device_id)
        raise FleetError(
            f'nothing was judged yet of "{device_id}"; see how far the job is: ./fleet status --home {home.path}',
            code="device-not-judged",
        )
    if json_lines:
        away = [plain_row(one) for one in standing.retracted_offline]
        as_json([{**standing.summary, "timeline": [plain_row(row) for row in standing.transitions], "retracted_offline": away}])
        return
    shown = console()
    for name, value in standing.summary.items():
        if value is None or value is False or name == "device_id":
            continue
        if name.endswith("_ms") and name not in DURATIONS:
            name, value = name.removesuffix("_ms"), f"{format_instant(value)}  {_from_now(value)}"
        else:
            if hasattr(value, "timestamp"):
                value = f"{cell(name, value)}  {_from_now(instant_ms(value))}"
            value = cell(name, value)
        shown.print(f"{name.removesuffix('_ms').replace('_', ' '):>18}  {value}", highlight=False)
    shown.print(as_table(standing.transitions[-50:], _LIFE_COLUMNS, f"life of {device_id}, the newest 50 changes"))
    if standing.retracted_offline:
        spans = [{name: one[name] and format_instant(one[name]) for name in one} for one in standing.retracted_offline[-50:]]
        title = "retracted offline: judged offline, and alive as late messages show"
        shown.print(as_table(spans, ("since_ms", "until_ms"), title))


def _from_now(instant: int) -> str:
    away = instant - wall_clock_ms()
    words = format_duration(abs(away) // 1000 * 1000)
    return f"(in {words})" if away > 0 else f"({words} ago)"


def listen(
    home: HomeOption = DEFAULT_HOME,
    topic: Annotated[str, typer.Option("--topic", help="An MQTT topic filter.")] = "#",
    for_s: Annotated[float, typer.Option("--for", min=1, help="So many seconds.")] = 3600.0,
    last: Annotated[
        int, typer.Option("--last", min=0, help="First so many that came before, where all topics are asked for.")
    ] = 5,
    json_lines: RowsOption = False,
) -> None:
    """Show messages as they come, on any topic, and what becomes of each; a message that waits is shown again when it is judged.

    The bridge's own canaries are left out where all topics are asked for; --topic fleet/_/+/tick shows them.
    """
    from cli.commands.inspect.listen import listen as run

    run(_opened(home), topic, for_s, last, json_lines=json_lines)
