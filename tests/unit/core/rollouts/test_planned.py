"""Line of a plan with the number of devices: the parser reads what the plan writes."""

import pytest

from fleetpulse.core.rollouts.planned import arguments_as_planned, describe_devices
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("number", [0, 7, 1_234_567])
def test_a_start_is_bound_to_the_number_in_its_plan(number: int) -> None:
    plan = f"rollout\n{describe_devices(number, 'TRUE')}\ncohort 1: 9 devices: 9 (TRUE)"
    assert arguments_as_planned(plan) == [f"--devices-at-most={number}"]


@pytest.mark.parametrize(
    "plan", ["", "it has devices: 7 (TRUE)", f"{describe_devices(7, 'TRUE')}\n{describe_devices(8, 'TRUE')}"]
)
def test_a_plan_that_is_not_clear_binds_no_start(plan: str) -> None:
    with refused("plan-unclear"):
        arguments_as_planned(plan)
