"""Line of a plan with the number of dropped devices: the parser reads what the plan writes."""

import pytest

from fleetpulse.core.operations.dropped_devices import describe_dropped, parse_dropped

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
