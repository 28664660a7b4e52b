"""``fleet device``: one device, and the commands that operators give about devices."""

import csv
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.messages import EVERYONE
from fleetpulse.core.policy import DEFAULT_CLASS
from fleetpulse.core.times import format_instant, parse_duration_ms, parse_instant_ms
from fleetpulse.io.commands import Command, spool
from fleetpulse.io.home import Home

HomeOption = Annotated[Path, typer.Option("--home", help="The folder that keeps everything.")]
DeviceArgument = Annotated[str, typer.Argument(help="Device id.")]
DEFAULT_HOME = Path(".fleet")


class _DeviceOrVerb(TyperGroup):
    """``fleet device ID`` shows a device; the other words are verbs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Read an unknown word as a device id."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


device = typer.Typer(cls=_DeviceOrVerb, no_args_is_help=True, help="One device: fleet device ID; or a command about it.")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.add_typer(device, name="device")


@device.command("show")
def show(
    device_id: DeviceArgument,
    home: HomeOption = DEFAULT_HOME,
    json_lines: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show a device: mode, last seen, due offline at, judged up to, and its life."""
    from cli.looking import show_device

    opened = Home(home)
    opened.record()
    show_device(opened, device_id, json_lines=json_lines)


def _give(home: Path, commands: list[Command], done: str) -> None:
    opened = Home(home)
    opened.record()
    spool(opened, commands)
    running = opened.owner() is not None
    typer.echo(done + ("" if running else "; it takes effect when the fleet runs (./fleet up)"))


def _registry(device_id: str, site: str, content: dict[str, Any]) -> Command:
    return f"fleet/{site}/{device_id}/registry", {key: value for key, value in content.items() if value is not None}


@device.command("add")
def add(
    device_id: DeviceArgument,
    site: Annotated[str, typer.Option("--site", help="Its site.")] = "main",
    device_class: Annotated[str, typer.Option("--class", help="Its class, which chooses its rules.")] = DEFAULT_CLASS,
    gateway: Annotated[str | None, typer.Option("--gateway", help="Through whom it comes.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Register a device, or change its class and site."""
    content = {"op": "add", "class": device_class, "gateway": gateway}
    _give(home, [_registry(device_id, site, content)], f'device "{device_id}" is registered')


@device.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="CSV with a header: device_id, and site, class, gateway where known.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Register devices from a CSV file: all of them, or none."""
    commands: list[Command] = []
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            if "device_id" not in (reader.fieldnames or ()):
                raise FleetError(f'"{file}" needs a header with device_id; got {", ".join(reader.fieldnames or ()) or "nothing"}')
            for row in reader:
                content = {
                    "op": "add",
                    "class": row.get("class") or DEFAULT_CLASS,
                    "gateway": row.get("gateway") or None,
                }
                commands.append(_registry(row["device_id"] or "", row.get("site") or "main", content))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FleetError(f'"{file}" cannot be read ({error})') from None
    if not commands:
        raise FleetError(f'"{file}" lists no devices')
    _give(home, commands, f"{len(commands)} devices are registered")


@device.command("decommission")
def decommission(device_id: DeviceArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Take a device out of service: its signals are counted, not judged."""
    _give(home, [_registry(device_id, EVERYONE, {"op": "decommission"})], f'device "{device_id}" is decommissioned')


@device.command("maintain")
def maintain(
    device_id: DeviceArgument,
    for_: Annotated[str | None, typer.Option("--for", help="For so long, such as 2h.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Until an instant, such as 2026-01-31T12:00:00Z.")] = None,
    update: Annotated[bool, typer.Option("--update", help="It is an update of its firmware.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Announce maintenance (or an update): silence does not count before its end."""
    if (for_ is None) == (until is None):
        raise Misuse("maintain needs --for or --until, and not both; write one such as --for 2h")
    now_ms = int(time.time() * 1000)
    until_ms = parse_instant_ms(until) if until else now_ms + parse_duration_ms(for_ or "0s")
    if until_ms <= now_ms:
        raise Misuse(f"the end of maintenance lies in the future; got {format_instant(until_ms)}")
    content = {"op": "update" if update else "maintain", "until": until_ms}
    topic = f"fleet/{EVERYONE}/{device_id}/control"
    _give(home, [(topic, content)], f'device "{device_id}" is held until {format_instant(until_ms)}')


@device.command("release")
def release(device_id: DeviceArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Release a flagged device."""
    _give(home, [(f"fleet/{EVERYONE}/{device_id}/control", {"op": "release"})], f'device "{device_id}" is released')
