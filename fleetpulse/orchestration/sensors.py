"""What waits without a slot or a process: for the stream, in the triggerer, and for a person.

Rule 1: each ends, one way or the other, within its patience, and says in a sentence what did not come; where no triggerer runs
the scheduler ends it, a little later.
Rule 2: what is there already is not waited for. Airflow fails a task that resumes before its executor has told the scheduler
that the first half has left (a second or two; "state attribute is queued"): so a trigger looks first after `SETTLE_S`, and
what may still meet this has a retry, which asks or waits anew.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralTimeout

from fleetpulse.core.times import format_instant, parse_instant_ms
from fleetpulse.orchestration.config import PLACE, OrchestrationConfig
from fleetpulse.orchestration.operators import ANSWERED, leave
from fleetpulse.orchestration.triggers import FrontierPast, Reaching, StreamAtBatch, batch_of

PATIENCE: Final = timedelta(minutes=10)
SETTLE_S: Final = 5.0
GRACE: Final = timedelta(minutes=2)  # beyond its patience: a trigger that lives ends the wait first, and knows what did not come


class _Wait(BaseOperator):
    """What the waits for the stream share.

    Args:
        patience: after it the task fails.
        place: the installation.
    """

    def __init__(self, *, patience: timedelta = PATIENCE, place: OrchestrationConfig = PLACE, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patience, self.place = patience, place

    def until(self, trigger: type[Reaching], wanted: int) -> int:
        """Return what is reached where that is enough; else leave the waiting to the triggerer."""
        home, until_s = str(self.place.home), time.time() + self.patience.total_seconds()
        at = trigger.look(home)
        if at is None or at < wanted:
            waits = trigger(home=home, wanted=wanted, until_s=until_s, first_s=SETTLE_S)
            self.defer(trigger=waits, method_name="decide", timeout=self.patience + GRACE)
        return at

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """Go on after the wait.

        Raises:
            AirflowFailException: the scheduler has ended it.
        """
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            reason = f"nobody has looked within {self.patience + GRACE}: see whether the triggerer runs, and its log"
            raise _failure(context, reason) from None

    def decide(self, context: Mapping[str, Any], event: dict[str, Any]) -> int:
        """Return what was reached.

        Raises:
            AirflowFailException: it was not, within the patience.
        """
        if event["reached"]:
            return int(event["at"])
        raise _failure(context, self.missed(event["wanted"], event["at"]))

    @abstractmethod
    def missed(self, wanted: int, at: int | None) -> str:
        """Return the sentence that says what did not come."""


class WaitForBatch(_Wait):
    """Wait until the stream has committed batches; returns the batch.

    Args:
        more: so many after the newest that there is when the wait begins; not with ``batch``.
        batch: or this one, or a later.
        patience: after it the task fails.
        place: the installation.
    """

    def __init__(self, *, more: int = 2, batch: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.more, self.batch = more, batch

    def execute(self, context: Mapping[str, Any]) -> int:
        """Look, and wait."""
        wanted = self.batch
        if wanted is None:
            at = batch_of(str(self.place.home))
            wanted = (-1 if at is None else at) + self.more
        return self.until(StreamAtBatch, wanted)

    def missed(self, wanted: int, at: int | None) -> str:
        """Return the sentence that says what did not come."""
        newest = "none was committed" if at is None else f"batch {at} was the newest"
        return f"the stream does not come to batch {wanted}: {newest} after {self.patience}; see the log of the lifecycle job"


class WaitForFrontier(_Wait):
    """Wait until all up to an instant of event time is judged; returns the frontier, epoch milliseconds.

    Args:
        instant: ISO 8601 with a zone; a template.
        patience: after it the task fails.
        place: the installation.
    """

    template_fields: ClassVar[Sequence[str]] = ("instant",)

    def __init__(self, *, instant: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.instant = instant

    def execute(self, context: Mapping[str, Any]) -> int:
        """Look, and wait."""
        return self.until(FrontierPast, parse_instant_ms(self.instant))

    def missed(self, wanted: int, at: int | None) -> str:
        """Return the sentence that says what did not come."""
        judged = "nothing is judged" if at is None else f"judged is what happened up to {format_instant(at)}"
        return f"the frontier does not come to {self.instant}: {judged} after {self.patience}; see: ./fleet status"


class Approval(ApprovalOperator):
    """Ask a person; *Reject* skips what follows. Who does not answer in time is not asked again."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(retries=1, retry_delay=timedelta(seconds=1), execution_timeout=None, **kwargs)  # see rule 2

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Take the answer.

        Raises:
            AirflowFailException: there was none, or none that can be taken.
        """
        if "error" in event:
            late = event.get("error_type") == "timeout"
            raise _failure(context, f"nobody answered within {self.response_timeout}" if late else str(event["error"]))
        context["ti"].xcom_push(key=ANSWERED, value=event["chosen_options"])
        return super().execute_complete(context, event)


def _failure(context: Mapping[str, Any], reason: str) -> AirflowFailException:
    """Return what ends a task for good, its reason left to the others."""
    leave(context, reason)
    return AirflowFailException(reason)
