"""``fleet device``: show one device, or spool a command about devices."""

import csv
import json
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli.commands.fleet.device_bulk import bulk
from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.policy import DEFAULT_CLASS, RULES
from fleetpulse.core.presence.identities import SEPARATOR, DeviceIdentity, device_of
from fleetpulse.core.registry.registry import AS_ITS_CLASS, LIMITS
from fleetpulse.core.rows import EVERYONE, Kind, Origin
from fleetpulse.core.streams.commands import COMMAND
from fleetpulse.core.times import format_duration, format_instant, parse_duration_ms, parse_instant_ms
from fleetpulse.io.home.command_spool import Command, devices_with_pending_commands, spool, spool_lock, spool_locked
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use
from fleetpulse.io.system.wall_clock import wall_clock_ms

DeviceArgument = Annotated[str, typer.Argument(help="Device id.")]
_COLUMNS = ("device_id", "site", "class", "device_class", "gateway", "timeout", "death_grace")
_AS_ITS_CLASS = "class"


class _DeviceOrVerb(TyperGroup):
    """Group in which ``fleet device ID`` means ``fleet device show ID``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``show`` if the first argument is neither a command nor ``--help``."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["show", *args]
        return super().parse_args(ctx, args)


device = typer.Typer(
    cls=_DeviceOrVerb, no_args_is_help=True, help="Show a device (fleet device ID), or register and control devices."
)


device.command("bulk")(bulk)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(device, name="device")


@device.command("show")
def show(
    device_id: DeviceArgument,
    home: HomeOption = DEFAULT_HOME,
    json_lines: JsonOption = False,
) -> None:
    """Show a device: its mode, last signal, next deadline, and transitions."""
    from cli.commands.inspect.status import show_device

    opened = Home(home)
    opened.record()
    show_device(opened, device_id, json_lines=json_lines)


def _spool_commands(home: Path, commands: list[Command], done: str) -> None:
    opened = Home(home)
    opened.record()
    spool(opened, commands)
    _print_done(opened, done)


def _print_done(home: Home, done: str) -> None:
    typer.echo(done + ("" if in_use(home) else "; this takes effect when the fleet runs (./fleet up)"))


def _spool_about_device(home: Path, command: Command, done: str) -> None:
    """Spool a command about a device; print a note if the device is unknown."""
    from fleetpulse.reports import judgements

    opened = Home(home)
    device_id = device_of(command[0], opened.identity()) or ""
    if not judgements.is_known(opened, device_id) and device_id not in devices_with_pending_commands(opened):
        note = f'no device "{device_id}" was registered or heard so far; list devices with: ./fleet devices --home {home}'
        typer.echo(f"fleet: note: {note}", err=True)
    _spool_commands(home, [command], done)


def check_names(site: str, device_id: str) -> None:
    """Check the site and the device id of a topic.

    Raises:
        FleetError: a name cannot be part of a topic, or is reserved.
    """
    for what, name in (("a site", site), ("a device id", device_id)):
        if "/" in name:
            raise FleetError(
                f'{what} must not contain "/", the separator of topic levels; got "{name}"; choose another name',
                code="name-invalid",
            )
    if device_id == EVERYONE:
        raise FleetError(f'the device id "{EVERYONE}" is reserved for all devices; choose another id', code="device-id-reserved")
    refused = decode(f"fleet/{site}/{device_id}/{Kind.REGISTRY}", b"{}", 0, Origin.COMMAND)
    if isinstance(refused, Rejection):
        raise FleetError(refused.detail, code="command-refused")


def _site_and_id(identity: DeviceIdentity, device_id: str, site: str | None = None) -> tuple[str, str]:
    """Return the site and the device id for a device's topic.

    Args:
        identity: fields that identify a device in the home.
        device_id: device id as typed; it contains the site if the site is part of the identity.
        site: site from an option; None if not given.

    Raises:
        FleetError: the site is missing, or the option names another site than the id.
    """
    if identity is DeviceIdentity.ID:
        return site or EVERYONE, device_id
    id_site, slash, name = device_id.rpartition(SEPARATOR)
    if not slash and site is not None:
        return site, device_id
    if not slash:
        raise FleetError(
            f'devices of this home are identified by site and id; got "{device_id}"; write it like oslo/pump-1',
            code="device-id-without-site",
        )
    if site not in (None, id_site):
        raise FleetError(
            f'the site of "{device_id}" is part of its id, and --site names another one ({site}); omit --site',
            code="device-site-differs",
        )
    return id_site, name


def _registry(identity: DeviceIdentity, device_id: str, site: str | None, content: dict[str, Any]) -> Command:
    site, name = _site_and_id(identity, device_id, site)
    check_names(site, name)
    return f"fleet/{site}/{name}/registry", {key: value for key, value in content.items() if value is not None}


def _limits(timeout: str | None, death_grace: str | None) -> dict[str, int]:
    """Return a device's own limits, as fields of a registry entry.

    Raises:
        FleetError: a value is not a duration, or outside the bounds of the policy rule.
    """
    limits = zip(LIMITS, (timeout, death_grace), strict=True)
    return {name: _limit(name, text) for name, text in limits if text}


def _limit(name: str, text: str) -> int:
    try:
        return RULES[name].read(text)
    except FleetError as fault:
        raise FleetError(f"a device's own {RULES[name].key} {fault}", code="limit-invalid") from None


def _corrected_limits(timeout: str | None, death_grace: str | None) -> dict[str, int]:
    limits = zip(LIMITS, (timeout, death_grace), strict=True)
    return {name: AS_ITS_CLASS if text == _AS_ITS_CLASS else _limit(name, text) for name, text in limits if text}


def _entry(identity: DeviceIdentity, device_id: str, site: str | None, content: dict[str, Any]) -> Command:
    """Return a registry entry that adds a device; the default site is main."""
    return _registry(identity, device_id, site if site or SEPARATOR in device_id else "main", content)


def about_device(identity: DeviceIdentity, device_id: str, content: dict[str, Any], at_site: str | None = None) -> Command:
    """Return a command about a device: a control row, or a registry entry if it takes the device out of service.

    Args:
        identity: fields that identify a device in the home.
        device_id: id of the device.
        content: payload; ``op`` is that of a control row, or decommission.
        at_site: site of the topic; None for the whole fleet, or the site in the id.

    Raises:
        FleetError: the id cannot be part of a topic.
    """
    if content["op"] == "decommission":
        return _registry(identity, device_id, None, content)
    site, name = _site_and_id(identity, device_id, at_site)
    check_names(site, name)
    return f"fleet/{site}/{name}/{Kind.CONTROL}", content


@device.command("add")
def add(
    device_id: DeviceArgument,
    site: Annotated[str | None, typer.Option("--site", help="Site of the device; main by default.")] = None,
    device_class: Annotated[str, typer.Option("--class", help="Class of the device; it selects the rules.")] = DEFAULT_CLASS,
    gateway: Annotated[str | None, typer.Option("--gateway", help="Id of the gateway that it is behind.")] = None,
    timeout: Annotated[str | None, typer.Option("--timeout", help="Own timeout, such as 2h.")] = None,
    death_grace: Annotated[str | None, typer.Option("--death-grace", help="Own grace period after a will.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Register a device, or change its class, site and limits."""
    content = {"op": "add", "class": device_class, "gateway": gateway, **_limits(timeout, death_grace)}
    if any(mark.isspace() for mark in device_id + (site or "")):
        typer.echo("fleet: note: the embedded broker does not acknowledge topics with a space; other brokers may", err=True)
    _spool_commands(home, [_entry(Home(home).identity(), device_id, site, content)], f'device "{device_id}" is registered')


@device.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV file with a header: device_id; optional are site, class (or device_class), gateway, timeout, death_grace."
        ),
    ],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Register the devices of a CSV file: all of them, or none if a row is invalid."""
    commands: list[Command] = []
    faults: list[str] = []
    identity = Home(home).identity()
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            columns = list(reader.fieldnames or ())
            if "device_id" not in columns:
                raise FleetError(
                    f'the header of "{file}" has no device_id; got {", ".join(columns) or "nothing"}; add the column',
                    code="device-file-header-missing",
                )
            for row in reader:
                content: dict[str, Any] = {
                    "op": "add",
                    "class": row.get("class") or row.get("device_class") or DEFAULT_CLASS,
                    "gateway": row.get("gateway") or None,
                }
                try:
                    content |= _limits(row.get("timeout"), row.get("death_grace"))
                    commands.append(_entry(identity, row["device_id"] or "", row.get("site") or None, content))
                except FleetError as error:
                    faults.append(f"  line {reader.line_num}: {error}")
    except OSError as error:
        raise FleetError(f'"{file}" cannot be read ({error.strerror}); name a CSV file', code="device-file-unreadable") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise FleetError(f'"{file}" is not a CSV file in UTF-8 ({error}); convert it', code="device-file-unreadable") from None
    if faults:
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise FleetError(
            f'"{file}" has invalid rows; no device was registered; correct them:\n' + "\n".join(faults[:20]) + more,
            code="device-file-faulty",
        )
    if not commands:
        raise FleetError(f'"{file}" lists no devices; add one row per device', code="list-empty")
    if unused := [name for name in columns if name not in _COLUMNS]:
        typer.echo(f"fleet: note: ignored columns: {', '.join(unused)}; known columns are {', '.join(_COLUMNS)}", err=True)
    _spool_commands(home, commands, f"{len(commands)} device{'s are' if len(commands) > 1 else ' is'} registered")


@device.command("decommission")
def decommission(device_id: DeviceArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Take a device out of service; its signals are then counted but not judged."""
    command = about_device(Home(home).identity(), device_id, {"op": "decommission"})
    _spool_about_device(home, command, f'device "{device_id}" is decommissioned')


@device.command("correct")
def correct(
    device_id: DeviceArgument,
    from_: Annotated[str, typer.Option("--from", help="Start of the correction, such as 2026-01-31T12:00:00Z.")],
    device_class: Annotated[str | None, typer.Option("--class", help="Correct class.")] = None,
    site: Annotated[str | None, typer.Option("--site", help="Correct site.")] = None,
    gateway: Annotated[str | None, typer.Option("--gateway", help="Correct gateway.")] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help='Correct own timeout, such as 2h; "class" for that of the class.')
    ] = None,
    death_grace: Annotated[
        str | None, typer.Option("--death-grace", help='Correct own grace period; "class" for that of the class.')
    ] = None,
    registered: Annotated[bool, typer.Option("--registered", help="The device was in service.")] = False,
    decommissioned: Annotated[bool, typer.Option("--decommissioned", help="The device was out of service.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Correct the registry entry of a device since an instant in the past.

    The verdicts that this changes are amended by ./fleet amend.
    """
    from cli.supervisor.progress import is_command_pending
    from fleetpulse.core.registry.registry import Correction, corrected
    from fleetpulse.reports import judgements, registry

    from_ms = parse_instant_ms(from_)
    if from_ms > time.time() * 1000:
        raise Misuse(
            f"--from must be an instant in the past; got {format_instant(from_ms)}; "
            f"for a change from now on use: ./fleet device add, ./fleet device decommission",
            code="correction-not-past",
        )
    opened = Home(home)
    opened.record()
    heard_at = judgements.site_of(opened, device_id)
    if heard_at is None:
        raise FleetError(
            f'no device "{device_id}" was registered or heard in "{home}"; register it with: ./fleet device add',
            code="device-unknown",
        )
    own = _corrected_limits(timeout, death_grace)
    correction = Correction(from_ms, device_class, site, gateway, **own, registered=registered, decommissioned=decommissioned)
    with spool_lock(opened):  # the new entry is derived from the present ones
        if is_command_pending(opened, device_id, Kind.REGISTRY):
            raise FleetError(
                f'an earlier registry entry for "{device_id}" has not landed yet, and this correction would undo it; put all '
                f"corrections since one instant into one command, or try again later"
                + ("" if in_use(opened) else "; entries land when the fleet runs (./fleet up)"),
                code="registry-entry-pending",
            )
        known = registry.entries(opened, device_id)
        entry = corrected(known, heard_at, correction)
        content = {"op": entry.op, "effective_from": entry.from_ms, "class": entry.device_class, "gateway": entry.gateway}
        content |= {name: getattr(entry, name) for name in LIMITS}
        at_site = None if decommissioned else entry.site
        spool_locked(opened, [_registry(opened.identity(), device_id, at_site, content)])
    until = next((f" until the entry of {format_instant(one.from_ms)}" for one in known if one.from_ms > entry.from_ms), "")
    values = {"of class": device_class, "at site": site, "behind gateway": gateway, "with timeout": timeout}
    values["with death grace"] = death_grace
    parts = [f'{what} "{name}"' for what, name in values.items() if name is not None]
    parts += [what for what, is_set in (("in service", registered), ("out of service", decommissioned)) if is_set]
    since = f"since {format_instant(entry.from_ms)}{until}"
    _print_done(opened, f'device "{device_id}" was {", ".join(parts)} {since}; to amend its verdicts: ./fleet amend')


@device.command("maintain")
def maintain(
    device_id: DeviceArgument,
    for_: Annotated[str | None, typer.Option("--for", help="Duration, such as 2h.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="End, such as 2026-01-31T12:00:00Z.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Announce a firmware update instead.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Announce maintenance or a firmware update of a device.

    Silence of the device does not count before the announced end.
    """
    if (for_ is None) == (until is None):
        raise Misuse("maintain needs either --for or --until; give one of them, such as --for 2h", code="option-conflict")
    now_ms = wall_clock_ms()
    until_ms = parse_instant_ms(until) if until else now_ms + parse_duration_ms(for_ or "0s")
    if until_ms <= now_ms:
        raise Misuse(
            f"the end of maintenance must be in the future; got {format_instant(until_ms)}; use a later one",
            code="instant-not-future",
        )
    require_not_too_long(home, device_id, now_ms, until_ms)
    content = {"op": "update" if update else "maintain", "until": until_ms}
    _spool_about_device(
        home,
        about_device(Home(home).identity(), device_id, content),
        f'device "{device_id}" is in maintenance or update until {format_instant(until_ms)}',
    )


def require_not_too_long(home: Path, device_id: str, now_ms: int, until_ms: int) -> None:
    """Refuse a maintenance time that exceeds ``longest_hold`` of the device's rules.

    The lifecycle job would refuse it too, but only later and in a table.
    """
    from fleetpulse.reports.effective_policy import rules_at

    opened = Home(home)
    opened.record()
    found = rules_at(opened, device_id, now_ms)
    if found is not None and not found[1].may_hold(now_ms, until_ms):
        raise FleetError(
            f'maintenance of class "{found[0]}" is limited to {format_duration(found[1].longest_hold_ms)} (longest_hold of its '
            f"policy); got an end at {format_instant(until_ms)}; use a shorter time, or raise longest_hold: "
            f"./fleet policy apply",
            code="maintenance-too-long",
        )


@device.command("confirm")
def confirm(device_id: DeviceArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Confirm the flag of a device after a review: it then ends only by a release or a decommission."""
    refused = "if it has none, the command is refused: ./fleet late --kind refused"
    _spool_about_device(
        home,
        about_device(Home(home).identity(), device_id, {"op": "confirm"}),
        f'the flag of device "{device_id}" is confirmed; {refused}',
    )


@device.command("release")
def release(device_id: DeviceArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """End the update of a device, or clear its flag."""
    refused = "if it has neither, the command is refused: ./fleet late --kind refused"
    _spool_about_device(
        home,
        about_device(Home(home).identity(), device_id, {"op": "release"}),
        f'device "{device_id}" is released from its update or flag; {refused}',
    )


@device.command("command")
def command(
    device_id: DeviceArgument,
    name: Annotated[str, typer.Argument(help="Name of the command, such as set or firmware.")],
    payload: Annotated[str, typer.Option("--payload", help="Payload: a JSON object.")] = "{}",
    id_: Annotated[str | None, typer.Option("--id", help="Id of the command; a new one by default.")] = None,
    site: Annotated[str | None, typer.Option("--site", help="Site of the device; by default that of its newest message.")] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="Time for an answer, such as 30s; at most the setting command_timeout.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    json_lines: JsonOption = False,
) -> None:
    """Send a command to a device, on its topic fleet/SITE/DEVICE_ID/command.

    The device may receive it several times, with the same id. Its answer: ./fleet commands.
    """
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Misuse(
            f"--payload must be a JSON object; got {payload[:100]!a}; write one such as '{{\"interval_s\": 60}}'",
            code="payload-invalid",
        )
    opened = Home(home)
    opened.record()
    command_id = secrets.token_hex(8) if id_ is None else id_
    sent: dict[str, Any] = {"op": COMMAND, "id": command_id, "name": name, "payload": content}
    if timeout is not None:
        sent["timeout_ms"] = parse_duration_ms(timeout)
    spool(opened, [about_device(opened.identity(), device_id, sent, _site_for_delivery(opened, device_id, site))])
    if json_lines:
        typer.echo(json.dumps({"id": command_id, "device_id": device_id, "name": name}))
    else:
        _print_done(opened, f'command {command_id} is sent to device "{device_id}"; its answer: ./fleet commands {device_id}')


def _site_for_delivery(home: Home, device_id: str, site: str | None) -> str | None:
    """Return the site of the topic on which a device receives a command; None if its id includes the site.

    Raises:
        FleetError: the site is neither given nor known.
    """
    from fleetpulse.reports.judgements import site_of

    if site is not None or home.identity() is DeviceIdentity.SITE_AND_ID:
        return site
    known = site_of(home, device_id)
    if known in (None, EVERYONE):
        raise FleetError(
            f'the site of device "{device_id}" is unknown, and a command is delivered on a topic with the site; name it with '
            f"--site, or list the devices with: ./fleet devices --home {home.path}",
            code="device-site-unknown",
        )
    return known
