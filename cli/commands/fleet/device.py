"""``fleet device``: one device, and the commands that operators give about devices."""

import csv
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.policy import DEFAULT_CLASS, RULES
from fleetpulse.core.presence.identities import SEPARATOR, DeviceIdentity, device_of
from fleetpulse.core.registry.registry import AS_ITS_CLASS, LIMITS
from fleetpulse.core.rows import EVERYONE, Kind, Origin
from fleetpulse.core.times import format_duration, format_instant, parse_duration_ms, parse_instant_ms
from fleetpulse.io.home.command_spool import Command, commanded, hand_over, in_turn, spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use
from fleetpulse.io.system.wall_clock import wall_clock_ms

DeviceArgument = Annotated[str, typer.Argument(help="Device id.")]
_COLUMNS = ("device_id", "site", "class", "device_class", "gateway", "timeout", "death_grace")
_AS_ITS_CLASS = "class"


class _DeviceOrVerb(TyperGroup):
    """``fleet device ID`` shows a device; the other words are verbs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what is no verb as a device id, or as an option in front of one."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["show", *args]
        return super().parse_args(ctx, args)


device = typer.Typer(cls=_DeviceOrVerb, no_args_is_help=True, help="One device: fleet device ID; or a command about it.")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.add_typer(device, name="device")


@device.command("show")
def show(
    device_id: DeviceArgument,
    home: HomeOption = DEFAULT_HOME,
    json_lines: JsonOption = False,
) -> None:
    """Show a device: mode, last seen, due offline at, judged up to, and its life."""
    from cli.commands.inspect.status import show_device

    opened = Home(home)
    opened.record()
    show_device(opened, device_id, json_lines=json_lines)


def _give(home: Path, commands: list[Command], done: str) -> None:
    opened = Home(home)
    opened.record()
    spool(opened, commands)
    _given(opened, done)


def _given(home: Home, done: str) -> None:
    typer.echo(done + ("" if in_use(home) else "; it takes effect when the fleet runs (./fleet up)"))


def _about(home: Path, command: Command, done: str) -> None:
    """Give a command about a device that should be there: a slip in an id is not to pass in silence."""
    from fleetpulse.reports import judgements

    opened = Home(home)
    device_id = device_of(command[0], opened.identity()) or ""
    if not judgements.is_known(opened, device_id) and device_id not in commanded(opened):
        note = f'no device "{device_id}" was registered or heard so far; see: ./fleet devices --home {home}'
        typer.echo(f"fleet: note: {note}", err=True)
    _give(home, [command], done)


def check_names(site: str, device_id: str) -> None:
    """Check what names a device in its topic.

    Raises:
        FleetError: a name that no topic can have.
    """
    for what, name in (("a site", site), ("a device id", device_id)):
        if "/" in name:
            raise FleetError(f'{what} is without /, which parts the levels of a topic; got "{name}"', code="name-invalid")
    if device_id == EVERYONE:
        raise FleetError(f'"{EVERYONE}" stands for all devices and names none', code="device-id-reserved")
    refused = decode(f"fleet/{site}/{device_id}/{Kind.REGISTRY}", b"{}", 0, Origin.COMMAND)
    if isinstance(refused, Rejection):
        raise FleetError(refused.detail, code="command-refused")


def _named(identity: DeviceIdentity, device_id: str, site: str | None = None) -> tuple[str, str]:
    """Return the site and the id that a device's topic names.

    Args:
        identity: what identifies a device in the home.
        device_id: as a person gives it: with its site where that is a part of it.
        site: given beside it; None: not given.

    Raises:
        FleetError: the site is missing, or there are two of them.
    """
    if identity is DeviceIdentity.ID:
        return site or EVERYONE, device_id
    its_site, slash, name = device_id.rpartition(SEPARATOR)
    if not slash and site is not None:
        return site, device_id
    if not slash:
        raise FleetError(
            f'devices of this home are identified by site and id, such as oslo/pump-1; got "{device_id}"',
            code="device-id-without-site",
        )
    if site not in (None, its_site):
        raise FleetError(
            f'the site of "{device_id}" is a part of its id; got --site {site}; another site is another device',
            code="device-site-differs",
        )
    return its_site, name


def _registry(identity: DeviceIdentity, device_id: str, site: str | None, content: dict[str, Any]) -> Command:
    site, name = _named(identity, device_id, site)
    check_names(site, name)
    return f"fleet/{site}/{name}/registry", {key: value for key, value in content.items() if value is not None}


def _limits(timeout: str | None, death_grace: str | None) -> dict[str, int]:
    """Return the limits of a device's own, as an entry of the registry has them.

    Raises:
        FleetError: one is no duration, or beyond the bounds of the policy's.
    """
    given = zip(LIMITS, (timeout, death_grace), strict=True)
    return {name: _limit(name, word) for name, word in given if word}


def _limit(name: str, word: str) -> int:
    try:
        return RULES[name].read(word)
    except FleetError as fault:
        raise FleetError(f"a device's own {RULES[name].key} {fault}", code="limit-invalid") from None


def _corrected_limits(timeout: str | None, death_grace: str | None) -> dict[str, int]:
    given = zip(LIMITS, (timeout, death_grace), strict=True)
    return {name: AS_ITS_CLASS if word == _AS_ITS_CLASS else _limit(name, word) for name, word in given if word}


def _entry(identity: DeviceIdentity, device_id: str, site: str | None, content: dict[str, Any]) -> Command:
    """Return an entry that registers a device, at the site main where nothing names another."""
    return _registry(identity, device_id, site if site or SEPARATOR in device_id else "main", content)


def _control(home: Path, device_id: str, content: dict[str, Any]) -> Command:
    site, name = _named(Home(home).identity(), device_id)
    check_names(site, name)
    return f"fleet/{site}/{name}/{Kind.CONTROL}", content


@device.command("add")
def add(
    device_id: DeviceArgument,
    site: Annotated[str | None, typer.Option("--site", help="Its site; without it main.")] = None,
    device_class: Annotated[str, typer.Option("--class", help="Its class, which chooses its rules.")] = DEFAULT_CLASS,
    gateway: Annotated[str | None, typer.Option("--gateway", help="Through whom it comes.")] = None,
    timeout: Annotated[str | None, typer.Option("--timeout", help="A timeout of its own, such as 2h.")] = None,
    death_grace: Annotated[str | None, typer.Option("--death-grace", help="A grace of its own after its will.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Register a device, or change its class, site and limits."""
    content = {"op": "add", "class": device_class, "gateway": gateway, **_limits(timeout, death_grace)}
    if any(mark.isspace() for mark in device_id + (site or "")):
        typer.echo("fleet: note: the embedded broker never acknowledges a topic with a space; another broker may", err=True)
    _give(home, [_entry(Home(home).identity(), device_id, site, content)], f'device "{device_id}" is registered')


@device.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV with a header: device_id; site, class (or device_class), gateway, timeout and death_grace where known."
        ),
    ],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Register devices from a CSV file: all of them, or none."""
    commands: list[Command] = []
    faults: list[str] = []
    identity = Home(home).identity()
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            columns = list(reader.fieldnames or ())
            if "device_id" not in columns:
                raise FleetError(
                    f'"{file}" needs a header with device_id; got {", ".join(columns) or "nothing"}',
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
        raise FleetError(f'"{file}" is not CSV in UTF-8 ({error})', code="device-file-unreadable") from None
    if faults:
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise FleetError(
            f'"{file}" has faults, and no device was registered:\n' + "\n".join(faults[:20]) + more, code="device-file-faulty"
        )
    if not commands:
        raise FleetError(f'"{file}" lists no devices', code="list-empty")
    if unused := [name for name in columns if name not in _COLUMNS]:
        typer.echo(f"fleet: note: columns not used: {', '.join(unused)}; known are {', '.join(_COLUMNS)}", err=True)
    _give(home, commands, f"{len(commands)} device{'s are' if len(commands) > 1 else ' is'} registered")


@device.command("decommission")
def decommission(device_id: DeviceArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Take a device out of service: its signals are counted, not judged."""
    command = _registry(Home(home).identity(), device_id, None, {"op": "decommission"})
    _about(home, command, f'device "{device_id}" is decommissioned')


@device.command("correct")
def correct(
    device_id: DeviceArgument,
    from_: Annotated[str, typer.Option("--from", help="Since an instant in the past, such as 2026-01-31T12:00:00Z.")],
    device_class: Annotated[str | None, typer.Option("--class", help="It was of this class.")] = None,
    site: Annotated[str | None, typer.Option("--site", help="It was at this site.")] = None,
    gateway: Annotated[str | None, typer.Option("--gateway", help="It came through this gateway.")] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help='It had this timeout of its own, such as 2h; "class": none.')
    ] = None,
    death_grace: Annotated[
        str | None, typer.Option("--death-grace", help='It had this grace of its own after its will; "class": none.')
    ] = None,
    registered: Annotated[bool, typer.Option("--registered", help="It was in service.")] = False,
    decommissioned: Annotated[bool, typer.Option("--decommissioned", help="It was out of service.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Say what the registry had wrong since an instant in the past: ./fleet amend judges anew what that changes."""
    from cli.supervisor.progress import on_its_way
    from fleetpulse.core.registry.registry import Correction, corrected
    from fleetpulse.reports import judgements, registry

    from_ms = parse_instant_ms(from_)
    if from_ms > time.time() * 1000:
        raise Misuse(
            f"what is corrected lies in the past; got {format_instant(from_ms)}; "
            f"for now use: ./fleet device add, ./fleet device decommission",
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
    wanted = Correction(from_ms, device_class, site, gateway, **own, registered=registered, decommissioned=decommissioned)
    with in_turn(opened):  # what the registry says now is what the entry is made of
        if on_its_way(opened, device_id, Kind.REGISTRY):
            raise FleetError(
                f'what the registry says of "{device_id}" is on its way, and an entry made without it would undo it; give what '
                f"was otherwise since one instant in one command, or this one again when that has landed"
                + ("" if in_use(opened) else ": the fleet takes it when it runs (./fleet up)"),
                code="registry-entry-pending",
            )
        known = registry.entries(opened, device_id)
        entry = corrected(known, heard_at, wanted)
        content = {"op": entry.op, "effective_from": entry.from_ms, "class": entry.device_class, "gateway": entry.gateway}
        content |= {name: getattr(entry, name) for name in LIMITS}
        at_site = None if decommissioned else entry.site
        hand_over(opened, [_registry(opened.identity(), device_id, at_site, content)])
    until = next((f" until the entry of {format_instant(one.from_ms)}" for one in known if one.from_ms > entry.from_ms), "")
    given = {"of class": device_class, "at site": site, "behind gateway": gateway, "with timeout": timeout}
    given["with death grace"] = death_grace
    words = [f'{what} "{name}"' for what, name in given.items() if name is not None]
    words += [what for what, said in (("in service", registered), ("out of service", decommissioned)) if said]
    since = f"since {format_instant(entry.from_ms)}{until}"
    _given(opened, f'device "{device_id}" was {", ".join(words)} {since}; to judge that anew: ./fleet amend')


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
        raise Misuse("maintain needs --for or --until, and not both; write one such as --for 2h", code="option-conflict")
    now_ms = wall_clock_ms()
    until_ms = parse_instant_ms(until) if until else now_ms + parse_duration_ms(for_ or "0s")
    if until_ms <= now_ms:
        raise Misuse(f"the end of maintenance lies in the future; got {format_instant(until_ms)}", code="instant-not-future")
    _require_not_too_long(home, device_id, now_ms, until_ms)
    content = {"op": "update" if update else "maintain", "until": until_ms}
    _about(home, _control(home, device_id, content), f'device "{device_id}" is held until {format_instant(until_ms)}')


def _require_not_too_long(home: Path, device_id: str, now_ms: int, until_ms: int) -> None:
    """Refuse what the job would refuse later, where nobody looks; the policy that counts is the one in force then."""
    from fleetpulse.reports.effective_policy import rules_at

    opened = Home(home)
    opened.record()
    found = rules_at(opened, device_id, now_ms)
    if found is not None and not found[1].may_hold(now_ms, until_ms):
        raise FleetError(
            f'one of class "{found[0]}" is held for {format_duration(found[1].longest_hold_ms)} at most (longest_hold of its '
            f"policy); got an end at {format_instant(until_ms)}; take a shorter time, or raise longest_hold: "
            f"./fleet policy apply",
            code="maintenance-too-long",
        )


@device.command("release")
def release(device_id: DeviceArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """End the update of a device, or let go of one that is flagged."""
    refused = "it is refused if there is neither: ./fleet late --kind refused"
    _about(
        home, _control(home, device_id, {"op": "release"}), f'device "{device_id}" is released from its update or flag; {refused}'
    )
