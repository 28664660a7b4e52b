"""``fleet audit``: who changed what, when, from where, and with which result."""

import json
from typing import Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import show
from fleetpulse.core.times import parse_instant_ms
from fleetpulse.io.home.home import Home

_COLUMNS = ("began_at", "os_user", "asked_by", "from", "action", "arguments", "result", "duration_ms")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(audit)


def audit(
    home: HomeOption = DEFAULT_HOME,
    last: Annotated[int, typer.Option("--last", min=1, help="Number of newest actions to show.")] = 50,
    since: Annotated[str | None, typer.Option("--since", help="Show actions since this instant: 2026-01-31T12:00:00Z.")] = None,
    actor: Annotated[str | None, typer.Option("--actor", help="Show actions of this user.")] = None,
    action: Annotated[str | None, typer.Option("--action", help="Show this action; 'state' for all that begin with it.")] = None,
    json_lines: RowsOption = False,
) -> None:
    """List who changed what: grants, commands to devices, policies, state, approvals.

    An action without a result is unfinished: it still runs, or was killed.
    """
    from fleetpulse.reports.operations.audit import audited_actions

    opened = Home(home)
    opened.record()
    since_ms = None if since is None else parse_instant_ms(since)
    rows = audited_actions(opened, None if json_lines else last, since_ms=since_ms, actor=actor, action=action)
    shown = [{**row, "arguments": json.loads(row["arguments"])} for row in rows]
    if not json_lines:
        shown = [_as_text(row) for row in shown]
    show(shown, _COLUMNS, "audited actions", json_lines=json_lines)


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its arguments and its origin as texts."""
    arguments = " ".join(f"{name}={_value(value)}" for name, value in row["arguments"].items())
    origin = row["host"] + (f" ({row['address']})" if row["address"] else "")
    return {**row, "arguments": arguments, "from": origin}


def _value(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
