"""Schedule of the quick benchmark: required rounds always run, others only within the budget."""

import pytest

from bench.lifecycle import plans
from bench.lifecycle.schedule import Schedule

pytestmark = pytest.mark.unit
SMALL, LARGE = plans.SIZES
BUDGET_S = plans.QUICK_BUDGET_S
WARMING = [(-2, SMALL), (-1, SMALL), (0, SMALL)]
ONE_EACH = [(1, SMALL), (1, LARGE)]


class _Clock:
    """Clock that only advances when a test sets it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def _run(plan: plans.Plan, warm_up_s: float, small_s: float, large_s: float) -> tuple[list[tuple[int, int]], Schedule, float]:
    """Run a plan with rounds of given durations; return the rounds, the schedule and the total time."""
    clock = _Clock()
    schedule, rounds = Schedule(plan, clock), list[tuple[int, int]]()
    clock.now_s += warm_up_s
    for step in schedule.steps():
        clock.now_s += large_s if step.workload.fleet.devices == LARGE else small_s
        rounds.append((step.number, step.workload.fleet.devices))
    return rounds, schedule, clock.now_s - 1_000


QUICK = plans.PLANS[plans.QUICK](())


def test_every_round_runs_if_the_budget_suffices() -> None:
    rounds, schedule, took_s = _run(QUICK, 60, 15, 50)
    assert rounds == [*WARMING, *ONE_EACH, (2, SMALL), (2, LARGE)] and took_s <= BUDGET_S
    assert schedule.left_out == []
    assert [schedule.note(place, 2) for place in (0, 1)] == [None, None]


def test_the_large_fleet_has_a_second_round_only_if_the_time_of_the_first_is_left() -> None:
    for warm_up_s, fits in ((95.0, True), (96.0, False)):
        rounds, schedule, took_s = _run(QUICK, warm_up_s, 15, 50)
        assert ((2, LARGE) in rounds) is fits and took_s <= BUDGET_S
        assert [step.workload.fleet.devices for step in schedule.left_out] == ([] if fits else [LARGE])
    assert schedule.note(1, 1) == "1 measured round"


def test_measured_rounds_of_all_fleets_take_precedence_over_warm_up_rounds() -> None:
    rounds, schedule, took_s = _run(QUICK, 150, 22, 62)
    assert rounds == [WARMING[0], *ONE_EACH] and took_s <= BUDGET_S
    assert schedule.note(0, 1) == "1 measured round, after 1 of 3 warm-up rounds"
    assert schedule.note(1, 1) == "1 measured round"


def test_one_round_of_each_fleet_is_measured_even_on_a_slow_machine() -> None:
    rounds, _, _ = _run(QUICK, 2 * BUDGET_S, 60, 180)
    assert rounds == [WARMING[0], *ONE_EACH]


@pytest.mark.parametrize("warm_up_s", range(0, 200, 10))
@pytest.mark.parametrize("slower", [0.5, 1, 1.5])
def test_the_budget_holds_if_the_required_rounds_fit_into_it(warm_up_s: int, slower: float) -> None:
    small_s, large_s = 18 * slower, 51 * slower
    _, _, took_s = _run(QUICK, warm_up_s, small_s, large_s)
    assert took_s <= max(BUDGET_S, warm_up_s + 2 * small_s + large_s)


def test_a_plan_without_a_budget_runs_all_rounds_and_has_no_notes() -> None:
    full = plans.PLANS[plans.FULL](())
    rounds, schedule, _ = _run(full, 10_000, 10_000, 10_000)
    assert len(rounds) == sum(workload.rounds + workload.warm_rounds for workload in full.workloads)
    assert (schedule.left_out, schedule.note(0, 3)) == ([], None)


def test_a_plan_restricted_to_some_contenders_keeps_its_budget() -> None:
    assert QUICK.restricted([plans.OURS]).budget_s == BUDGET_S
