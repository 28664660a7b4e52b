"""Sensors that wait in the triggerer: no slot, no process; each ends, one way or the other, within its patience."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from fleetpulse.core.times import format_instant, parse_instant_ms
from fleetpulse.orchestration.operators import REFUSED
from fleetpulse.orchestration.place import PLACE, Place
from fleetpulse.orchestration.triggers import FrontierPast, StreamAtBatch, batch_of

PATIENCE: Final = timedelta(minutes=10)


class WaitForBatch(BaseOperator):
    """Wait until the stream has committed batches.

    Args:
        more: so many after the newest that there is when the wait begins; 0 with ``batch``.
        batch: or this one, or a later.
        patience: after it the task fails.
        place: the installation.
    """

    def __init__(
        self,
        *,
        more: int = 2,
        batch: int | None = None,
        patience: timedelta = PATIENCE,
        place: Place = PLACE,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.more, self.batch, self.patience, self.place = more, batch, patience, place

    def execute(self, context: Mapping[str, Any]) -> None:
        """Leave the waiting to the triggerer."""
        wanted = self.batch
        if wanted is None:
            at = batch_of(str(self.place.home))
            wanted = (-1 if at is None else at) + self.more
        until_s = time.time() + self.patience.total_seconds()
        trigger = StreamAtBatch(home=str(self.place.home), batch=wanted, until_s=until_s)
        self.defer(trigger=trigger, method_name="decide")

    def decide(self, context: Mapping[str, Any], event: dict[str, Any]) -> int:
        """Return the batch that was reached.

        Raises:
            AirflowFailException: it was not, within the patience.
        """
        if event["reached"]:
            return int(event["at"])
        at = "none was committed" if event["at"] is None else f"batch {event['at']} was the newest"
        told = (
            f"the stream does not come to batch {event['wanted']}: {at} after {self.patience}; see the log of the lifecycle job"
        )
        _fail(context, told)
        raise AssertionError


class WaitForFrontier(BaseOperator):
    """Wait until all up to an instant of event time is judged.

    Args:
        instant: ISO 8601 with a zone; a template.
        patience: after it the task fails.
        place: the installation.
    """

    template_fields: ClassVar[Sequence[str]] = ("instant",)

    def __init__(self, *, instant: str, patience: timedelta = PATIENCE, place: Place = PLACE, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.instant, self.patience, self.place = instant, patience, place

    def execute(self, context: Mapping[str, Any]) -> None:
        """Leave the waiting to the triggerer."""
        wanted_ms = parse_instant_ms(self.instant)
        until_s = time.time() + self.patience.total_seconds()
        trigger = FrontierPast(home=str(self.place.home), instant_ms=wanted_ms, until_s=until_s)
        self.defer(trigger=trigger, method_name="decide")

    def decide(self, context: Mapping[str, Any], event: dict[str, Any]) -> int:
        """Return the frontier that was reached, epoch milliseconds.

        Raises:
            AirflowFailException: it was not, within the patience.
        """
        if event["reached"]:
            return int(event["at"])
        at = "nothing is judged" if event["at"] is None else f"judged is what happened up to {format_instant(event['at'])}"
        _fail(context, f"the frontier does not come to {self.instant}: {at} after {self.patience}; see: ./fleet status")
        raise AssertionError


def _fail(context: Mapping[str, Any], reason: str) -> None:
    context["ti"].xcom_push(key=REFUSED, value=reason)
    raise AirflowFailException(reason)
