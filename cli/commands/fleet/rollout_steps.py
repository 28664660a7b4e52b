"""Steps of a rollout: outlook, start, check, advance and stop, each under the lock of the rollouts.

Rule 1: a step first completes the one before it, if that was interrupted between its record and its last command.
Rule 2: the facts come from `fleetpulse.reports.rollouts`, the verdict from `fleetpulse.core.rollouts`.

Source: ADR 49.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.lifecycle import PRESENT
from fleetpulse.core.operations.device_filter import parse_device_filter
from fleetpulse.core.policy import Policy
from fleetpulse.core.presence.identities import topic_of
from fleetpulse.core.rollouts.cohorts import cohort_of, cohort_sizes, command_id
from fleetpulse.core.rollouts.plan import RolloutPlan
from fleetpulse.core.rollouts.planned import describe_devices
from fleetpulse.core.rollouts.rollout import Rollout, Status
from fleetpulse.core.rollouts.verdict import Observation, Result, Verdict, judge_cohort
from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.commands import COMMAND, FIRMWARE
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.times import format_duration
from fleetpulse.io.home.command_spool import Command
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import UPDATE, Device, StoredRollout, rollout_names, rollouts_lock
from fleetpulse.io.system.process import os_user, requester
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.reports.rollouts.newest import observe_newest
from fleetpulse.reports.rollouts.scope import ScopedDevice, devices_in_scope, longest_timeout, rules_in_force

_EVERY: Final = parse_device_filter("TRUE")


@dataclass(frozen=True, slots=True)
class Outlook:
    """Checked effect of a plan on the present fleet.

    Attributes:
        plan: the plan.
        devices: devices of its scope.
        sizes: number of devices in each cohort.
    """

    plan: RolloutPlan
    devices: tuple[ScopedDevice, ...]
    sizes: tuple[int, ...]

    def lines(self) -> list[str]:
        """Return the outlook for people, one sentence a line; Airflow reads the second one."""
        plan = self.plan
        shares = [f"{share} %" for share in plan.cohorts]
        cohorts = [
            f"cohort {number}, up to {share}: {size:,} devices, of which one is {100 / size:.1f} points"
            for number, (share, size) in enumerate(zip(shares, self.sizes, strict=True), 1)
        ]
        return [
            f'rollout "{plan.name}" (plan {plan.digest}): firmware {plan.version}',
            describe_devices(len(self.devices), plan.scope.text),
            *cohorts,
            f"each cohort is observed for {format_duration(plan.soak_ms)}; a device may be silent for "
            f"{format_duration(plan.flash_ms)} while it installs the firmware",
            f"the rollout stops where the rate of a cohort exceeds that of the rest by more than {float(plan.most_offline):g} "
            f"points (offline) or {float(plan.most_errors):g} points (errors); rates of fewer than {plan.least_devices:,} "
            f"devices are no statement",
        ]

    def plain(self) -> dict[str, Any]:
        """Return the outlook as JSON values."""
        return {
            "plan": self.plan.content(),
            "digest": self.plan.digest,
            "devices": len(self.devices),
            "cohorts": [
                {"cohort": number, "share": share, "devices": size}
                for number, (share, size) in enumerate(zip(self.plan.cohorts, self.sizes, strict=True), 1)
            ],
        }


def whoami() -> str:
    """Return who runs this process: the requester that the environment names, or the user of the operating system."""
    return requester() or os_user()


def outlook(home: Home, plan: RolloutPlan) -> Outlook:
    """Check a plan against the present fleet.

    Raises:
        FleetError: a cohort is too small for a statement, the soak is too short to see a silent device offline, an update
            cannot be announced for that long, or the scope is invalid.
    """
    devices = tuple(devices_in_scope(home, plan.scope))
    sizes = tuple(cohort_sizes(plan.name, (one.device_id for one in devices), plan.cohorts))
    if (least := min(sizes)) < plan.least_devices:
        raise FleetError(
            f"cohort {sizes.index(least) + 1} of the rollout would have {least:,} of {len(devices):,} devices; expected at least "
            f"{plan.least_devices:,} (least_devices), since rates of fewer are no statement; raise the shares, widen the scope, "
            f"or lower least_devices",
            code="rollout-cohort-too-small",
        )
    policy = rules_in_force(home, wall_clock_ms()) or Policy()
    _require_time_to_see_silence(home, plan, policy, devices)
    return Outlook(plan, devices, sizes)


def _require_time_to_see_silence(home: Home, plan: RolloutPlan, policy: Policy, devices: Sequence[ScopedDevice]) -> None:
    timeout_ms, of = longest_timeout(home, policy, devices)
    if plan.soak_ms < plan.flash_ms + timeout_ms:
        raise FleetError(
            f"a soak of {format_duration(plan.soak_ms)} is too short: a device of {of} that falls silent is offline after flash "
            f"({format_duration(plan.flash_ms)}) and its timeout ({format_duration(timeout_ms)}); use a soak of at least "
            f"{format_duration(plan.flash_ms + timeout_ms)}",
            code="rollout-soak-too-short",
        )
    held = {name: policy.of(name).longest_hold_ms for name in {one.device_class for one in devices}}
    name, longest_ms = min(held.items(), key=lambda one: one[1])
    if plan.flash_ms > longest_ms:
        raise FleetError(
            f'updates of class "{name}" are limited to {format_duration(longest_ms)} (longest_hold of its policy); got a flash '
            f"of {format_duration(plan.flash_ms)}; use a shorter one, or raise longest_hold: ./fleet policy apply",
            code="rollout-flash-too-long",
        )


def start(home: Home, plan: RolloutPlan, owner: str | None, at_most: int | None = None) -> tuple[Rollout, bool]:
    """Start a rollout with its first cohort.

    A start that is repeated with the same plan completes the first one.

    Args:
        home: home of the devices.
        plan: checked plan.
        owner: who may stop it with ``--own``; None for the requester.
        at_most: largest permitted number of devices; None for any.

    Returns:
        The record, and whether the rollout is new.

    Raises:
        FleetError: see `outlook`; or there is such a rollout with another plan or further steps, another one runs for some of
            the devices, or there are more devices than permitted.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, plan.name)
        if (found := stored.find()) is not None:
            _require_same_start(found, plan, owner)
            return complete(stored, found), False
        seen = outlook(home, plan)
        if at_most is not None and len(seen.devices) > at_most:
            raise FleetError(
                f"the rollout would include {len(seen.devices):,} devices, so nothing was sent; expected at most {at_most:,} "
                f"(--devices-at-most); read the plan again: --dry-run",
                code="rollout-more-devices",
            )
        require_no_overlap(home, plan.name, [one.device_id for one in seen.devices])
        stored.create([(one.device_id, one.site) for one in seen.devices])
        by = whoami()
        return _begin(stored, Rollout(plan, len(seen.devices), owner or by), by, seen.devices), True


def _require_same_start(found: Rollout, plan: RolloutPlan, owner: str | None) -> None:
    same = found.plan.digest == plan.digest and owner in (None, found.owner)
    if not same or found.status is not Status.RUNNING or len(found.cohorts) != 1:
        raise FleetError(
            f'there is a rollout "{plan.name}" already: it is {found.status}, with plan {found.plan.digest}, by {found.owner}; '
            f"continue it with ./fleet rollout advance {plan.name}, or use another name",
            code="rollout-exists",
        )


def require_no_overlap(home: Home, name: str, device_ids: Iterable[str]) -> None:
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


def check(home: Home, name: str, *, record: bool = True) -> tuple[Rollout, Verdict, Observation]:
    """Judge the newest cohort of a rollout, and record a final verdict.

    Args:
        home: home of the devices.
        name: name of the rollout.
        record: whether the verdict is recorded, and an interrupted step completed.

    Returns:
        The record, the verdict, and the facts. The verdict about a rollout that has ended is the recorded one.

    Raises:
        FleetError: there is no such rollout, or a table is damaged.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, name)
        found = stored.read()
        return _judge(home, stored, complete(stored, found) if record else found, record=record)


def advance(home: Home, name: str, to: int | None = None) -> tuple[Rollout, bool]:
    """Start the next cohort, if the newest one has passed.

    Args:
        home: home of the devices.
        name: name of the rollout.
        to: number of the cohort to start; if it has started already, an interrupted start is completed. None for the next.

    Returns:
        The record, and whether a cohort was started.

    Raises:
        FleetError: the rollout has ended, the newest cohort has not passed, or ``to`` is not the next cohort.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, name)
        found = complete(stored, stored.read())
        found.require_running()
        if to is not None and to == len(found.cohorts):
            return found, False
        found, devices = _ready(home, stored, found, to)
        return _begin(stored, found, whoami(), devices), True


def outlook_of_advance(home: Home, name: str, to: int | None = None) -> list[str]:
    """Return the effect of `advance` for people; change nothing.

    Raises:
        FleetError: see `advance`.
    """
    with rollouts_lock(home):
        stored = StoredRollout(home, name)
        found, devices = _ready(home, stored, stored.read(), to, record=False)
        number = found.next_number or 0
        size = len(_of_cohort(found.plan, stored.devices(), number, devices))
        verdict = found.current.verdict or {}
        return [
            f'rollout "{name}" (plan {found.plan.digest}): firmware {found.plan.version}',
            f"passed: {verdict.get('reason')}",
            f"would start cohort {number}, up to {found.plan.cohorts[number - 1]} %: {size:,} devices",
        ]


def _ready(
    home: Home, stored: StoredRollout, found: Rollout, to: int | None, *, record: bool = True
) -> tuple[Rollout, list[ScopedDevice]]:
    """Return the record and the present fleet if the next cohort may start."""
    found.require_running()
    if to is not None and to != found.next_number:
        raise FleetError(
            f'cohort {to} of the rollout "{found.plan.name}" cannot start: {len(found.cohorts)} of {len(found.plan.cohorts)} '
            f"have started; expected the next one; omit --to",
            code="rollout-cohort-unexpected",
        )
    found, verdict, _ = _judge(home, stored, found, record=record)
    found.require_running()
    if verdict.result is not Result.PASSED:
        raise FleetError(
            f'cohort {found.current.number} of the rollout "{found.plan.name}" has not passed: {verdict.reason}; check it again '
            f"later: ./fleet rollout check {found.plan.name}",
            code="rollout-not-passed",
        )
    return found, devices_in_scope(home, _EVERY)


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
        found = stored.read()
        if owner is not None and owner != found.owner:
            raise FleetError(
                f'the rollout "{name}" belongs to {found.owner}, and --own does not stop that of another; omit --own to stop it',
                code="rollout-of-other",
            )
        if found.status is not Status.RUNNING:
            return found, False
        found = found.ended(Status.STOPPED, whoami(), wall_clock_ms(), why)
        stored.write(found)
        stored.discard()
        return found, True


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


def observation(home: Home, found: Rollout) -> Observation:
    """Return the facts about the newest cohort of a rollout."""
    from fleetpulse.settings import load_settings

    return observe_newest(home, found, expects_answers=StreamName.COMMANDS in load_settings(home.path).streams)


def _judge(home: Home, stored: StoredRollout, found: Rollout, *, record: bool = True) -> tuple[Rollout, Verdict, Observation]:
    """Judge the newest cohort, and record a final verdict."""
    seen = observation(home, found)
    if found.status is not Status.RUNNING:
        recorded = found.current.verdict or {}
        result = Result.PASSED if found.status is Status.COMPLETED else Result.STOPPED
        return found, Verdict(result, str(found.reason), recorded.get("baseline"), recorded.get("until_ms")), seen
    verdict = judge_cohort(found.plan, seen)
    if found.current.passed and verdict.result is Result.PASSED:
        return found, verdict, seen  # the first verdict stays in the record
    judged = found.judged(verdict, whoami(), wall_clock_ms())
    if record and judged != found:
        stored.write(judged)
    return judged, verdict, seen
