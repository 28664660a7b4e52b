"""``fleet device bulk``: a command about every device that a filter selects, with a checked count.

Rule 1: the filter is that of the operations page and of the API, over the same rows.
Rule 2: the number of devices is counted again when the command runs. If it differs from the expected one by more than
`MOST_PER_CENT` or `MOST_MORE`, no command is given.
Rule 3: all commands are given, or none.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, RowsOption
from cli.common.output import as_json
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.io.home.command_spool import Command, spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms

MOST_PER_CENT: Final = 1
MOST_MORE: Final = 10  # devices
_NAMED: Final = 20  # devices in an error


class BulkAction(StrEnum):
    """Command that is given to each device."""

    MAINTAIN = "maintain"
    UPDATE = "update"
    RELEASE = "release"
    DECOMMISSION = "decommission"


def bulk(
    action: Annotated[BulkAction, typer.Argument(help="Command for each device.")],
    expect: Annotated[
        str | None, typer.Option("--expect", help="Number of devices that you expect; needed unless --dry-run is given.")
    ] = None,
    for_: Annotated[str, typer.Option("--for", help="Duration of maintenance or an update, such as 2h.")] = "",
    device: Annotated[list[str] | None, typer.Option("--device", help="Only this device; repeatable.")] = None,
    q: Annotated[str, typer.Option("--q", help="Only devices with this text within their id.")] = "",
    mode: Annotated[str, typer.Option("--mode", help="Only devices in these modes, comma-separated.")] = "",
    site: Annotated[str, typer.Option("--site", help="Only devices of this site.")] = "",
    device_class: Annotated[str, typer.Option("--class", help="Only devices of this class.")] = "",
    gateway: Annotated[str, typer.Option("--gateway", help="Only devices behind this gateway.")] = "",
    trigger: Annotated[str, typer.Option("--trigger", help="Only devices with these triggers, comma-separated.")] = "",
    clock: Annotated[str, typer.Option("--clock", help="Only devices whose clock is of these classes.")] = "",
    never_seen: Annotated[str, typer.Option("--never-seen", help="true: only offline devices that were never heard.")] = "",
    home: HomeOption = DEFAULT_HOME,
    dry_run: DryOption = False,
    json_lines: RowsOption = False,
) -> None:
    """Give a command to every device that matches a filter, if their number is the expected one.

    The filter is that of the page Devices. An empty option is no condition.
    """
    filters = {
        "q": q, "mode": mode, "site": site, "class": device_class, "gateway": gateway, "trigger": trigger, "clock": clock,
        "never_seen": never_seen,
    }  # fmt: skip
    opened = Home(home)
    opened.record()
    wanted = [one for one in device or () if one]
    found = _selected(opened, {name: value for name, value in filters.items() if value}, wanted)
    until_ms = _until_ms(opened, action, for_, found)
    commands = _commands(opened, action, found, until_ms)
    if not dry_run:
        require_expected(len(found), expect)
        spool(opened, commands)
    if json_lines:
        as_json([{"device_id": one["device_id"], "mode": one["mode"], "dry_run": dry_run} for one in found])
    elif dry_run:
        more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
        typer.echo(f"would give the command {action} to {_counted(len(found))}: {', '.join(_ids(found)[:_NAMED])}{more}")
    else:
        _print(opened, f"the command {action} is given to {_counted(len(found))}")


def _selected(home: Home, filters: Mapping[str, str], devices: Sequence[str]) -> list[dict[str, Any]]:
    """Return the devices that match.

    Raises:
        FleetError: none matches, or a named device is not among them.
        Misuse: a filter is invalid, or there is none.
    """
    from fleetpulse.reports.present.selection import selected
    from fleetpulse.web.queries import condition

    if not filters and not devices:
        raise Misuse("bulk needs a filter or --device; name at least one, such as --mode flagged", code="filter-missing")
    where = condition(filters)
    sql, values = where.sql, list(where.values)
    if devices:
        sql, values = f"({sql}) AND list_contains(?, device_id)", [*values, list(devices)]
    found = selected(home, sql, values)
    if missing := sorted({*devices} - {*_ids(found)}):
        raise FleetError(
            f"these devices do not match, or are unknown: {', '.join(missing[:_NAMED])}; list them with: ./fleet devices "
            f"--home {home.path}",
            code="device-unknown",
        )
    if not found:
        raise FleetError("no device matches the filter; no command was given", code="list-empty")
    return found


def _ids(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [one["device_id"] for one in found]


def require_expected(count: int, expect: str | None) -> None:
    """Refuse a number of devices that differs from the expected one.

    Args:
        count: number of devices that match.
        expect: expected number, as typed; None if it was not given.

    Raises:
        FleetError: the numbers differ by more than `MOST_PER_CENT` or `MOST_MORE`.
        Misuse: no number is expected.
    """
    digits = (expect or "").replace(",", "")
    if not digits.isascii() or not digits.isdecimal():
        raise Misuse(
            f'--expect must be the number of devices that you expect; got "{expect or ""}"; {count:,} match now',
            code="count-missing",
        )
    expected = int(digits)
    if abs(count - expected) > min(MOST_MORE, expected * MOST_PER_CENT // 100):
        raise FleetError(
            f"expected {expected:,} devices, and {count:,} match now; no command was given; look at the list again",
            code="count-differs",
        )


def _until_ms(home: Home, action: BulkAction, for_: str, found: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the end of maintenance or an update, epoch milliseconds; None for other actions.

    Raises:
        FleetError: the time is longer than the policy of a class allows.
        Misuse: a duration is missing, or is of no use.
    """
    from cli.commands.fleet.device import require_not_too_long

    if action not in (BulkAction.MAINTAIN, BulkAction.UPDATE):
        if for_:
            raise Misuse(f"--for is of maintenance and updates; omit it for {action}", code="option-conflict")
        return None
    if not for_ or (length_ms := parse_duration_ms(for_)) <= 0:
        raise Misuse(f"{action} needs a duration with --for, such as --for 2h; got {for_!r}", code="option-conflict")
    now_ms = wall_clock_ms()
    of_classes = {one["device_class"]: one["device_id"] for one in found}
    for device_id in of_classes.values():
        require_not_too_long(home.path, device_id, now_ms, now_ms + length_ms)
    return now_ms + length_ms


def _commands(home: Home, action: BulkAction, found: Sequence[Mapping[str, Any]], until_ms: int | None) -> list[Command]:
    """Return the commands.

    Raises:
        FleetError: the id of a device cannot be part of a topic.
    """
    from cli.commands.fleet.device import about_device

    content = {"op": action.value} if until_ms is None else {"op": action.value, "until": until_ms}
    identity, commands, faults = home.identity(), list[Command](), list[str]()
    for device_id in _ids(found):
        try:
            commands.append(about_device(identity, device_id, content))
        except FleetError as fault:
            faults.append(f"  {device_id}: {fault}")
    if faults:
        more = f"\n  and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise FleetError(
            "no command was given, since some ids cannot be part of a topic:\n" + "\n".join(faults[:_NAMED]) + more,
            code="commands-faulty",
        )
    return commands


def _counted(count: int) -> str:
    return f"{count:,} device{'' if count == 1 else 's'}"


def _print(home: Home, done: str) -> None:
    from fleetpulse.io.home.services import in_use

    typer.echo(done + ("" if in_use(home) else "; this takes effect when the fleet runs (./fleet up)"))
