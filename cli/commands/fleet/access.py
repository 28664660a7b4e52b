"""``fleet access``: users of the embedded broker and the topics each may use, and tokens for the HTTP server.

Rule: a name belongs to a user of the broker or to a token, never to both, so that ``revoke`` is unambiguous.
"""

from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json, as_markup, console
from cli.common.output import show as show_rows
from cli.common.policy_files import load_mappings
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import PAGE, Home
from fleetpulse.io.home.services import page_holder
from fleetpulse.io.mqtt import acl as rules
from fleetpulse.io.mqtt.acl import Role
from fleetpulse.io.mqtt.address import BrokerAddress, load_address
from fleetpulse.io.mqtt.embedded.broker import await_admission, renew_access
from fleetpulse.io.mqtt.embedded.takeovers import read_takeovers
from fleetpulse.io.system.process import read_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.web.access import WebRole, grant_token, login_address, revoke_token, tokens

access = typer.Typer(
    no_args_is_help=True, help="Manage users of the embedded broker and their topics, and tokens of the HTTP API."
)


class GrantedRole(StrEnum):
    """Role that can be granted: those of the broker's users, and that of a token for the HTTP server."""

    DEVICE = Role.DEVICE.value
    WATCHER = Role.WATCHER.value
    OPERATOR = Role.OPERATOR.value
    API_READER = WebRole.API_READER.value


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(access, name="access")


@access.command("grant")
def grant(
    name: Annotated[str, typer.Argument(help="User name; for a device, its id or SITE/ID.")],
    role: Annotated[
        GrantedRole,
        typer.Option(
            "--role",
            help="watcher: read all topics; operator: also publish; api-reader: a token to read the HTTP API and metrics.",
        ),
    ] = GrantedRole.DEVICE,
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
    """Grant a device, a watcher or an operator access to the broker, or a program access to the HTTP API.

    An id alone holds at any site, SITE/ID at that site only. The password or token is shown only once. For an
    existing name, a new password, certificate or token replaces the old one.
    """
    identity = Home(home).identity()  # raises if there is no fleet, for example after a typing error
    if role is GrantedRole.API_READER:
        given = {"--for": publishes_for, "--sparkplug": nodes, "--topic": topics, "--certificate": certificate}
        _grant_token(Home(home), name, [option for option, value in given.items() if value])
        return
    if any(one.name == name for one in tokens(Home(home))):
        raise FleetError(
            f'"{name}" is the name of a token for the HTTP server; choose another user name, or revoke the token first: '
            f"./fleet access revoke {name}",
            code="name-of-token",
        )
    _grant_user(home, name, Role(role.value), certificate, (publishes_for or [], nodes or [], topics or [], identity))


def _grant_token(home: Home, name: str, options: list[str]) -> None:
    if options:
        raise Misuse(
            f"{', '.join(options)} applies to users of the broker only; got the role {GrantedRole.API_READER}; omit it, or "
            f"choose another role",
            code="option-conflict",
        )
    if any(one.name == name for one in rules.grants(home.broker)):
        raise FleetError(
            f'"{name}" is a user of the broker; choose another name for the program, or revoke that access first: '
            f"./fleet access revoke {name}",
            code="name-of-user",
        )
    typer.echo(grant_token(home, name, WebRole.API_READER, wall_clock_ms()))
    typer.echo(
        f'"{name}" may read the HTTP API and the metrics with this token, which is not shown again; send it in the header: '
        f"Authorization: Bearer TOKEN",
        err=True,
    )


def _grant_user(
    home: Path, name: str, role: Role, certificate: str | None, what: tuple[list[str], list[str], list[str], DeviceIdentity]
) -> None:
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
def revoke(name: Annotated[str, typer.Argument(help="Name of a user or a token.")], home: HomeOption = DEFAULT_HOME) -> None:
    """Revoke a user's access to the broker, and close its connection; or revoke a token for the HTTP server."""
    Home(home).record()
    is_user = any(one.name == name for one in rules.grants(Home(home).broker))
    if not is_user and revoke_token(Home(home), name):
        typer.echo(f'the token of "{name}" is revoked; the HTTP server refuses it', err=True)
        return
    rules.revoke(Home(home).broker, name)
    typer.echo(f'access of "{name}" is revoked{_renewed(home)}', err=True)


@access.command("login")
def login(home: HomeOption = DEFAULT_HOME) -> None:
    """Print a new one-time address of the operations page, which logs a browser in.

    It is valid once, for 10 minutes. The session lasts 12 hours.
    """
    opened = Home(home)
    opened.record()
    url = read_status(opened.run(PAGE)).get("url")
    if page_holder(opened) is None or not url:
        raise FleetError(
            f'no HTTP server runs in "{home}", or it has not started yet; start it with: ./fleet serve --home {home}, or '
            f"./fleet up --home {home}",
            code="page-not-running",
        )
    typer.echo(login_address(opened, str(url)))
    typer.echo("valid once, for 10 minutes; on another machine, replace the host by the name that reaches the server", err=True)


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
    """List the users of the broker with their roles and devices, and the tokens for the HTTP server."""
    Home(home).record()
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "role": one.role.value,
            "publishes_for": [*one.devices, *one.nodes, *one.topics],
            "certificate": one.certificate,
            "created_ms": None,
        }
        for one in rules.grants(Home(home).broker)
    ]
    rows += [
        {"name": one.name, "role": one.role.value, "publishes_for": [], "certificate": "", "created_ms": one.created_ms}
        for one in tokens(Home(home))
    ]
    if json_lines:
        as_json(rows)
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "role", "publishes for", "certificate", "created"):
        table.add_column(column)
    for row in rows:
        created = format_instant(row["created_ms"]) if row["created_ms"] else ""  # only that of a token is known
        table.add_row(
            row["name"], row["role"], as_markup(", ".join(row["publishes_for"])), as_markup(row["certificate"]), created
        )
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
