"""Operators and the sensor of the DAG ``fleet_rollout``.

Rule 1: the plan of the form is written to a file of the run, and each task reads the name of the rollout there. An XCom could
name another one. The approvals are void if the form has other values, see `approvals`.
Rule 2: each cohort has a step, with a plan and an approval of its own. Its verbs name the number of the cohort, so that a
retried task completes an interrupted step, and starts no other one.
Rule 3: a run owns its rollout. However the run ends, `StopRollout` stops a rollout of the run that is not completed.
Rule 4: facts are judged by the verb ``rollout check``. The triggerer only waits until the frontier has advanced.

Source: ADR 49.
"""

import shutil
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralTimeout

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rollouts.plan import RolloutPlan, parse_rollout_plan
from fleetpulse.core.rollouts.planned import arguments_as_planned
from fleetpulse.core.times import HOUR_MS, format_instant
from fleetpulse.orchestration.approvals import RunApproval
from fleetpulse.orchestration.config import CONFIG, OrchestrationConfig, rollout_folder
from fleetpulse.orchestration.operators.verbs import STOPPED_BY, FleetOperator, PlanOperator, failing, publish_reason
from fleetpulse.orchestration.pools import HEAVY_POOL
from fleetpulse.orchestration.sensors import GRACE, PATIENCE, SETTLE_S
from fleetpulse.orchestration.subprocess import ProcessResult
from fleetpulse.orchestration.triggers import FrontierPast

COHORTS: Final = 3  # cohorts for which the DAG has tasks
PLAN_FILE: Final = "<plan>"  # word of a verb that stands for the file with the plan of the run
ROLLOUT: Final = "<rollout>"  # word of a verb that stands for the name of the rollout
_CHECKS: Final = 50  # checks in the soak of a cohort
_LEAST_MS, _MOST_MS = 10_000, 600_000  # event time between two checks
_RUN: Final = "{{ run_id }}"


class WriteRolloutPlan(BaseOperator):
    """Check the plan of the form, and write it to the folder of the run."""

    template_fields: ClassVar[Sequence[str]] = ("plan", "run_name")

    def __init__(self, *, place: OrchestrationConfig = CONFIG, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.place = place
        self.plan = "{{ params.plan }}"
        self.run_name = _RUN

    def execute(self, context: Mapping[str, Any]) -> str:
        """Write the plan; return the name of the rollout.

        Raises:
            AirflowFailException: the plan has faults, or another number of cohorts than the DAG.
        """
        with failing(context):
            plan = _parsed(self.plan)
            if len(plan.cohorts) != COHORTS:
                raise FleetError(
                    f"the DAG asks between {COHORTS} cohorts; got {len(plan.cohorts)}; use {COHORTS} cohorts, or the command "
                    f"./fleet rollout",
                    code="rollout-cohorts-of-dag",
                )
        folder = rollout_folder(self.place.data_folder, self.run_name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.toml").write_text(self.plan)
        return plan.name


class _OfRollout(FleetOperator):
    """Verb about the rollout of the run; its words may have `PLAN_FILE` and `ROLLOUT`."""

    template_fields: ClassVar[Sequence[str]] = ("words", "run_name", "rollout_owner")

    def __init__(self, *, words: Sequence[str], **kwargs: Any) -> None:
        super().__init__(words=words, **{"pool": HEAVY_POOL, **kwargs})
        self.run_name = _RUN
        self.rollout_owner = STOPPED_BY

    @property
    def plan_file(self) -> Path:
        """File with the plan of the run."""
        return rollout_folder(self.place.data_folder, self.run_name) / "plan.toml"

    def rollout_plan(self) -> RolloutPlan:
        """Return the plan of the run.

        Raises:
            FleetError: the file is missing: the task that writes it was skipped, or has failed.
        """
        try:
            return _parsed(self.plan_file.read_text())
        except OSError as error:
            raise FleetError(
                f"the run has no plan of a rollout ({error.strerror}); trigger a new run", code="rollout-plan-missing"
            ) from None

    def run_verb(self, arguments: Sequence[str], context: Mapping[str, Any]) -> ProcessResult:
        """Run a verb as `FleetOperator.run_verb` does, about the rollout of the run."""
        with failing(context):
            words = {PLAN_FILE: str(self.plan_file), ROLLOUT: self.rollout_plan().name}
        return super().run_verb([words.get(word, word) for word in arguments], context)


class PlanCohort(_OfRollout, PlanOperator):
    """Print the plan of a cohort, and save it for the approval of its step."""


class StartCohort(_OfRollout):
    """Send the firmware to a cohort, if its plan is approved.

    Args:
        first: whether it starts the rollout. It then refuses more devices than the plan has.
    """

    def __init__(self, *, first: bool, **kwargs: Any) -> None:
        super().__init__(gives="json", approved=True, **kwargs)
        self.first = first

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the verb; return the record of the rollout."""
        if self.first:
            with failing(context):
                planned = arguments_as_planned(RunApproval(self.place, context, self.step).plan())
            self.words = [*self.words, *planned, "--owner", self.rollout_owner]
        return super().execute(context)


class WaitForCohort(_OfRollout):
    """Judge a cohort until it has passed; fail with the arithmetic if the rollout is stopped.

    Args:
        patience: time without an advance of the frontier after which the task fails.
    """

    def __init__(self, *, patience: timedelta = PATIENCE, **kwargs: Any) -> None:
        super().__init__(words=["rollout", "check", ROLLOUT, "--json"], gives="json", **kwargs)
        self.patience = patience

    def execute(self, context: Mapping[str, Any]) -> str:
        """Judge the cohort; return the reason why it passed, or defer until the frontier has advanced.

        Raises:
            AirflowFailException: the rollout is stopped, or the cohort has made no statement for as long again as its soak.
        """
        found = super().execute(context)
        verdict, through_ms = found["verdict"], found["observed"]["through_ms"]
        if verdict["result"] == "passed":
            return str(verdict["reason"])
        soak_ms = self.rollout_plan().soak_ms
        until_ms = verdict["until_ms"]
        if None not in (until_ms, through_ms) and through_ms > until_ms + soak_ms + HOUR_MS:
            raise self._failure(context, f"the cohort made no statement until {format_instant(through_ms)}: {verdict['reason']}")
        from_ms = through_ms if through_ms is not None else round(time.time() * 1_000)
        next_ms = from_ms + min(max(soak_ms // _CHECKS, _LEAST_MS), _MOST_MS)
        target_ms = until_ms if until_ms is not None and from_ms < until_ms < next_ms else next_ms
        self.log.info("waiting: %s", verdict["reason"])
        longest = self.patience + timedelta(milliseconds=target_ms - from_ms)
        until_s = time.time() + longest.total_seconds()
        trigger = FrontierPast(home=str(self.place.home), wanted=target_ms, until_s=until_s, first_s=SETTLE_S)
        self.defer(trigger=trigger, method_name="again", timeout=longest + GRACE)
        return ""

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """Resume after the wait.

        Raises:
            AirflowFailException: the scheduler ended the wait.
        """
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            raise self._failure(context, "the triggerer did not respond in time; check that it runs, and read its log") from None

    def again(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> str:
        """Judge the cohort again.

        Raises:
            AirflowFailException: the frontier has not advanced. Exceptions of `execute` are raised, too.
        """
        if not event["reached"]:
            at = "nothing was judged" if event["at"] is None else f"it is at {format_instant(event['at'])}"
            wanted = format_instant(event["wanted"])
            raise self._failure(context, f"the frontier did not reach {wanted} in time: {at}; see: ./fleet status")
        return self.execute(context)

    def _failure(self, context: Mapping[str, Any], reason: str) -> AirflowFailException:
        publish_reason(context, reason)
        return AirflowFailException(reason)


class StopRollout(_OfRollout):
    """Stop the rollout of the run unless it is completed, and remove the file with its plan.

    It is the teardown of the task that writes the plan, so it runs however the run ends. It stops no
    rollout of another owner.
    """

    def __init__(self, **kwargs: Any) -> None:
        words = ["rollout", "stop", ROLLOUT, "--own", "--owner", STOPPED_BY, "--why", "its run in Airflow ended before its end"]
        super().__init__(words=words, **kwargs)

    def execute(self, context: Mapping[str, Any]) -> str:
        """Stop the rollout; return a summary of it as text."""
        from fleetpulse.core.rollouts.rollout import Status
        from fleetpulse.io.home.home import Home
        from fleetpulse.io.home.rollouts import StoredRollout

        with failing(context):
            name = self.rollout_plan().name
            found = StoredRollout(Home(self.place.home), name).find()
        if found is None or found.owner != self.rollout_owner:
            summary = f'the rollout "{name}" was not started by this run'
        elif found.status is Status.COMPLETED:
            summary = f'the rollout "{name}" is completed'
        else:
            if found.status is Status.RUNNING:
                self.run_verb(self.words, context)
            summary = f'the rollout "{name}" is stopped after cohort {found.current.number} of {len(found.plan.cohorts)}'
        shutil.rmtree(self.plan_file.parent, ignore_errors=True)
        return summary


def _parsed(text: str) -> RolloutPlan:
    try:
        return parse_rollout_plan(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FleetError(f"the plan of the rollout is not TOML ({error})", code="toml-invalid") from None
