"""Record of a rollout: the permitted steps, its end, and its stored form."""

import json

import pytest

from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.rollout import Rollout, Status, from_plain
from fleetpulse.core.rollouts.verdict import Result, Verdict
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
PLAN = parse_rollout_plan({"name": "r", "version": "2", "scope": "TRUE", "soak": "10m", "cohorts": [50, 100]})
NEW = Rollout(PLAN, 100, "ann")
PASSED, STOPPED, WAITING = (Verdict(result, f"it {result}") for result in (Result.PASSED, Result.STOPPED, Result.WAITING))


def test_a_cohort_starts_only_after_the_one_before_has_passed() -> None:
    first = NEW.starting(49, "ann", 1).sent(2)
    with refused("rollout-not-passed"):
        first.starting(51, "bob", 3)
    with refused("rollout-not-passed"):
        first.judged(WAITING, "bob", 3).starting(51, "bob", 3)
    second = first.judged(PASSED, "bob", 3).starting(51, "cy", 4)
    assert [(one.number, one.devices, one.requester, one.started_ms, one.sent_ms) for one in second.cohorts] == [
        (1, 49, "ann", 1, 2),
        (2, 51, "cy", 4, None),
    ]
    with refused("rollout-no-cohort"):
        second.sent(5).starting(1, "cy", 5)


def test_the_last_passed_cohort_completes_a_rollout() -> None:
    found = NEW.starting(49, "ann", 1).sent(2).judged(PASSED, "bob", 3)
    assert (found.status, found.ended_ms) == (Status.RUNNING, None)
    done = found.starting(51, "ann", 4).sent(5).judged(PASSED, "bob", 6)
    assert (done.status, done.ended_ms, done.end_requester, done.reason) == (Status.COMPLETED, 6, "bob", "it passed")
    with refused("rollout-ended"):
        done.ended(Status.STOPPED, "ann", 7, "late")


def test_a_stopped_rollout_never_continues() -> None:
    stopped = NEW.starting(49, "ann", 1).sent(2).judged(PASSED, "bob", 3).judged(STOPPED, "bob", 4)
    assert (stopped.status, stopped.reason, stopped.current.passed) == (Status.STOPPED, "it stopped", False)
    assert stopped.judged(PASSED, "bob", 5) == stopped
    with refused("rollout-ended"):
        stopped.starting(51, "ann", 5)


def test_a_record_is_read_back() -> None:
    for found in (NEW.starting(49, "ann", 1), NEW.starting(49, "ann", 1).sent(2).judged(STOPPED, "bob", 3)):
        assert from_plain(json.loads(json.dumps(found.plain()))) == found


@pytest.mark.parametrize("change", [{"form": 1}, {"status": "odd"}, {"plan": {}}, {"cohorts": [{"odd": 1}]}])
def test_a_damaged_record_is_refused(change: dict[str, object]) -> None:
    with refused("rollout-record-damaged"):
        from_plain({**NEW.plain(), **change})
    with refused("rollout-record-damaged"):
        from_plain({})
