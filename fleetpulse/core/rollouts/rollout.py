"""Record of a rollout: its plan, started cohorts, verdicts and end.

Rule 1: a cohort starts only after the one before has passed, and each cohort once.
Rule 2: the record names the step before its commands are sent. `CohortRecord.sent_ms` is None until they are, and the soak
begins then.
Rule 3: a rollout that has ended never continues.

Source: ADR 49.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rollouts.plan import RolloutPlan, parse_rollout_plan
from fleetpulse.core.rollouts.verdict import Result, Verdict

FORM: Final = 2  # version of the stored record


class Status(StrEnum):
    """Status of a rollout; the values are stored."""

    RUNNING = "running"  # a cohort is observed, or waits for the next one
    STOPPED = "stopped"  # a bound was exceeded, or a person stopped it: no further commands
    COMPLETED = "completed"  # the last cohort has passed


@dataclass(frozen=True, slots=True)
class CohortRecord:
    """Started cohort.

    Attributes:
        number: number of the cohort, from 1.
        devices: number of its devices.
        requester: requester of its start.
        started_ms: time of the record, epoch milliseconds.
        sent_ms: time at which all of its commands were in the spool, epoch milliseconds; None before.
        verdict: its final verdict, as `Verdict.plain`; None before.
        judged_ms: time of that verdict, epoch milliseconds.
    """

    number: int
    devices: int
    requester: str
    started_ms: int
    sent_ms: int | None = None
    verdict: Mapping[str, Any] | None = None
    judged_ms: int | None = None

    @property
    def passed(self) -> bool:
        """Whether its final verdict is that it passed."""
        return self.verdict is not None and self.verdict["result"] == Result.PASSED


@dataclass(frozen=True, slots=True)
class Rollout:
    """Record of a rollout.

    Attributes:
        plan: its plan.
        devices: number of its devices.
        owner: owner, by default the requester of the start; a run of Airflow has a name of its own.
        cohorts: started cohorts, in order.
        status: status.
        ended_ms: time of its end, epoch milliseconds; None while it runs.
        end_requester: requester of its end, or of the verdict that ended it.
        reason: reason of its end.
    """

    plan: RolloutPlan
    devices: int
    owner: str
    cohorts: tuple[CohortRecord, ...] = ()
    status: Status = Status.RUNNING
    ended_ms: int | None = None
    end_requester: str | None = None
    reason: str | None = None

    @property
    def current(self) -> CohortRecord:
        """Newest started cohort."""
        return self.cohorts[-1]

    @property
    def next_number(self) -> int | None:
        """Number of the next cohort; None after the last."""
        return len(self.cohorts) + 1 if len(self.cohorts) < len(self.plan.cohorts) else None

    def starting(self, devices: int, requester: str, at_ms: int) -> "Rollout":
        """Return the record with the next cohort started.

        Args:
            devices: number of devices of the cohort.
            requester: requester of the start.
            at_ms: time, epoch milliseconds.

        Raises:
            FleetError: the rollout has ended, or the cohort before has not passed.
        """
        self.require_running()
        number = self.next_number
        if number is None:
            raise FleetError(
                f'all cohorts of the rollout "{self.plan.name}" have started; see: ./fleet rollout status',
                code="rollout-no-cohort",
            )
        if self.cohorts and not self.current.passed:
            raise FleetError(
                f'cohort {number} of the rollout "{self.plan.name}" starts after cohort {number - 1} has passed; it has not; '
                f"see: ./fleet rollout check {self.plan.name}",
                code="rollout-not-passed",
            )
        return replace(self, cohorts=(*self.cohorts, CohortRecord(number, devices, requester, at_ms)))

    def sent(self, at_ms: int) -> "Rollout":
        """Return the record with the commands of the newest cohort sent."""
        return self._with_current(replace(self.current, sent_ms=at_ms))

    def judged(self, verdict: Verdict, requester: str, at_ms: int) -> "Rollout":
        """Return the record with a verdict about the newest cohort; a waiting one changes nothing.

        Args:
            verdict: the verdict.
            requester: requester of the verdict.
            at_ms: time, epoch milliseconds.
        """
        if self.status is not Status.RUNNING or verdict.result is Result.WAITING:
            return self
        found = self._with_current(replace(self.current, verdict=verdict.plain(), judged_ms=at_ms))
        if verdict.result is Result.STOPPED:
            return found.ended(Status.STOPPED, requester, at_ms, verdict.reason)
        return found if found.next_number else found.ended(Status.COMPLETED, requester, at_ms, verdict.reason)

    def ended(self, status: Status, requester: str, at_ms: int, reason: str) -> "Rollout":
        """Return the record with the end of the rollout.

        Raises:
            FleetError: the rollout has ended before.
        """
        self.require_running()
        return replace(self, status=status, end_requester=requester, ended_ms=at_ms, reason=reason)

    def require_running(self) -> None:
        """Refuse a step of a rollout that has ended.

        Raises:
            FleetError: it has ended.
        """
        if self.status is not Status.RUNNING:
            raise FleetError(
                f'the rollout "{self.plan.name}" is {self.status}, and continues no more: {self.reason}; start another one with '
                f"another name: ./fleet rollout start",
                code="rollout-ended",
            )

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON values; the inverse of `from_plain`."""
        return {
            "form": FORM,
            "plan": self.plan.content(),
            "devices": self.devices,
            "owner": self.owner,
            "cohorts": [asdict(one) for one in self.cohorts],
            "status": self.status.value,
            "ended_ms": self.ended_ms,
            "end_requester": self.end_requester,
            "reason": self.reason,
        }

    def _with_current(self, cohort: CohortRecord) -> "Rollout":
        return replace(self, cohorts=(*self.cohorts[:-1], cohort))


def from_plain(content: Mapping[str, Any]) -> Rollout:
    """Parse a stored record.

    Raises:
        FleetError: another form, or a damaged record.
    """
    try:
        if content["form"] != FORM:
            raise ValueError(f"form {content['form']}, expected {FORM}")
        ends = {name: content[name] for name in ("ended_ms", "end_requester", "reason")}
        cohorts = tuple(CohortRecord(**one) for one in content["cohorts"])
        plan = parse_rollout_plan(content["plan"])
        return Rollout(plan, content["devices"], content["owner"], cohorts, Status(content["status"]), **ends)
    except (KeyError, TypeError, ValueError, FleetError) as error:
        raise FleetError(
            f"the record of the rollout is damaged ({error!r}); restore its file from a backup", code="rollout-record-damaged"
        ) from None
