"""Deferrable sensors that wait for a batch, the frontier, or a person's approval.

Rule 1: each wait ends within its timeout, and its error names the unmet condition. If no
triggerer runs, the scheduler ends the wait a little later.
Rule 2: a condition that already holds ends the wait at once. Airflow fails a task that resumes too
early ("state attribute is queued"). The scheduler needs a second or two to record that the deferred
task has left its executor. A trigger therefore starts to poll after `SETTLE_S`. The approval cannot
be delayed like this, so it has a retry, which asks again.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import BaseOperator
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralTimeout

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.dropped_devices import parse_dropped
from fleetpulse.core.times import format_instant, parse_instant_ms
from fleetpulse.orchestration.approval_audit import record_answer
from fleetpulse.orchestration.approvals import RunApproval, find_objection, permitted_approvers
from fleetpulse.orchestration.config import CONFIG, OrchestrationConfig
from fleetpulse.orchestration.operators.verbs import ANSWERED, failing, publish_reason
from fleetpulse.orchestration.triggers import FrontierPast, Reaching, StreamAtBatch, batch_of

_STOPS: Final = "The stream stops during the change; messages received meanwhile are judged afterwards."
PATIENCE: Final = timedelta(minutes=10)
SETTLE_S: Final = 5.0
_SIMPLE: Final = ".SimpleAuthManager"  # end of the class path of Airflow's simple auth manager, whose users are fixed names
GRACE: Final = timedelta(minutes=2)  # on top of the timeout: a live trigger ends the wait first, with the details


class _Wait(BaseOperator):
    """Base of the sensors that wait for the stream.

    Args:
        patience: timeout after which the task fails.
        place: configuration of the installation.
    """

    def __init__(self, *, patience: timedelta = PATIENCE, place: OrchestrationConfig = CONFIG, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patience, self.place = patience, place

    def until(self, trigger: type[Reaching], target: int) -> int:
        """Return the reached number if it suffices; otherwise defer to the triggerer.

        Args:
            trigger: class of the trigger, which also reads the present number.
            target: the number to reach.
        """
        home, until_s = str(self.place.home), time.time() + self.patience.total_seconds()
        at = trigger.look(home)
        if at is None or at < target:
            waits = trigger(home=home, wanted=target, until_s=until_s, first_s=SETTLE_S)
            self.defer(trigger=waits, method_name="decide", timeout=self.patience + GRACE)
        return at

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """Resume after the wait.

        Raises:
            AirflowFailException: the scheduler ended the wait.
        """
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            reason = f"the triggerer did not respond within {self.patience + GRACE}; check that it runs, and read its log"
            raise _failure(context, reason) from None

    def decide(self, context: Mapping[str, Any], event: dict[str, Any]) -> int:
        """Return the number that was reached.

        Raises:
            AirflowFailException: the number was not reached within the timeout.
        """
        if event["reached"]:
            return int(event["at"])
        raise _failure(context, self.missed(event["wanted"], event["at"]))

    @abstractmethod
    def missed(self, target: int, at: int | None) -> str:
        """Return the error message for a condition that was not met in time."""


class WaitForBatch(_Wait):
    """Wait until the stream has committed a batch; return the newest batch.

    Args:
        more: number of batches to wait for, counted from the newest at the start of the wait;
            ignored with ``batch``.
        batch: number of the batch to wait for; None to count by ``more``.
        patience: timeout after which the task fails.
        place: configuration of the installation.
    """

    def __init__(self, *, more: int = 2, batch: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.more, self.batch = more, batch

    def execute(self, context: Mapping[str, Any]) -> int:
        """Check the condition, and defer if it is not met."""
        target = self.batch
        if target is None:
            at = batch_of(str(self.place.home))
            target = (-1 if at is None else at) + self.more
        return self.until(StreamAtBatch, target)

    def missed(self, target: int, at: int | None) -> str:
        """Return the error message, with the newest batch."""
        newest = "no batch was committed" if at is None else f"batch {at} was the newest"
        return f"the stream did not reach batch {target}: {newest} after {self.patience}; see the log of the lifecycle job"


class WaitForFrontier(_Wait):
    """Wait until the frontier passes an instant; return it in epoch milliseconds.

    Args:
        instant: event time in ISO 8601 with a time zone; a template.
        patience: timeout after which the task fails.
    """

    template_fields: ClassVar[Sequence[str]] = ("instant",)

    def __init__(self, *, instant: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.instant = instant

    def execute(self, context: Mapping[str, Any]) -> int:
        """Check the condition, and defer if it is not met."""
        return self.until(FrontierPast, parse_instant_ms(self.instant))

    def missed(self, target: int, at: int | None) -> str:
        """Return the error message, with the frontier."""
        judged = "nothing was judged" if at is None else f"it was at {format_instant(at)}"
        return f"the frontier did not reach {self.instant}: {judged} after {self.patience}; see: ./fleet status"


class Approval(ApprovalOperator):
    """Ask a person to approve the plan of the run; *Reject* skips the later tasks.

    The approver must not be the user who triggered the run, see `approvals.find_objection`. A
    request without an answer in time fails the task and is not repeated. The answer has a record in
    the table ``audit``.

    Args:
        question: question to the approver.
        if_dropping: whether to ask only if the plan drops devices, or an unknown number of them.
        step: step of the run that is approved, see `RunApproval`.
        note: effect of an approval, shown below the plan.
        place: configuration of the installation.
    """

    def __init__(
        self,
        *,
        question: str,
        if_dropping: bool = False,
        step: str = "",
        note: str = _STOPS,
        place: OrchestrationConfig = CONFIG,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            subject=question, retries=1, retry_delay=timedelta(seconds=1), execution_timeout=None, **kwargs
        )  # retries: see rule 2
        self.if_dropping, self.step, self.note = if_dropping, step, note
        self.place = place

    def execute(self, context: Any) -> Any:
        """Show the plan, and wait for the answer; approve at once if no approval is needed.

        Raises:
            AirflowFailException: the run has no plan, or nobody may approve it.
        """
        run, approval = context["dag_run"], RunApproval(self.place, context, self.step)
        with failing(context):
            plan = approval.plan()
            dropped = parse_dropped(plan)
            if self.if_dropping and dropped == 0:
                approval.approve("nobody: the plan drops no device")
                return None
            approvers = permitted_approvers(self.place, run, self_approval=self._self_approval(), cleared=approval.cleared)
        if self.if_dropping:
            number = "An unknown number of" if dropped is None else f"{dropped:,}"
            self.subject = f"{self.subject} {number} devices are dropped."
        if _has_simple_users():  # with others, Airflow compares ids that are not the names; `execute_complete` compares both
            self.assigned_users = [{"id": name, "name": name} for name in approvers] or None
        by = run.triggering_user_name or f"nobody ({run.run_type})"
        shown = plan.replace("\n", "\n\n")
        self.body = (
            f"Triggered by: {by}\n\nParameters: `{approval.parameters}`\n\nThe plan of the dry run:\n\n{shown}\n\n{self.note}"
        )
        return super().execute(context)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Process the answer.

        Raises:
            AirflowFailException: no answer came in time, the answer is invalid, or the user may not
                approve this run.
        """
        run, user = context.get("dag_run"), event.get("responded_by_user")
        objection = None
        if self.APPROVE in event.get("chosen_options", ()):
            try:
                cleared = RunApproval(self.place, context, self.step).cleared
                objection = find_objection(self.place, run, user, self_approval=self._self_approval(), cleared=cleared)
            except FleetError as error:
                objection = error
        record_answer(self.place.home, run, event, self.task_id, objection)
        if "error" in event:
            late = event.get("error_type") == "timeout"
            raise _failure(context, f"no answer within {self.response_timeout}" if late else str(event["error"]))
        with failing(context):
            if objection is not None:
                raise objection
            if self.APPROVE in event["chosen_options"]:
                RunApproval(self.place, context, self.step).approve(str((user or {}).get("name")))
        context["ti"].xcom_push(key=ANSWERED, value=event["chosen_options"])
        return super().execute_complete(context, event)

    def _self_approval(self) -> bool:
        """Whether the user who triggered a run may approve it."""
        return self.place.self_approval and _has_simple_users()


def _has_simple_users() -> bool:
    """Whether the users are those of Airflow's simple auth manager."""
    return conf.get("core", "auth_manager").endswith(_SIMPLE)


def _failure(context: Mapping[str, Any], reason: str) -> AirflowFailException:
    """Publish a reason to other tasks; return an exception that fails without a retry."""
    publish_reason(context, reason)
    return AirflowFailException(reason)
