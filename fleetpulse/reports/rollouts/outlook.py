"""Outlook of a rollout: the checked effect of a plan on the present fleet.

Rule: a plan that proves nothing is refused before a device gets a command: a cohort that is too small for a statement, or a
soak that ends before a silent device is offline.

Source: ADR 49.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import Policy
from fleetpulse.core.rollouts.cohorts import cohort_sizes
from fleetpulse.core.rollouts.plan import RolloutPlan
from fleetpulse.core.rollouts.planned import describe_devices
from fleetpulse.core.times import format_duration
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.reports.rollouts.scope import ScopedDevice, devices_in_scope, longest_timeout, rules_in_force


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
