"""Deferrable sensors: a reached state does not defer, and a timeout fails with a reason."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow import OF_AIRFLOW
from tests.support.airflow_tasks import Context, batch, place

pytestmark = OF_AIRFLOW


def test_a_reached_batch_is_not_waited_for(tmp_path: Path) -> None:
    from fleetpulse.orchestration.sensors import WaitForBatch

    batch(tmp_path, 4)
    assert WaitForBatch(task_id="watch", batch=4, place=place(tmp_path)).execute(Context()) == 4


def test_a_missing_batch_is_deferred_to_a_trigger_with_a_delayed_first_poll(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from fleetpulse.orchestration.sensors import WaitForBatch
    from fleetpulse.orchestration.triggers import StreamAtBatch

    batch(tmp_path, 4)
    with pytest.raises(TaskDeferred) as deferred:
        WaitForBatch(task_id="watch", more=2, place=place(tmp_path)).execute(Context())
    assert deferred.value.timeout == timedelta(minutes=12), "the wait ends without a triggerer as well"
    trigger = deferred.value.trigger
    assert isinstance(trigger, StreamAtBatch)
    assert (trigger.wanted, trigger.first_s) == (6, 5.0)


def test_a_wait_without_a_triggerer_fails_with_a_reason(tmp_path: Path) -> None:
    from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
    from airflow.sdk.exceptions import AirflowFailException, TaskDeferralError

    from fleetpulse.orchestration.sensors import WaitForBatch

    context = Context()
    task = WaitForBatch(task_id="watch", batch=3, place=place(tmp_path))
    with pytest.raises(
        AirflowFailException, match=r"^the triggerer did not respond within 0:12:00; check that it runs"
    ) as caught:
        task.resume_execution(TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT}, context)
    assert context.left == {"refused": str(caught.value)}
    with pytest.raises(TaskDeferralError):  # a failed trigger is retried
        task.resume_execution(TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_FAILURE}, context)
    assert task.resume_execution("decide", {"event": {"reached": True, "wanted": 3, "at": 5}}, context) == 5


@pytest.mark.parametrize("at", [None, 2])
def test_a_batch_not_reached_in_time_fails_with_a_reason_for_the_outcome(tmp_path: Path, at: int | None) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.sensors import WaitForBatch

    context = Context()
    task = WaitForBatch(task_id="watch", batch=3, place=place(tmp_path))
    assert task.decide(context, {"reached": True, "wanted": 3, "at": 5}) == 5
    with pytest.raises(AirflowFailException, match=r"^the stream did not reach batch 3: .* after 0:10:00; see the log") as caught:
        task.decide(context, {"reached": False, "wanted": 3, "at": at})
    assert ("no batch was committed" if at is None else "batch 2 was the newest") in str(caught.value)
    assert context.left == {"refused": str(caught.value)}


def test_a_frontier_not_reached_in_time_is_reported_as_an_instant(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.sensors import WaitForFrontier

    task = WaitForFrontier(task_id="judged", instant="2026-01-02T00:00:00Z", place=place(tmp_path))
    with pytest.raises(AirflowFailException, match=r"did not reach 2026-01-02T00:00:00Z: it was at 1970-01-01T00:00:01"):
        task.decide(Context(), {"reached": False, "wanted": 2, "at": 1_000})


@pytest.mark.parametrize(
    ("event", "reason", "result"),
    [
        ({"error": "Traceback: late", "error_type": "timeout"}, "no answer within 12:00:00", "approval-timeout"),
        ({"error": "the answer is none of those", "error_type": "validation"}, "the answer is none of those", "approval-invalid"),
    ],
)
def test_a_missing_approval_fails_with_a_reason_is_audited_and_is_not_requested_again(
    event: dict[str, Any], reason: str, result: str, tmp_path: Path
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.sensors import Approval
    from fleetpulse.reports.operations.audit import audited_actions

    context, home = Context(), Home(tmp_path / "home")
    home.prepare(None)
    approval = Approval(task_id="approve", question="Migrate?", response_timeout=timedelta(hours=12), place=place(home.path))
    with pytest.raises(AirflowFailException, match=f"^{reason}$"):
        approval.execute_complete(context, event)
    assert context.left == {"refused": reason}
    assert [(one["action"], one["result"]) for one in audited_actions(home)] == [("approval", result)]
