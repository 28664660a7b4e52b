"""The quick benchmark keeps to its budget: what must run does, and the rest while there is time."""

import pytest

from bench.lifecycle import plans as courses
from bench.lifecycle.schedule import Schedule

pytestmark = pytest.mark.unit
SMALL, LARGE = courses.SIZES
BUDGET_S = courses.QUICK_BUDGET_S
WARMING = [(-2, SMALL), (-1, SMALL), (0, SMALL)]
ONE_EACH = [(1, SMALL), (1, LARGE)]


class _Clock:
    """Stands still but for what is said to have been done."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def _run(plan: courses.Plan, warm_up_s: float, small_s: float, large_s: float) -> tuple[list[tuple[int, int]], Schedule, float]:
    """Return which rounds of which fleet are run where each takes so long, and how long all took."""
    clock = _Clock()
    pace, ran = Schedule(plan, clock), list[tuple[int, int]]()
    clock.now_s += warm_up_s
    for step in pace.steps():
        clock.now_s += large_s if step.course.fleet.devices == LARGE else small_s
        ran.append((step.number, step.course.fleet.devices))
    return ran, pace, clock.now_s - 1_000


QUICK = courses.PLANS[courses.QUICK](())


def test_where_there_is_time_every_round_is_run() -> None:
    ran, pace, took_s = _run(QUICK, 60, 15, 50)
    assert ran == [*WARMING, *ONE_EACH, (2, SMALL), (2, LARGE)] and took_s <= BUDGET_S
    assert pace.left_out == []
    assert [pace.note(place, 2) for place in (0, 1)] == [None, None]


def test_a_second_round_of_the_greater_fleet_is_run_only_where_what_the_first_took_is_left() -> None:
    for warm_up_s, fits in ((95.0, True), (96.0, False)):
        ran, pace, took_s = _run(QUICK, warm_up_s, 15, 50)
        assert ((2, LARGE) in ran) is fits and took_s <= BUDGET_S
        assert [step.course.fleet.devices for step in pace.left_out] == ([] if fits else [LARGE])
    assert pace.note(1, 1) == "1 measured round"


def test_warm_rounds_make_way_for_the_measured_ones_of_all_fleets() -> None:
    ran, pace, took_s = _run(QUICK, 150, 22, 62)
    assert ran == [WARMING[0], *ONE_EACH] and took_s <= BUDGET_S
    assert pace.note(0, 1) == "1 measured round, after 1 of 3 warm-up rounds"
    assert pace.note(1, 1) == "1 measured round"


def test_a_round_of_each_fleet_is_measured_however_slow_the_machine_is() -> None:
    ran, _, _ = _run(QUICK, 2 * BUDGET_S, 60, 180)
    assert ran == [WARMING[0], *ONE_EACH]


@pytest.mark.parametrize("warm_up_s", range(0, 200, 10))
@pytest.mark.parametrize("slower", [0.5, 1, 1.5])
def test_the_budget_holds_wherever_what_must_run_fits_into_it(warm_up_s: int, slower: float) -> None:
    small_s, large_s = 18 * slower, 51 * slower
    _, _, took_s = _run(QUICK, warm_up_s, small_s, large_s)
    assert took_s <= max(BUDGET_S, warm_up_s + 2 * small_s + large_s)


def test_a_plan_without_a_budget_runs_all_and_notes_nothing() -> None:
    full = courses.PLANS[courses.FULL](())
    ran, pace, _ = _run(full, 10_000, 10_000, 10_000)
    assert len(ran) == sum(course.rounds + course.warm_rounds for course in full.courses)
    assert (pace.left_out, pace.note(0, 3)) == ([], None)


def test_some_of_the_contenders_have_the_same_budget() -> None:
    assert QUICK.restricted([courses.OURS]).budget_s == BUDGET_S
