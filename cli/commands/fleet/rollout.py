"""``fleet rollout``: give firmware to a fleet by cohort, and stop where a cohort fares worse than the rest."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, JsonOption
from cli.common.output import as_json, report_progress, show
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.rollouts.plan import RolloutPlan, parse_rollout_plan
from fleetpulse.core.rollouts.rollout import Rollout
from fleetpulse.core.rollouts.verdict import Result
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout, rollout_names
from fleetpulse.io.home.services import in_use
from fleetpulse.io.system.process import present_requester
from fleetpulse.reports.rollouts.plain import judged, listed

FileArgument = Annotated[Path, typer.Argument(help="TOML file with the plan.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the rollout.")]
OwnerOption = Annotated[str | None, typer.Option("--owner", help="Owner of the rollout; by default the requester.")]
AtMostOption = Annotated[int | None, typer.Option("--devices-at-most", min=0, help="Refuse a rollout to more devices.")]
ToOption = Annotated[int | None, typer.Option("--to", min=2, help="Number of the cohort to start; the next one by default.")]
WhyOption = Annotated[str, typer.Option("--why", help="Reason, for the record.")]
_COHORTS: Final = ("cohort", "share", "devices", "started_at", "requester", "sent_at", "result", "judged_at")
_LISTED: Final = ("rollout", "version", "status", "cohort", "cohorts", "devices", "owner", "reason")

rollout = typer.Typer(
    no_args_is_help=True, help="Give firmware to devices by cohort; a rollout stops where a cohort fares worse than the rest."
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(rollout, name="rollout")


def _load(file: Path) -> RolloutPlan:
    from cli.common.policy_files import read_toml

    return parse_rollout_plan(read_toml(file))


def _open(home: Path) -> Home:
    opened = Home(home)
    opened.record()
    return opened


def _expects_answers(home: Home) -> bool:
    """Return whether the stream of commands runs, so that a missing row is a missing answer."""
    from fleetpulse.settings import load_settings

    return StreamName.COMMANDS in load_settings(home.path).streams


@rollout.command("plan")
def plan(file: FileArgument, home: HomeOption = DEFAULT_HOME, json_lines: JsonOption = False) -> None:
    """Check a plan against the present fleet, and show its cohorts."""
    from fleetpulse.reports.rollouts.outlook import outlook

    seen = outlook(_open(home), _load(file))
    if json_lines:
        as_json([seen.plain()])
        return
    for line in seen.lines():
        typer.echo(line)


@rollout.command("start")
def start(
    file: FileArgument,
    owner: OwnerOption = None,
    devices_at_most: AtMostOption = None,
    home: HomeOption = DEFAULT_HOME,
    dry_run: DryOption = False,
    json_lines: JsonOption = False,
) -> None:
    """Start a rollout: send the firmware to its first cohort.

    The devices of the rollout are those in its scope now. A start that was interrupted is completed
    by the same command.
    """
    from fleetpulse.reports.rollouts import steps

    opened, wanted = _open(home), _load(file)
    if not dry_run:
        found, is_new = steps.start(opened, wanted, owner, devices_at_most)
        _print_started(opened, found, json_lines=json_lines, is_new=is_new)
        return
    planned = steps.planned_start(opened, wanted, owner, devices_at_most)
    if isinstance(planned, Rollout):
        report_progress(f'the rollout "{wanted.name}" has started already; would send the commands that are not sent yet')
        return
    for line in planned.lines():
        report_progress(line)
    report_progress(f"would send the firmware to cohort 1: {planned.sizes[0]:,} devices")


def _print_started(home: Home, found: Rollout, *, json_lines: bool, is_new: bool) -> None:
    cohort, name = found.current, found.plan.name
    if json_lines:
        as_json([judged(found)])
        return
    done = "has started" if is_new else "had started already"
    later = "" if in_use(home) else "; the commands are sent when the fleet runs (./fleet up)"
    typer.echo(
        f'cohort {cohort.number} of {len(found.plan.cohorts)} of the rollout "{name}" {done}: firmware {found.plan.version} to '
        f"{cohort.devices:,} devices{later}; its verdict: ./fleet rollout check {name}"
    )


@rollout.command("check")
def check(
    name: NameArgument, home: HomeOption = DEFAULT_HOME, dry_run: DryOption = False, json_lines: JsonOption = False
) -> None:
    """Judge the newest cohort of a rollout; stop the rollout where a bound is exceeded.

    The exit code is 1 if the rollout is stopped. A cohort that has not been observed long enough is
    waiting.
    """
    from fleetpulse.reports.rollouts import steps

    opened = _open(home)
    found, verdict, seen = steps.check(opened, name, expects_answers=_expects_answers(opened), record=not dry_run)
    if json_lines:
        as_json([judged(found, verdict, seen)])
    if verdict.result is Result.STOPPED:
        raise FleetError(
            f'the rollout "{name}" is stopped, and sends no further commands: {verdict.reason}; its devices: ./fleet devices',
            code="rollout-stopped",
        )
    if not json_lines:
        typer.echo(f"{verdict.result}: {verdict.reason}")


@rollout.command("advance")
def advance(
    name: NameArgument,
    to: ToOption = None,
    home: HomeOption = DEFAULT_HOME,
    dry_run: DryOption = False,
    json_lines: JsonOption = False,
) -> None:
    """Start the next cohort of a rollout, if the newest one has passed.

    With --to, an advance that was interrupted is completed, and a repeated one changes nothing.
    """
    from fleetpulse.reports.rollouts import steps

    opened = _open(home)
    expected = _expects_answers(opened)
    if not dry_run:
        found, is_new = steps.advance(opened, name, to, expects_answers=expected)
        _print_started(opened, found, json_lines=json_lines, is_new=is_new)
        return
    found, following = steps.planned_advance(opened, name, to, expects_answers=expected)
    plan_ = found.plan
    report_progress(f'rollout "{name}" (plan {plan_.digest}): firmware {plan_.version}')
    if following is None:
        report_progress(f"cohort {found.current.number} has started already; would send the commands that are not sent yet")
        return
    number, size = following
    report_progress(f"passed: {(found.current.verdict or {}).get('reason')}")
    report_progress(f"would start cohort {number}, up to {plan_.cohorts[number - 1]} %: {size:,} devices")


@rollout.command("stop")
def stop(
    name: NameArgument,
    why: WhyOption = "a person stopped it",
    owner: OwnerOption = None,
    own: Annotated[bool, typer.Option("--own", help="Refuse to stop the rollout of another owner than --owner.")] = False,
    home: HomeOption = DEFAULT_HOME,
    dry_run: DryOption = False,
    json_lines: JsonOption = False,
) -> None:
    """Stop a rollout: it sends no further commands.

    Devices that have the firmware keep it; go back with a rollout of the version before.
    """
    from fleetpulse.reports.rollouts import steps

    if owner is not None and not own:
        raise Misuse("--owner needs --own: without it, the rollout of any owner stops; add --own", code="option-conflict")
    opened, required = _open(home), (owner or present_requester()) if own else None
    if dry_run:
        found = steps.planned_stop(opened, name, required)
        report_progress(f'would stop the rollout "{name}", which is {found.status}')
        return
    found, was_running = steps.stop(opened, name, why, required)
    if json_lines:
        as_json([judged(found)])
        return
    typer.echo(f'the rollout "{name}" is stopped' if was_running else f'the rollout "{name}" was {found.status} before')


@rollout.command("status")
def status(
    name: Annotated[str | None, typer.Argument(help="Name of a rollout; all by default.")] = None,
    home: HomeOption = DEFAULT_HOME,
    json_lines: JsonOption = False,
) -> None:
    """List the rollouts of a home, or show the cohorts and the present verdict of one."""
    from fleetpulse.reports.rollouts import steps

    opened = _open(home)
    if name is None:
        found = [StoredRollout(opened, one).read() for one in rollout_names(opened)]
        show([judged(one) if json_lines else listed(one) for one in found], _LISTED, "rollouts", json_lines=json_lines)
        return
    one, verdict, seen = steps.check(opened, name, expects_answers=_expects_answers(opened), record=False)
    if json_lines:
        as_json([judged(one, verdict, seen)])
        return
    show([listed(one)], _LISTED, "rollout", json_lines=False)
    show([_cohort(one, number) for number in range(len(one.cohorts))], _COHORTS, "cohorts", json_lines=False)
    typer.echo(f"{verdict.result}: {verdict.reason}")


def _cohort(found: Rollout, place: int) -> dict[str, Any]:
    one = found.cohorts[place]
    instants = {"started_at": one.started_ms, "sent_at": one.sent_ms, "judged_at": one.judged_ms}
    return {
        "cohort": one.number,
        "share": f"{found.plan.cohorts[place]} %",
        "devices": one.devices,
        "requester": one.requester,
        "result": (one.verdict or {}).get("result"),
        **{name: None if at_ms is None else format_instant(at_ms) for name, at_ms in instants.items()},
    }
