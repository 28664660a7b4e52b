"""``fleet rewind``: the fleet, or one device's life, at an instant in the past.

History is shown as it is known now, or as it was known at an earlier instant.
"""

from collections import Counter
from shlex import quote
from typing import Annotated, Any

import typer

from cli.common.dry_run import DryRun, print_dry_run, tables_read
from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, RowsOption, check_mode
from cli.common.output import as_json, as_table, cell, console, instant_ms
from fleetpulse.core.errors import FleetError
from fleetpulse.core.times import END_OF_TIME_MS, format_duration, format_instant, parse_instant_ms
from fleetpulse.io.home.home import Home

_FLEET = ("device_id", "mode", "since", "trigger", "last_seen", "site", "device_class", "gateway")
_LIFE = ("since", "until", "for", "mode", "trigger", "reason")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rewind")(rewind)


def rewind(
    to: Annotated[str, typer.Option("--to", help="Instant to show, such as 2026-01-31T12:00:00Z.")],
    device: Annotated[str | None, typer.Option("--device", help="Show the life of this device up to that instant.")] = None,
    known: Annotated[str, typer.Option("--known", help="As known 'now', as known 'then', or as known at this instant.")] = "now",
    home: HomeOption = DEFAULT_HOME,
    mode: Annotated[str | None, typer.Option("--mode", help="Show only devices in this mode.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="Number of rows: first devices, or newest changes of a life.")] = 200,
    dry_run: DryOption = False,
    json_lines: RowsOption = False,
) -> None:
    """Show every device's mode at an instant, or the life of one device up to it.

    With --known, later judgements and amendments are left out: history is shown as it was known.
    """
    from fleetpulse.reports.history import time_travel as reports

    check_mode(mode)
    opened = Home(home)
    opened.record()
    moment = _moment(opened, parse_instant_ms(to), known)
    if dry_run:
        print_dry_run(_describe_dry_run(opened, device, moment), json_lines=json_lines)
        return
    rows = reports.fleet(opened, moment) if device is None else reports.life(opened, device, moment)
    if device is not None and not rows:
        raise FleetError(_why_no_history(opened, device, moment), code="rewind-device-unknown")
    rows = [row for row in rows if mode is None or row["mode"] == mode]
    if json_lines:
        as_json(rows)
        return
    if not rows and moment.known_ms != END_OF_TIME_MS:
        typer.echo(f"fleet: note: {_judged_when(opened, moment.known_ms)}", err=True)
    _show(device, moment, rows, last)


def _describe_dry_run(home: Home, device: str | None, moment: Any) -> DryRun:
    """Describe the tables that would be read.

    Raises:
        FleetError: the device was never registered or heard.
    """
    from fleetpulse.core.tables import DEVICES, JUDGEMENTS
    from fleetpulse.reports.judgements import require_known

    if device is not None:
        require_known(home, device)
    what = "every device's mode at" if device is None else f"the life of {device} up to"
    does = f"show {what} {format_instant(moment.at_ms)}, as {_knowledge(moment)}"
    return DryRun(does, tables_read(home, ((JUDGEMENTS, "event_time"), (DEVICES, "received_at"))))


def _moment(home: Home, at_ms: int, known: str) -> Any:
    """Check the requested instants; return them with the event time up to which rows were judged."""
    from fleetpulse.reports.moments import moment_of

    known_ms = END_OF_TIME_MS if known == "now" else at_ms if known == "then" else parse_instant_ms(known)
    return moment_of(home, at_ms, known_ms, ("--to", "--known"))


def _judged_when(home: Home, known_ms: int) -> str:
    from fleetpulse.reports.history.time_travel import judged_between

    first, final = judged_between(home)
    if first is None or final is None:
        return "nothing has been judged yet"
    if known_ms >= instant_ms(first):
        return f"by {format_instant(known_ms)}, nothing before --to had been judged"
    span = f"from {format_instant(instant_ms(first))} to {format_instant(instant_ms(final))}"
    return (
        f"by {format_instant(known_ms)}, nothing had been judged; this history was judged {span}; "
        f"omit --known, or use a later instant"
    )


def _why_no_history(home: Home, device: str, moment: Any) -> str:
    """Return the reason why a device has no history to show.

    Raises:
        FleetError: the device was never registered or heard.
    """
    from fleetpulse.reports import judgements as reports

    reports.require_known(home, device)
    changes = reports.transitions(home, device)
    if not changes:
        return f'no verdict about "{device}" has been emitted; to see why: ./fleet device {quote(device)} --home {home.path}'
    if moment.known_ms != END_OF_TIME_MS and instant_ms(changes[0]["event_time"]) <= moment.at_ms:
        return f'nothing about "{device}" was known then: {_judged_when(home, moment.known_ms)}'
    began = cell("event_time", changes[0]["event_time"])
    return f'"{device}" has no mode at {format_instant(moment.at_ms)}: its life begins at {began}; use that or a later instant'


def _knowledge(moment: Any) -> str:
    return "it is known now" if moment.known_ms == END_OF_TIME_MS else f"it was known at {format_instant(moment.known_ms)}"


def _show(device: str | None, moment: Any, rows: list[dict[str, Any]], last: int) -> None:
    shown = console()
    at = format_instant(moment.at_ms)
    knowledge = _knowledge(moment)
    if device is None:
        counts = Counter(row["mode"] for row in rows)
        modes = ", ".join(f"{count:,} {cell('mode', mode)}" for mode, count in counts.most_common()) or "no device"
        shown.print(f"the fleet at {at}, as {knowledge}: {modes}", highlight=False)
        if rows:
            shown.print(as_table(rows[:last], _FLEET, "devices"))
        if len(rows) > last:
            shown.print(f"first {last} of {len(rows):,} devices; use --last N for more, or --json for all")
    else:
        spans = [_of_life(span) for span in rows[-last:]]
        title = f"life of {device} up to {at}, as {knowledge}"
        shown.print(as_table(spans, _LIFE, title))
        if len(rows) > last:
            shown.print(f"newest {last} of {len(rows):,} changes; use --last N for more, or --json for all")
    if moment.judged_to_ms < moment.at_ms:
        reached = "nothing" if moment.judged_to_ms < 0 else f"up to {format_instant(moment.judged_to_ms)}"
        shown.print(f"judged by then: {reached}; later events are not included", highlight=False)


def _of_life(span: dict[str, Any]) -> dict[str, Any]:
    until = "then" if span["until_ms"] is None else _instant(span["until_ms"])
    whole_s = span["lasted_ms"] // 1000 * 1000
    lasted = format_duration(whole_s or span["lasted_ms"])
    return {**span, "since": _instant(span["since_ms"]), "until": until, "for": lasted}


def _instant(instant: int) -> str:
    return format_instant(instant).replace("T", " ").removesuffix("Z")
