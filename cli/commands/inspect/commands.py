"""``fleet commands`` and ``fleet twin``: commands to devices with their answers, and the states of a device."""

import json
from typing import Annotated, Any, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption, RowsOption
from cli.common.output import as_json, as_table, console
from fleetpulse.core.streams.commands import CommandStatus
from fleetpulse.core.streams.names import StreamName
from fleetpulse.io.home.home import Home
from fleetpulse.reports.plain import plain_row

_COLUMNS: Final = ("sent_at", "device_id", "command_id", "name", "status", "answered_at", "latency_ms", "reason")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("commands")(commands)
    app.command("twin")(twin)


def commands(
    device_id: Annotated[str | None, typer.Argument(help="Show only commands to this device.")] = None,
    status: Annotated[CommandStatus | None, typer.Option("--status", help="Show only commands in this state.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="Number of commands, the newest.")] = 50,
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
) -> None:
    """List commands to devices, each with its state and answer.

    The list has answers without a command, too: their state is unmatched.
    """
    from fleetpulse.reports.streams import commands as reports

    opened = Home(home)
    opened.record()
    rows = reports.commands(opened, device_id, status, None if json_lines else last)
    if json_lines:
        as_json(rows)
        return
    _note_if_off(opened)
    console().print(as_table(rows, _COLUMNS, "commands"))


def twin(
    device_id: Annotated[str, typer.Argument(help="Device id.")],
    home: HomeOption = DEFAULT_HOME,
    json_lines: JsonOption = False,
) -> None:
    """Show the desired and the reported state of a device, and their difference."""
    from fleetpulse.reports.judgements import require_known
    from fleetpulse.reports.streams import twin as reports

    opened = Home(home)
    opened.record()
    require_known(opened, device_id)
    found = reports.twin(opened, device_id)
    states: dict[str, Any] = {name: getattr(found, name) for name in ("desired", "reported", "difference", "metrics")}
    if json_lines:
        shown = {"device_id": device_id, **states, "commands": [plain_row(row) for row in found.commands]}
        typer.echo(json.dumps(shown, ensure_ascii=False))
        return
    _note_if_off(opened)
    for name, state in states.items():
        typer.echo(f"{name}: {json.dumps(state, ensure_ascii=False)}")
    console().print(as_table(found.commands, _COLUMNS, "pending and newest commands"))


def _note_if_off(home: Home) -> None:
    from fleetpulse.settings import load_settings

    if StreamName.COMMANDS not in load_settings(home.path).streams:
        setting = f'streams = ["{StreamName.COMMANDS}"]'
        typer.echo(f"fleet: note: the stream {StreamName.COMMANDS} is off, so no answers are joined; set {setting}", err=True)
