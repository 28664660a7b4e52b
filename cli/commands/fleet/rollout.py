"""``fleet rollout``: give firmware to a fleet by cohort, and stop where a cohort fares worse than the rest."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, JsonOption
from cli.common.output import as_json, report_progress, show
from fleetpulse.core.errors import FleetError
from fleetpulse.core.rollouts.plan import RolloutPlan, parse_rollout_plan
from fleetpulse.core.rollouts.rollout import Rollout
from fleetpulse.core.rollouts.verdict import Observation, Result, Verdict
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use

FileArgument = Annotated[Path, typer.Argument(help="TOML file with the plan.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the rollout.")]
ByOption = Annotated[str | None, typer.Option("--by", help="Owner of the rollout; by default who starts it.")]
AtMostOption = Annotated[int | None, typer.Option("--devices-at-most", min=0, help="Refuse a rollout to more devices.")]
ToOption = Annotated[int | None, typer.Option("--to", min=2, help="Number of the cohort to start; the next one by default.")]
WhyOption = Annotated[str, typer.Option("--why", help="Reason, for the record.")]
_EVENTS = ("cohort", "share", "devices", "started_at", "by", "sent_at", "result", "judged_at")
_LISTED = ("rollout", "version", "status", "cohort", "cohorts", "devices", "owner", "reason")

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


@rollout.command("plan")
def plan(file: FileArgument, home: HomeOption = DEFAULT_HOME, json_lines: JsonOption = False) -> None:
    """Check a plan against the present fleet, and show its cohorts."""
    from cli.commands.fleet.rollout_steps import outlook

    seen = outlook(_open(home), _load(file))
    if json_lines:
        as_json([seen.plain()])
        return
    for line in seen.lines():
        typer.echo(line)


@rollout.command("start")
def start(
    file: FileArgument,
    by: ByOption = None,
    devices_at_most: AtMostOption = None,
    home: HomeOption = DEFAULT_HOME,
    dry_run: DryOption = False,
    json_lines: JsonOption = False,
) -> None:
    """Start a rollout: send the firmware to its first cohort.

    The devices of the rollout are those in its scope now. A start that was interrupted is completed
    by the same command.
    """
    from cli.commands.fleet import rollout_steps as steps

    opened, wanted = _open(home), _load(file)
    if dry_run:
        seen = steps.outlook(opened, wanted)
        steps.require_no_overlap(opened, wanted.name, [one.device_id for one in seen.devices])
        for line in seen.lines():
            report_progress(line)
        report_progress(f"would send the firmware to cohort 1: {seen.sizes[0]:,} devices")
        return
    found, is_new = steps.start(opened, wanted, by, devices_at_most)
    _print_started(opened, found, json_lines=json_lines, is_new=is_new)


def _print_started(home: Home, found: Rollout, *, json_lines: bool, is_new: bool) -> None:
    cohort, name = found.current, found.plan.name
    if json_lines:
        as_json([_plain(found)])
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
    from cli.commands.fleet.rollout_steps import check as judge

    found, verdict, seen = judge(_open(home), name, record=not dry_run)
    if json_lines:
        as_json([_judged(found, verdict, seen)])
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
    from cli.commands.fleet import rollout_steps as steps

    opened = _open(home)
    if dry_run:
        for line in steps.outlook_of_advance(opened, name, to):
            report_progress(line)
        return
    found, is_new = steps.advance(opened, name, to)
    _print_started(opened, found, json_lines=json_lines, is_new=is_new)


@rollout.command("stop")
def stop(
    name: NameArgument,
    why: WhyOption = "a person stopped it",
    by: ByOption = None,
    own: Annotated[bool, typer.Option("--own", help="Refuse to stop the rollout of another owner than --by.")] = False,
    home: HomeOption = DEFAULT_HOME,
    dry_run: DryOption = False,
) -> None:
    """Stop a rollout: it sends no further commands.

    Devices that have the firmware keep it; go back with a rollout of the version before.
    """
    from cli.commands.fleet import rollout_steps as steps

    opened = _open(home)
    if dry_run:
        found = steps.StoredRollout(opened, name).read()
        report_progress(f'would stop the rollout "{name}", which is {found.status}')
        return
    found, was_running = steps.stop(opened, name, why, (by or steps.whoami()) if own else None)
    typer.echo(f'the rollout "{name}" is stopped' if was_running else f'the rollout "{name}" was {found.status} before')


@rollout.command("status")
def status(
    name: Annotated[str | None, typer.Argument(help="Name of a rollout; all by default.")] = None,
    home: HomeOption = DEFAULT_HOME,
    json_lines: JsonOption = False,
) -> None:
    """List the rollouts of a home, or show the cohorts and the present verdict of one."""
    from cli.commands.fleet import rollout_steps as steps

    opened = _open(home)
    if name is None:
        found = [steps.StoredRollout(opened, one).read() for one in steps.rollout_names(opened)]
        rows = [_plain(one) if json_lines else _listed(one) for one in found]
        show(rows, _LISTED, "rollouts", json_lines=json_lines)
        return
    one, verdict, seen = steps.check(opened, name, record=False)
    if json_lines:
        as_json([_judged(one, verdict, seen)])
        return
    show([_event(one, number) for number in range(len(one.cohorts))], _EVENTS, _title(one), json_lines=False)
    typer.echo(f"{verdict.result}: {verdict.reason}")


def _title(found: Rollout) -> str:
    return f"rollout {found.plan.name}: firmware {found.plan.version} to {found.devices:,} devices, {found.status}"


def _event(found: Rollout, place: int) -> dict[str, Any]:
    one = found.cohorts[place]
    instants = {"started_at": one.started_ms, "sent_at": one.sent_ms, "judged_at": one.judged_ms}
    return {
        "cohort": one.number,
        "share": f"{found.plan.cohorts[place]} %",
        "devices": one.devices,
        "by": one.by,
        "result": (one.verdict or {}).get("result"),
        **{name: None if at_ms is None else format_instant(at_ms) for name, at_ms in instants.items()},
    }


def _listed(found: Rollout) -> dict[str, Any]:
    plan_ = found.plan
    started = {"cohort": len(found.cohorts), "cohorts": len(plan_.cohorts)}
    ends = {"status": str(found.status), "owner": found.owner, "reason": found.reason}
    return {"rollout": plan_.name, "version": plan_.version, "devices": found.devices, **started, **ends}


def _plain(found: Rollout) -> dict[str, Any]:
    return {**_listed(found), "plan": found.plan.content(), "steps": [asdict(one) for one in found.cohorts]}


def _judged(found: Rollout, verdict: Verdict, seen: Observation) -> dict[str, Any]:
    return {**_plain(found), "verdict": verdict.plain(), "observed": asdict(seen)}
