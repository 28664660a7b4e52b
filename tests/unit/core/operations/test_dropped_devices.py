"""Line of a plan with the number of dropped devices: the parser reads what the plan writes."""

import pytest

from fleetpulse.core.operations.dropped_devices import (
    arguments_as_planned,
    describe_dropped,
    parse_dropped,
    require_dropped_at_most,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("number", [0, 7, 1_234_567, None])
def test_the_number_of_a_plan_is_read_back(number: int | None) -> None:
    assert parse_dropped(f"snapshot version 3\n{describe_dropped(number)}\nthe end") == number


@pytest.mark.parametrize(
    ("plan", "number"),
    [
        ("", None),
        ("it says dropped devices: 0", None),
        (f"{describe_dropped(0)}\n{describe_dropped(3)}\n{describe_dropped(0)}", 3),
        (f"{describe_dropped(0)}\n{describe_dropped(None)}", None),
    ],
)
def test_a_plan_that_is_not_clear_does_not_count_as_one_that_drops_nothing(plan: str, number: int | None) -> None:
    assert parse_dropped(plan) == number


SNAPSHOT = "snapshot version 3 of generation 1 after batch 9: 5 of 5 devices; bronze is read from version 2"


def test_a_bootstrap_is_bound_to_its_plan() -> None:
    assert arguments_as_planned(f"{SNAPSHOT}\n{describe_dropped(1_200)}") == ["--version=3", "--drops-at-most=1200"]


@pytest.mark.parametrize("plan", ["", SNAPSHOT, describe_dropped(0), f"{SNAPSHOT}\nsnapshot version 4 of generation 1",
                                  f"{SNAPSHOT}\n{describe_dropped(None)}"])  # fmt: skip
def test_a_bootstrap_cannot_be_bound_to_a_plan_that_is_not_clear(plan: str) -> None:
    with refused("plan-unclear"):
        arguments_as_planned(plan)


@pytest.mark.parametrize("dropped", [4, None])
def test_a_bootstrap_that_drops_more_devices_than_permitted_is_refused(dropped: int | None) -> None:
    require_dropped_at_most(3, 3)
    with refused("bootstrap-drops-more"):
        require_dropped_at_most(dropped, 3)
