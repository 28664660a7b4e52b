"""Plans of rollouts: defaults, round trip, and all faults at once."""

from fractions import Fraction
from typing import Any

import pytest

from fleetpulse.core.rollouts.plan import RolloutPlanFault, parse_rollout_plan

pytestmark = pytest.mark.unit
CONTENT = {"name": "pumps-2.4.1", "version": "2.4.1", "scope": "device_class = 'pump'", "soak": "30m"}


def test_a_plan_has_defaults() -> None:
    plan = parse_rollout_plan(CONTENT)
    assert (plan.cohorts, plan.soak_ms, plan.flash_ms, plan.least_devices) == ((10, 50, 100), 1_800_000, 300_000, 20)
    assert plan.most_offline == plan.most_errors == 5


def test_a_plan_is_read_back_from_its_content_and_its_digest_follows_it() -> None:
    plan = parse_rollout_plan({**CONTENT, "bounds": {"offline": 0.1, "errors": 0}})
    assert plan.most_offline == Fraction(1, 10)
    again = parse_rollout_plan(plan.content())
    assert again == plan and again.digest == plan.digest
    assert parse_rollout_plan({**CONTENT, "soak": "31m"}).digest != parse_rollout_plan(CONTENT).digest


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("name", "../x", "name must have"),
        ("name", "", "name must have"),
        ("name", 4, "name must have"),
        ("version", "", "version must be"),
        ("scope", "firmware", "scope the filter"),
        ("scope", None, "scope must be a filter"),
        ("cohorts", [10, 50], "cohorts must be"),
        ("cohorts", [50, 10, 100], "cohorts must be"),
        ("cohorts", [10, 10, 100], "cohorts must be"),
        ("cohorts", [0, 100], "cohorts must be"),
        ("cohorts", [True, 100], "cohorts must be"),
        ("cohorts", [*range(1, 11), 100], "cohorts must be"),
        ("cohorts", [], "cohorts must be"),
        ("cohorts", 100, "cohorts must be"),
        ("soak", "0s", "soak must lie"),
        ("soak", 30, "soak must be a duration"),
        ("soak", "soon", "soak a duration"),
        ("flash", "2d", "flash must lie"),
        ("least_devices", 0, "least_devices must be"),
        ("least_devices", 2.0, "least_devices must be"),
        ("bounds", 5, "[bounds] must be a table"),
        ("bounds", {"offline": -1}, "bounds.offline must be"),
        ("bounds", {"offline": True}, "bounds.offline must be"),
        ("bounds", {"errors": 100}, "bounds.errors must be"),
        ("bounds", {"errors": float("nan")}, "bounds.errors must be"),
        ("bounds", {"speed": 1}, '"bounds.speed" is unknown'),
        ("speed", 1, '"speed" is unknown'),
    ],
)
def test_an_invalid_plan_names_its_fault(key: str, value: Any, fault: str) -> None:
    with pytest.raises(RolloutPlanFault) as found:
        parse_rollout_plan({**CONTENT, key: value})
    assert len(found.value.faults) == 1 and found.value.faults[0].startswith(fault)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(RolloutPlanFault) as found:
        parse_rollout_plan({"cohorts": [1], "x": 1})
    assert [fault.split()[0] for fault in found.value.faults] == ['"x"', "cohorts", "name", "scope", "soak", "version"]
