"""The waits without a slot: what is there is not waited for, and what does not come is said in a sentence."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow import OF_AIRFLOW
from tests.support.airflow_tasks import Context, batch, place

pytestmark = OF_AIRFLOW


def test_what_is_there_is_not_waited_for(tmp_path: Path) -> None:
    from fleetpulse.orchestration.sensors import WaitForBatch

    batch(tmp_path, 4)
    assert WaitForBatch(task_id="watch", batch=4, place=place(tmp_path)).execute(Context()) == 4


def test_what_is_not_there_is_left_to_the_triggerer_which_looks_when_this_worker_has_gone(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from fleetpulse.orchestration.sensors import WaitForBatch
    from fleetpulse.orchestration.triggers import StreamAtBatch

    batch(tmp_path, 4)
    with pytest.raises(TaskDeferred) as deferred:
        WaitForBatch(task_id="watch", more=2, place=place(tmp_path)).execute(Context())
    assert deferred.value.timeout == timedelta(minutes=12), "it ends without a triggerer as well"
    trigger = deferred.value.trigger
    assert isinstance(trigger, StreamAtBatch)
    assert (trigger.wanted, trigger.first_s) == (6, 5.0)


def test_a_wait_that_no_triggerer_looked_after_fails_and_says_so(tmp_path: Path) -> None:
    from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
    from airflow.sdk.exceptions import AirflowFailException, TaskDeferralError

    from fleetpulse.orchestration.sensors import WaitForBatch

    context = Context()
    task = WaitForBatch(task_id="watch", batch=3, place=place(tmp_path))
    with pytest.raises(AirflowFailException, match=r"^the triggerer did not respond within 0:12:00; check that it runs") as told:
        task.resume_execution(TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT}, context)
    assert context.left == {"refused": str(told.value)}
    with pytest.raises(TaskDeferralError):  # the trigger failed: that is tried again
        task.resume_execution(TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_FAILURE}, context)
    assert task.resume_execution("decide", {"event": {"reached": True, "wanted": 3, "at": 5}}, context) == 5


@pytest.mark.parametrize("at", [None, 2])
def test_a_batch_that_does_not_come_is_said_and_left_to_the_outcome(tmp_path: Path, at: int | None) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.sensors import WaitForBatch

    context = Context()
    task = WaitForBatch(task_id="watch", batch=3, place=place(tmp_path))
    assert task.decide(context, {"reached": True, "wanted": 3, "at": 5}) == 5
    with pytest.raises(AirflowFailException, match=r"^the stream did not reach batch 3: .* after 0:10:00; see the log") as told:
        task.decide(context, {"reached": False, "wanted": 3, "at": at})
    assert ("no batch was committed" if at is None else "batch 2 was the newest") in str(told.value)
    assert context.left == {"refused": str(told.value)}


def test_a_frontier_that_does_not_come_is_said_as_an_instant(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.sensors import WaitForFrontier

    task = WaitForFrontier(task_id="judged", instant="2026-01-02T00:00:00Z", place=place(tmp_path))
    with pytest.raises(AirflowFailException, match=r"to 2026-01-02T00:00:00Z: it was at 1970-01-01T00:00:01"):
        task.decide(Context(), {"reached": False, "wanted": 2, "at": 1_000})


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"error": "Traceback: late", "error_type": "timeout"}, "no answer within 12:00:00"),
        ({"error": "the answer is none of those", "error_type": "validation"}, "the answer is none of those"),
    ],
)
def test_an_approval_that_did_not_come_fails_with_its_reason_and_is_not_asked_for_again(event: dict[str, Any], said: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.sensors import Approval

    context = Context()
    asked = Approval(task_id="approve", subject="Migrate?", response_timeout=timedelta(hours=12))
    with pytest.raises(AirflowFailException, match=f"^{said}$"):
        asked.execute_complete(context, event)
    assert context.left == {"refused": said}
