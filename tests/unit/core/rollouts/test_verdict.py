"""Verdicts about a cohort: each condition, its arithmetic, and the order of the conditions."""

from dataclasses import replace

import pytest

from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.verdict import Answers, Counts, Observation, Result, judge_cohort

pytestmark = pytest.mark.unit
PLAN = parse_rollout_plan({"name": "r", "version": "2", "scope": "TRUE", "soak": "10m", "least_devices": 20})
START = 1_700_000_000_000
SOAKED = Observation(1, START, START + 600_000, Counts(100), Counts(900), Counts(100))


def test_a_cohort_that_is_as_good_as_the_rest_passes_at_the_end_of_its_soak() -> None:
    seen = replace(SOAKED, cohort=Counts(100, 6, 5), rest=Counts(900, 9, 0))
    verdict = judge_cohort(PLAN, seen)
    assert (verdict.result, verdict.baseline, verdict.until_ms) == (Result.PASSED, "rest", START + 600_000)
    assert "6 of 100 (6.0 %) devices went offline, of the rest 9 of 900 (1.0 %): 5.0 points more, within" in verdict.reason
    assert judge_cohort(PLAN, replace(seen, through_ms=START + 599_999)).result is Result.WAITING


@pytest.mark.parametrize("elapsed_ms", [1, 600_000, 900_000])
def test_a_cohort_stops_as_soon_as_a_rate_exceeds_that_of_the_rest_by_more_than_the_bound(elapsed_ms: int) -> None:
    seen = replace(SOAKED, through_ms=START + elapsed_ms)
    offline = judge_cohort(PLAN, replace(seen, cohort=Counts(100, 7, 5), rest=Counts(900, 9, 0)))
    assert offline.result is Result.STOPPED
    assert "7 of 100 (7.0 %) devices went offline, of the rest 9 of 900 (1.0 %): 6.0 points more, above" in offline.reason
    assert "had errors" not in offline.reason
    errors = judge_cohort(PLAN, replace(seen, cohort=Counts(100, 0, 6)))
    assert errors.result is Result.STOPPED and "6 of 100 (6.0 %) devices had errors" in errors.reason


def test_a_failing_rest_excuses_a_cohort() -> None:
    seen = replace(SOAKED, cohort=Counts(100, 50, 50), rest=Counts(900, 450, 450))
    assert judge_cohort(PLAN, seen).result is Result.PASSED
    better = judge_cohort(PLAN, replace(seen, cohort=Counts(100)))
    assert better.result is Result.PASSED and "50.0 points less" in better.reason


def test_the_last_cohort_is_compared_with_its_own_past() -> None:
    seen = replace(SOAKED, cohort=Counts(100, 10, 0), rest=Counts(19, 19, 19), before=Counts(100, 5, 0))
    verdict = judge_cohort(PLAN, seen)
    assert (verdict.result, verdict.baseline) == (Result.PASSED, "before")
    assert "of these devices in the 10m before 5 of 100 (5.0 %)" in verdict.reason
    assert judge_cohort(PLAN, replace(seen, before=Counts(100, 4, 0))).result is Result.STOPPED


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        (replace(SOAKED, from_ms=None), "are not sent yet"),
        (replace(SOAKED, through_ms=None), "nothing is judged yet"),
        (replace(SOAKED, through_ms=START), "nothing is judged yet"),
        (replace(SOAKED, cohort=Counts(19, 19, 19)), "19 devices of the cohort were connected"),
        (replace(SOAKED, cohort=Counts(0), rest=Counts(0), before=Counts(0)), "0 devices of the cohort were connected"),
        (replace(SOAKED, answers=Answers(60, 19, 11, 10)), "19 devices acknowledged the command"),
    ],
)
def test_a_cohort_waits_for_each_condition(seen: Observation, missing: str) -> None:
    verdict = judge_cohort(PLAN, seen)
    assert verdict.result is Result.WAITING and missing in verdict.reason


def test_a_cohort_without_acknowledgements_still_stops() -> None:
    """A device that dies while it installs the version never answers."""
    seen = replace(SOAKED, cohort=Counts(100, 100, 0), answers=Answers(0, 0, 0, 100))
    assert judge_cohort(PLAN, seen).result is Result.STOPPED
    assert judge_cohort(PLAN, replace(SOAKED, answers=Answers(80, 20))).result is Result.PASSED
