"""``fleet sessions``: connection sessions of devices, with their durations and the reasons of their ends."""

from typing import Annotated, Any, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json, as_table, console, show
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.times import format_instant, parse_instant_ms
from fleetpulse.io.home.home import Home

_COLUMNS: Final = ("device_id", "site", "session", "started_at", "started_by", "ended_at", "ended_by", "duration_ms", "messages")
_SUMMARY: Final = ("ended_by", "sessions", "devices", "median_ms", "shortest_ms", "longest_ms")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sessions")(sessions)


def sessions(
    device: Annotated[str | None, typer.Argument(metavar="[DEVICE]", help="Id of the device; all devices without it.")] = None,
    only_open: Annotated[bool, typer.Option("--open", help="Show open sessions only.")] = False,
    last: Annotated[int, typer.Option("--last", min=1, help="Number of sessions: those with the newest start.")] = 50,
    since: Annotated[
        str | None, typer.Option("--since", help="Show sessions that were open at this instant or later: 2026-01-31T12:00:00Z.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
) -> None:
    """List the connection sessions of devices, with duration and reason of the end.

    The newest sessions come first. A summary gives the durations of all sessions by the reason of their end. The duration
    of an open session is that up to the newest message that the stream has read.
    """
    from fleetpulse.reports.streams import sessions as report
    from fleetpulse.settings import load_settings

    opened = Home(home)
    opened.record()
    since_ms = None if since is None else parse_instant_ms(since)
    rows = report.sessions(opened, device, only_open=only_open, since_ms=since_ms, last=None if json_lines else last + 1)
    if json_lines:
        as_json(rows)
        return
    shown, read_ms = console(), report.read_ms(opened)
    if read_ms is None:
        running = StreamName.SESSIONS in load_settings(opened.path).streams
        shown.print(_not_run(is_on=running), highlight=False)
        return
    left_out = f"newest {last:,} sessions" if len(rows) > last else ""
    show([_shown(row) for row in rows[:last]], _COLUMNS, "sessions", json_lines=False, left_out=left_out)
    if rows:
        found = report.by_reason(opened, device, only_open=only_open, since_ms=since_ms)
        shown.print(as_table(found, _SUMMARY, "durations by the reason of the end"))
    shown.print(f"read up to {format_instant(read_ms)}", highlight=False)


def _not_run(*, is_on: bool) -> str:
    if is_on:
        return "the stream sessions has read nothing yet; it starts with the lifecycle job"
    return 'the stream sessions is off; write streams = ["sessions"] into settings.toml, and restart the lifecycle job'


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "ended_by": row["ended_by"] or "(open)"}
