"""``fleet access``: who may speak to the broker, and about what."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json, console
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt import acl as rules
from fleetpulse.io.mqtt.acl import Role
from fleetpulse.io.mqtt.address import BrokerAddress, load_address
from fleetpulse.io.mqtt.broker import await_admission, renew_access

access = typer.Typer(no_args_is_help=True, help="Who may speak to the embedded broker, and about what.")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.add_typer(access, name="access")


@access.command("grant")
def grant(
    name: Annotated[str, typer.Argument(help="User name; a device's is its id.")],
    role: Annotated[Role, typer.Option("--role", help="A watcher hears everything, an operator also sends.")] = Role.DEVICE,
    speaks_for: Annotated[list[str] | None, typer.Option("--for", help="A gateway's devices; again for more.")] = None,
    nodes: Annotated[list[str] | None, typer.Option("--sparkplug", metavar="GROUP/NODE", help="As an edge node.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Let a device, a watcher or an operator in; the password is shown once. Again for a name: a new password."""
    Home(home).record()  # a home, and no name that was mistyped
    password = rules.grant(Home(home).broker, name, role, speaks_for or [], nodes or [])
    told = _renewed(home)
    # So that who uses the password at once is let in.
    if told and not await_admission(replace(load_address(Home(home).run("broker")), username=name, password=password)):
        told = f'; the broker has been told, but lets nobody in by it yet: look into "{Home(home).logs / "broker.log"}"'
    typer.echo(password)
    typer.echo(f'"{name}" may come in as {role}; the password is shown this once{told}', err=True)


@access.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="User name.")], home: HomeOption = DEFAULT_HOME) -> None:
    """Let someone in no longer, and close their connection."""
    Home(home).record()
    rules.revoke(Home(home).broker, name)
    typer.echo(f'"{name}" may come in no longer{_renewed(home)}', err=True)


@access.command("list")
def show(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False) -> None:
    """Show who may come in."""
    Home(home).record()
    rows: list[dict[str, Any]] = [
        {"name": one.name, "role": one.role.value, "speaks_for": [*one.devices, *one.nodes]}
        for one in rules.grants(Home(home).broker)
    ]
    if json_lines:
        as_json(rows)
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "role", "speaks for"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["role"], ", ".join(row["speaks_for"]))
    if rows:
        console().print(table)
    else:
        typer.echo("nobody but ourselves may come in; let a device in with: ./fleet access grant DEVICE_ID", err=True)


@access.command("rules")
def rules_for(
    mosquitto: Annotated[bool, typer.Option("--mosquitto", help="As an acl_file of Mosquitto; else as NATS has them.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Print the rules for a broker of your own; passwords are hashes, and ours is left out."""
    Home(home).record()
    known = rules.grants(Home(home).broker)
    ours = BrokerAddress("", 0, rules.OURS, "REPLACE-THIS")
    typer.echo(rules.mosquitto_rules(known) if mosquitto else rules.nats_rules(ours, known), nl=False)


def _renewed(home: Path) -> str:
    return "; the broker knows" if renew_access(Home(home).broker) else ""
