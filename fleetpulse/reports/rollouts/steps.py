"""Steps of a rollout: start, check, advance and stop, each under the lock of the rollouts.

Rule 1: a step first completes the one before it, if that was interrupted between its record and its last command.
Rule 2: `planned_start`, `planned_advance` and `planned_stop` raise the errors of the step, by the same functions, and change
nothing. They need no lock, since a record is replaced as a whole.
Rule 3: the verdict comes from `core.rollouts`.

Source: ADR 49.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.lifecycle import PRESENT
from fleetpulse.core.operations.device_filter import parse_device_filter
from fleetpulse.core.presence.identities import topic_of
from fleetpulse.core.rollouts.cohorts import cohort_of, command_id
from fleetpulse.core.rollouts.plan import RolloutPlan
from fleetpulse.core.rollouts.rollout import Rollout, Status
from fleetpulse.core.rollouts.verdict import Observation, Result, Verdict, judge_cohort
from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.commands import COMMAND, FIRMWARE
from fleetpulse.io.home.command_spool import Command
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import UPDATE, Device, StoredRollout, rollout_names, rollouts_lock
from fleetpulse.io.system.process import present_requester
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.reports.rollouts.newest import observe_newest
from fleetpulse.reports.rollouts.outlook import Outlook, outlook
from fleetpulse.reports.rollouts.scope import ScopedDevice, devices_in_scope

_EVERY: Final = parse_device_filter("TRUE")


def planned_start(home: Home, plan: RolloutPlan, owner: str | None, at_most: int | None = None) -> Rollout | Outlook:
    """Return the effect of `start`; change nothing.

    Returns:
        The outlook of a new rollout, or the record of the rollout that a repeated start completes.

    Raises:
        FleetError: see `start`.
    """
    return _checked_start(StoredRollout(home, plan.name), home, plan, owner, at_most)


def start(home: Home, plan: RolloutPlan, owner: str | None, at_most: int | None = None) -> tuple[Rollout, bool]:
    """Start a rollout with its first cohort.

    A start that is repeated with the same plan completes the first one.

    Args:
        home: home of the devices.
        plan: checked plan.
        owner: owner, which may stop it with ``--own``; None for the requester.
        at_most: largest permitted number of devices; None for any.

    Returns:
        The record, and whether the rollout is new.

    Raises:
        FleetError: see `outlook`; or there is such a rollout with another plan or further steps, another one runs for some of
            the devices, or there are more devices than permitted.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, plan.name)
        checked = _checked_start(stored, home, plan, owner, at_most)
        if isinstance(checked, Rollout):
            return complete(stored, checked), False
        stored.create([(one.device_id, one.site) for one in checked.devices])
        by = present_requester()
        return _begin(stored, Rollout(plan, len(checked.devices), owner or by), by, checked.devices), True


def _checked_start(
    stored: StoredRollout, home: Home, plan: RolloutPlan, owner: str | None, at_most: int | None
) -> Rollout | Outlook:
    if (found := stored.find()) is not None:
        _require_same_start(found, plan, owner)
        return found
    seen = outlook(home, plan)
    if at_most is not None and len(seen.devices) > at_most:
        raise FleetError(
            f"the rollout would include {len(seen.devices):,} devices, so nothing was sent; expected at most {at_most:,} "
            f"(--devices-at-most); read the plan again: --dry-run",
            code="rollout-more-devices",
        )
    _require_no_overlap(home, plan.name, [one.device_id for one in seen.devices])
    return seen


def _require_same_start(found: Rollout, plan: RolloutPlan, owner: str | None) -> None:
    same = found.plan.digest == plan.digest and owner in (None, found.owner)
    if not same or found.status is not Status.RUNNING or len(found.cohorts) != 1:
        raise FleetError(
            f'there is a rollout "{plan.name}" already: it is {found.status}, with plan {found.plan.digest}, by {found.owner}; '
            f"continue it with ./fleet rollout advance {plan.name}, or use another name",
            code="rollout-exists",
        )


def _require_no_overlap(home: Home, name: str, device_ids: Iterable[str]) -> None:
    """Refuse a rollout for devices of another running one: the comparison of both would be void.

    Raises:
        FleetError: another rollout runs for some of the devices.
    """
    wanted = set(device_ids)
    for other in rollout_names(home):
        stored = StoredRollout(home, other)
        if other == name or stored.read().status is not Status.RUNNING:
            continue
        if common := sum(device_id in wanted for device_id, _ in stored.devices()):
            raise FleetError(
                f'the rollout "{other}" runs for {common:,} of these devices; expected no rollout for them; wait for its end, or '
                f"stop it: ./fleet rollout stop {other}",
                code="rollout-overlaps",
            )


def check(home: Home, name: str, *, expects_answers: bool, record: bool = True) -> tuple[Rollout, Verdict, Observation]:
    """Judge the newest cohort of a rollout, and record a final verdict.

    Args:
        home: home of the devices.
        name: name of the rollout.
        expects_answers: see `observe_newest`.
        record: whether the verdict is recorded, and an interrupted step completed.

    Returns:
        The record, the verdict, and the facts. The verdict about a rollout that has ended is the recorded one.

    Raises:
        FleetError: there is no such rollout, or a table is damaged.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, name)
        found = stored.read()
        return _judge(home, stored, complete(stored, found) if record else found, expects_answers, record=record)


def planned_advance(
    home: Home, name: str, to: int | None = None, *, expects_answers: bool
) -> tuple[Rollout, tuple[int, int] | None]:
    """Return the effect of `advance`; change nothing.

    Returns:
        The record, with the present verdict about its newest cohort, and the next cohort: its number and its number of
        devices. The latter is None if a repeated advance starts none.

    Raises:
        FleetError: see `advance`.
    """
    stored = StoredRollout(home, name)
    found, devices = _ready(home, stored, stored.read(), to, expects_answers, record=False)
    if devices is None:
        return found, None
    number = len(found.cohorts) + 1
    return found, (number, len(_of_cohort(found.plan, stored.devices(), number, devices)))


def advance(home: Home, name: str, to: int | None = None, *, expects_answers: bool) -> tuple[Rollout, bool]:
    """Start the next cohort, if the newest one has passed.

    Args:
        home: home of the devices.
        name: name of the rollout.
        to: number of the cohort to start; if it has started already, an interrupted start is completed. None for the next.
        expects_answers: see `observe_newest`.

    Returns:
        The record, and whether a cohort was started.

    Raises:
        FleetError: the rollout has ended, the newest cohort has not passed, or ``to`` is not the next cohort.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, name)
        found, devices = _ready(home, stored, complete(stored, stored.read()), to, expects_answers)
        return (found, False) if devices is None else (_begin(stored, found, present_requester(), devices), True)


def _ready(
    home: Home, stored: StoredRollout, found: Rollout, to: int | None, expects_answers: bool, *, record: bool = True
) -> tuple[Rollout, list[ScopedDevice] | None]:
    """Return the record, and the present fleet if the next cohort may start; None if cohort ``to`` has started before."""
    found.require_running()
    if to is not None and to == len(found.cohorts):
        return found, None
    if to is not None and to != found.next_number:
        raise FleetError(
            f'cohort {to} of the rollout "{found.plan.name}" cannot start: {len(found.cohorts)} of {len(found.plan.cohorts)} '
            f"have started; expected the next one; omit --to",
            code="rollout-cohort-unexpected",
        )
    found, verdict, _ = _judge(home, stored, found, expects_answers, record=record)
    found.require_running()
    if verdict.result is not Result.PASSED:
        raise FleetError(
            f'cohort {found.current.number} of the rollout "{found.plan.name}" has not passed: {verdict.reason}; check it again '
            f"later: ./fleet rollout check {found.plan.name}",
            code="rollout-not-passed",
        )
    return found, devices_in_scope(home, _EVERY)


def planned_stop(home: Home, name: str, owner: str | None = None) -> Rollout:
    """Return the record of the rollout that `stop` would stop; change nothing.

    Raises:
        FleetError: see `stop`.
    """
    return _stoppable(StoredRollout(home, name), owner)


def stop(home: Home, name: str, why: str, owner: str | None = None) -> tuple[Rollout, bool]:
    """Stop a rollout: no further commands are sent, and those not in the spool yet are removed.

    Args:
        home: home of the devices.
        name: name of the rollout.
        why: reason.
        owner: its required owner; None for any.

    Returns:
        The record, and whether the rollout was running.

    Raises:
        FleetError: there is no such rollout, or it has another owner.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, name)
        found = _stoppable(stored, owner)
        if found.status is not Status.RUNNING:
            return found, False
        found = found.ended(Status.STOPPED, present_requester(), wall_clock_ms(), why)
        stored.write(found)
        stored.discard()
        return found, True


def _stoppable(stored: StoredRollout, owner: str | None) -> Rollout:
    found = stored.read()
    if owner is not None and owner != found.owner:
        raise FleetError(
            f'the rollout "{found.plan.name}" belongs to {found.owner}, and --own does not stop that of another; omit --own to '
            f"stop it",
            code="rollout-of-other",
        )
    return found


def complete(stored: StoredRollout, found: Rollout) -> Rollout:
    """Send the commands of a step that was interrupted after its record; return the record."""
    if found.status is not Status.RUNNING or found.current.sent_ms is not None:
        return found
    if stored.waiting():
        stored.renew(wall_clock_ms() + found.plan.flash_ms)
        stored.send()
    found = found.sent(wall_clock_ms())
    stored.write(found)
    return found


def _begin(stored: StoredRollout, found: Rollout, by: str, fleet: Sequence[ScopedDevice]) -> Rollout:
    """Record the next cohort and send its commands, see `fleetpulse.io.home.rollouts`."""
    number = len(found.cohorts) + 1
    reached = _of_cohort(found.plan, stored.devices(), number, fleet)
    now_ms = wall_clock_ms()
    stored.prepare(_commands(found.plan, number, reached, fleet, now_ms + found.plan.flash_ms))
    found = found.starting(len(reached), by, now_ms)
    stored.write(found)
    stored.send()
    found = found.sent(wall_clock_ms())
    stored.write(found)
    return found


def _of_cohort(plan: RolloutPlan, devices: Iterable[Device], number: int, fleet: Iterable[ScopedDevice]) -> list[Device]:
    """Return the devices of a cohort that are still in service."""
    served = {one.device_id for one in fleet}
    return [one for one in devices if one[0] in served and cohort_of(plan.name, one[0], plan.cohorts) == number]


def _commands(
    plan: RolloutPlan, number: int, devices: Iterable[Device], fleet: Iterable[ScopedDevice], until_ms: int
) -> list[Command]:
    """Return the commands of a cohort: for a present device, the announcement of its update comes first."""
    present = {one.device_id for one in fleet if one.mode in PRESENT}
    commands: list[Command] = []
    for device_id, site in devices:
        topic = topic_of(device_id, Kind.CONTROL, site)
        if device_id in present:
            commands.append((topic, {"op": UPDATE, "until": until_ms}))
        content = {"id": command_id(plan.name, number, device_id), "name": FIRMWARE, "payload": {"version": plan.version}}
        commands.append((topic, {"op": COMMAND, **content}))
    return commands


def _judge(
    home: Home, stored: StoredRollout, found: Rollout, expects_answers: bool, *, record: bool = True
) -> tuple[Rollout, Verdict, Observation]:
    """Judge the newest cohort, and record a final verdict."""
    seen = observe_newest(home, found, expects_answers=expects_answers)
    if found.status is not Status.RUNNING:
        recorded = found.current.verdict or {}
        result = Result.PASSED if found.status is Status.COMPLETED else Result.STOPPED
        return found, Verdict(result, str(found.reason), recorded.get("baseline"), recorded.get("until_ms")), seen
    verdict = judge_cohort(found.plan, seen)
    if found.current.passed and verdict.result is Result.PASSED:
        return found, verdict, seen  # the first verdict stays in the record
    judged = found.judged(verdict, present_requester(), wall_clock_ms())
    if record and judged != found:
        stored.write(judged)
    return judged, verdict, seen
