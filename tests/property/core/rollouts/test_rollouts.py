"""Laws of rollouts: the assignment to cohorts, and the verdict as a function of the bounds."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.rollouts.cohorts import cohort_of, cohort_sizes, command_id
from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.verdict import Answers, Counts, Observation, Result, judge_cohort

pytestmark = pytest.mark.property
COHORTS = st.lists(st.integers(1, 99), unique=True, max_size=6).map(lambda shares: (*sorted(shares), 100))
PLAN = parse_rollout_plan({"name": "r", "version": "2", "scope": "TRUE", "soak": "10m", "least_devices": 20})
IDS = [f"pump-{number}" for number in range(4_000)]


@given(st.text(max_size=20), st.text(max_size=20), COHORTS, st.integers(0, 5))
def test_more_cohorts_divide_cohorts_and_move_no_device_between_the_others(
    rollout: str, device_id: str, cohorts: tuple[int, ...], place: int
) -> None:
    removed = cohorts[place] if place < len(cohorts) - 1 else None
    fewer = tuple(share for share in cohorts if share != removed)
    share = cohorts[cohort_of(rollout, device_id, cohorts) - 1]
    expected = share if share != removed else cohorts[place + 1]
    assert fewer[cohort_of(rollout, device_id, fewer) - 1] == expected


@given(st.text(max_size=20), COHORTS)
def test_the_share_of_each_cohort_is_near_its_per_cent(rollout: str, cohorts: tuple[int, ...]) -> None:
    sizes = cohort_sizes(rollout, IDS, cohorts)
    assert sum(sizes) == len(IDS)
    for place, share in enumerate(cohorts):
        reached = 100 * sum(sizes[: place + 1]) / len(IDS)
        assert abs(reached - share) < 6 * 0.8, "six standard deviations of 4,000 draws"


@given(st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9))
def test_another_rollout_begins_with_other_devices(one: str, other: str) -> None:
    begins = [{name for name in IDS[:1_000] if cohort_of(rollout, name, (10, 100)) == 1} for rollout in (one, other)]
    assert (begins[0] == begins[1]) is (one == other)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.sampled_from(IDS[:9])), unique=True))
def test_command_ids_differ_by_rollout_cohort_and_device(of: list[tuple[str, int, str]]) -> None:
    ids = [command_id(*one) for one in of]
    assert len({*ids}) == len(ids) and ids == [command_id(*one) for one in of]


def counts(draw: st.DrawFn) -> Counts:
    devices = draw(st.integers(0, 60))
    return Counts(devices, draw(st.integers(0, devices)), draw(st.integers(0, devices)))


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    start = 1_700_000_000_000
    answers = draw(st.none() | st.builds(Answers, *[st.integers(0, 40)] * 4))
    through = draw(st.none() | st.integers(start - 1, start + 1_200_000))
    cohort = counts(draw)
    before = replace(cohort, offline=draw(st.integers(0, cohort.devices)), errors=draw(st.integers(0, cohort.devices)))
    return Observation(1, draw(st.sampled_from([start, start, None])), through, cohort, counts(draw), before, answers)


BOUND = st.integers(0, 400).map(lambda quarters: Fraction(quarters, 4))


@given(observations(), BOUND, BOUND, BOUND, BOUND)
def test_wider_bounds_stop_no_further_cohort_and_hold_back_none(
    seen: Observation, offline: Fraction, errors: Fraction, more: Fraction, still_more: Fraction
) -> None:
    narrow = judge_cohort(replace(PLAN, most_offline=offline, most_errors=errors), seen).result
    wide = judge_cohort(replace(PLAN, most_offline=offline + more, most_errors=errors + still_more), seen).result
    permitted = {Result.STOPPED: {*Result}, Result.PASSED: {Result.PASSED}, Result.WAITING: {Result.WAITING}}
    assert wide in permitted[narrow]


@given(observations(), st.integers(1, 40))
def test_a_worse_cohort_never_gets_a_better_verdict(seen: Observation, more: int) -> None:
    worse = replace(seen, cohort=replace(seen.cohort, offline=min(seen.cohort.devices, seen.cohort.offline + more)))
    order = [Result.STOPPED, Result.WAITING, Result.PASSED]
    assert order.index(judge_cohort(PLAN, worse).result) <= order.index(judge_cohort(PLAN, seen).result)


@given(observations(), st.integers(1, 60), st.integers(0, 60), st.integers(0, 60))
def test_a_rest_of_enough_devices_alone_decides_the_comparison(
    seen: Observation, devices: int, offline: int, errors: int
) -> None:
    other = Counts(seen.before.devices, min(offline, seen.before.devices), min(errors, seen.before.devices))
    if seen.rest.devices >= PLAN.least_devices:
        assert judge_cohort(PLAN, replace(seen, before=other)) == judge_cohort(PLAN, seen)
    else:
        rest = Counts(min(devices, 19), 0, 0)
        assert judge_cohort(PLAN, replace(seen, rest=rest)) == judge_cohort(PLAN, seen)
