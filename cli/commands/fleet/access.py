"""``fleet access``: users of the embedded broker, and the topics each may use."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json, as_markup, console
from cli.common.output import show as show_rows
from cli.common.policy_files import load_mappings
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt import acl as rules
from fleetpulse.io.mqtt.acl import Role
from fleetpulse.io.mqtt.address import BrokerAddress, load_address
from fleetpulse.io.mqtt.embedded.broker import await_admission, renew_access
from fleetpulse.io.mqtt.embedded.takeovers import read_takeovers

access = typer.Typer(no_args_is_help=True, help="Manage users of the embedded broker, and their topics.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(access, name="access")


@access.command("grant")
def grant(
    name: Annotated[str, typer.Argument(help="User name; for a device, its id or SITE/ID.")],
    role: Annotated[Role, typer.Option("--role", help="watcher: read all topics; operator: also publish.")] = Role.DEVICE,
    publishes_for: Annotated[
        list[str] | None,
        typer.Option("--for", metavar="DEVICE", help="Device that a gateway publishes for, ID or SITE/ID; repeatable."),
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option("--sparkplug", metavar="GROUP/NODE", help="Sparkplug edge node; repeatable.")
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="FILTER", help="Topics on which a gateway publishes for any device; repeatable."),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            "--certificate", metavar="SUBJECT", help="Certificate instead of a password: CN=pump-1,O=Acme, or a name in it."
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Grant a device, a watcher or an operator access to the broker.

    An id alone holds at any site, SITE/ID at that site only. The password is shown only once. For an
    existing name, a new password or certificate replaces the old one.
    """
    identity = Home(home).identity()  # raises if there is no fleet, for example after a typing error
    what = (publishes_for or [], nodes or [], topics or [], identity)
    advice = f"connect with a client id that others cannot guess, such as {rules.suggested_client_id(name)}"
    if certificate is not None:
        rules.grant_certificate(Home(home).broker, name, role, certificate, *what)
        note = _renewed(home)
        from fleetpulse.settings import load_settings  # takes 0.1 s

        if not load_settings(home).broker_client_authority:
            note += "; the broker uses certificates only with the setting broker_client_authority"
        typer.echo(f'"{name}" has access as {role} with the certificate "{certificate}"{note}; {advice}', err=True)
        return
    password = rules.grant(Home(home).broker, name, role, *what)
    note = _renewed(home)
    # Wait until the broker accepts the password, so that it can be used at once.
    address = load_address(Home(home).run("broker")) if note else None
    if address is not None and address.tls is not None and address.tls.cert:  # this process has no certificate of that user
        note += "; the user also needs a certificate with its name as DNS name or e-mail address"
    elif address is not None and not await_admission(replace(address, username=name, password=password)):
        note = f'; the broker has the new rules, but does not accept the password yet: see "{Home(home).broker_log}"'
    typer.echo(password)
    typer.echo(f'"{name}" has access as {role}; the password is not shown again{note}; {advice}', err=True)


@access.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="User name.")], home: HomeOption = DEFAULT_HOME) -> None:
    """Revoke a user's access to the broker, and close its connection."""
    Home(home).record()
    rules.revoke(Home(home).broker, name)
    typer.echo(f'access of "{name}" is revoked{_renewed(home)}', err=True)


@access.command("reload")
def reload(home: HomeOption = DEFAULT_HOME) -> None:
    """Reload the access rules and certificate files of the running broker.

    Connections and sessions persist. New connections get the new certificate.
    """
    Home(home).record()
    if not renew_access(Home(home).broker):
        raise FleetError(
            f'no embedded broker runs in "{home}"; it reads its files when it starts: ./fleet up, or ./fleet service broker',
            code="broker-not-running",
        )
    typer.echo("the broker reloads its access rules and certificates", err=True)


@access.command("takeovers")
def takeovers(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False) -> None:
    """List client ids whose connection was replaced by another client.

    Two clients with one client id replace each other. Frequent entries mean that a client id is
    used twice, or that somebody disturbs its owner.
    """
    Home(home).record()
    columns = ("client_id", "times", "first_at", "last_at", "address", "replaced_address")
    show_rows([asdict(one) for one in read_takeovers(Home(home).broker_log)], columns, "takeovers", json_lines=json_lines)


@access.command("list")
def show(home: HomeOption = DEFAULT_HOME, json_lines: RowsOption = False) -> None:
    """List the users of the broker, with their roles and devices."""
    Home(home).record()
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "role": one.role.value,
            "publishes_for": [*one.devices, *one.nodes, *one.topics],
            "certificate": one.certificate,
        }
        for one in rules.grants(Home(home).broker)
    ]
    if json_lines:
        as_json(rows)
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "role", "publishes for", "certificate"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["role"], as_markup(", ".join(row["publishes_for"])), as_markup(row["certificate"]))
    if rows:
        console().print(table)
    else:
        typer.echo("only the fleet itself has access; grant a device access with: ./fleet access grant DEVICE_ID", err=True)


@access.command("rules")
def rules_for(
    mosquitto: Annotated[bool, typer.Option("--mosquitto", help="Print a Mosquitto acl_file, not a NATS configuration.")] = False,
    certificates: Annotated[
        bool, typer.Option("--certificates", help="Include users with certificates, for a NATS listener with verify_and_map.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Print the access rules in the format of another broker.

    Passwords are hashes; the password of the fleet itself is left out.
    """
    Home(home).record()
    known = rules.grants(Home(home).broker)
    service = BrokerAddress("", 0, rules.SERVICE_USER, "REPLACE-THIS")
    mappings = load_mappings(Home(home))
    of_nats = rules.nats_rules(service, known, mappings, certificates=certificates)
    of_mosquitto = rules.mosquitto_rules(known, mappings, Home(home).identity())
    typer.echo(of_mosquitto if mosquitto else of_nats, nl=False)


def _renewed(home: Path) -> str:
    return "; the broker has applied it" if renew_access(Home(home).broker) else ""
