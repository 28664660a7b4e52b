"""``fleet access``: users of the embedded broker, and the topics each may use."""

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

access = typer.Typer(no_args_is_help=True, help="Manage users of the embedded broker, and their topics.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(access, name="access")


@access.command("grant")
def grant(
    name: Annotated[str, typer.Argument(help="User name; for a device, its id.")],
    role: Annotated[Role, typer.Option("--role", help="watcher: read all topics; operator: also publish.")] = Role.DEVICE,
    speaks_for: Annotated[
        list[str] | None, typer.Option("--for", help="Device that a gateway publishes for; repeatable.")
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option("--sparkplug", metavar="GROUP/NODE", help="Sparkplug edge node; repeatable.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Grant a device, a watcher or an operator access to the broker.

    The password is shown only once. For an existing name, a new password replaces the old one.
    """
    Home(home).record()  # raises if there is no fleet, for example after a typing error
    password = rules.grant(Home(home).broker, name, role, speaks_for or [], nodes or [])
    note = _renewed(home)
    # Wait until the broker accepts the password, so that it can be used at once.
    if note and not await_admission(replace(load_address(Home(home).run("broker")), username=name, password=password)):
        note = f'; the broker has the new rules, but does not accept the password yet: see "{Home(home).logs / "broker.log"}"'
    typer.echo(password)
    typer.echo(f'"{name}" has access as {role}; the password is not shown again{note}', err=True)


@access.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="User name.")], home: HomeOption = DEFAULT_HOME) -> None:
    """Revoke a user's access to the broker, and close its connection."""
    Home(home).record()
    rules.revoke(Home(home).broker, name)
    typer.echo(f'access of "{name}" is revoked{_renewed(home)}', err=True)


@access.command("list")
def show(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False) -> None:
    """List the users of the broker, with their roles and devices."""
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
        typer.echo("only the fleet itself has access; grant a device access with: ./fleet access grant DEVICE_ID", err=True)


@access.command("rules")
def rules_for(
    mosquitto: Annotated[bool, typer.Option("--mosquitto", help="Print a Mosquitto acl_file, not a NATS configuration.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Print the access rules in the format of another broker.

    Passwords are hashes; the password of the fleet itself is left out.
    """
    Home(home).record()
    known = rules.grants(Home(home).broker)
    service = BrokerAddress("", 0, rules.SERVICE_USER, "REPLACE-THIS")
    typer.echo(rules.mosquitto_rules(known) if mosquitto else rules.nats_rules(service, known), nl=False)


def _renewed(home: Path) -> str:
    return "; the broker has applied it" if renew_access(Home(home).broker) else ""
