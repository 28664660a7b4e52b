"""Factory of the DAGs: shared defaults, and the task sequence that changes state.

Rule 1: a DAG file contains a schedule, arguments and edges. Everything shared (owner, tags,
retries, deadline, callback) is here.
Rule 2: every DAG changes the state in the same order: plan, approval, stop, act, gate, switch,
start, watch. The recovery does not depend on which step failed: the teardown inspects the state and
undoes the steps that it finds done.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from airflow.sdk import DAG, CronTriggerTimetable, chain
from airflow.sdk.definitions.param import ParamsDict

from fleetpulse.orchestration.notifications import deadline, notify_failure
from fleetpulse.orchestration.operators.verbs import (
    GENERATION,
    FleetOperator,
    MakeGeneration,
    PlanOperator,
    QualityOperator,
    RollbackOperator,
    RunResultOperator,
    StartStream,
    StopStream,
)
from fleetpulse.orchestration.pools import STATE_POOL
from fleetpulse.orchestration.sensors import Approval, WaitForBatch

OWNER: Final = "fleet operations"
_PATIENCE: Final = timedelta(hours=12)  # timeout of an approval
_LONG: Final = timedelta(hours=2)  # timeout of a verb that creates a generation of a large fleet


def fleet_dag(
    dag_id: str,
    doc: str | None,
    *,
    within: timedelta,
    tags: Sequence[str],
    schedule: Any = None,
    params: dict[str, Any] | None = None,
    alarmed: bool = True,
) -> DAG:
    """Create a DAG without tasks.

    Args:
        dag_id: id of the DAG.
        doc: runbook in Markdown, the docstring of the DAG's file.
        within: deadline of a run, counted from when it is queued; a run that misses it is notified
            like a failure.
        tags: tags besides ``fleet``.
        schedule: cron line (UTC) or any schedule of Airflow; None for runs by hand only.
        params: fields of the form.
        alarmed: whether the DAG has the deadline; ``dag.test`` cannot run a DAG with one.
    """
    return DAG(
        dag_id,
        schedule=CronTriggerTimetable(schedule, timezone="UTC") if isinstance(schedule, str) else schedule,
        start_date=None,  # with one, every scheduled DAG would run at the first start of Airflow
        catchup=False,
        max_active_runs=1,
        doc_md=doc,
        tags=["fleet", *tags],
        params=ParamsDict(params or {}),
        deadline=deadline(dag_id, within) if alarmed else None,
        default_args={
            "owner": OWNER,
            "retries": 2,  # after a signal or a system error; refusals and timeouts are not retried
            "retry_delay": timedelta(seconds=20),
            "execution_timeout": timedelta(minutes=30),
            "on_failure_callback": notify_failure,
        },
    )


def change_state(arguments: Sequence[str], *, question: str, bootstraps: bool = False) -> None:
    """Add the tasks of a change of the state to the current DAG.

    Args:
        arguments: verb that creates the new generation, and its arguments.
        question: question of the approval, shown above the plan.
        bootstraps: whether the verb is a bootstrap: `Approval` then asks only if the plan drops devices,
            and the bootstrap is bound to its plan.
    """
    plan = PlanOperator(task_id="plan", words=[*arguments, "--dry-run", "--once-stopped"])
    approve = Approval(task_id="approve", question=question, if_dropping=bootstraps, response_timeout=_PATIENCE)
    stop = StopStream(task_id="stop", approved=True)
    act = MakeGeneration(task_id="act", words=[*arguments, "--hold", "--json"], bootstraps=bootstraps, execution_timeout=_LONG)
    gate = QualityOperator(
        task_id="gate",
        words=["quality", "gate", "--generation", GENERATION, "--json"],
        gives="json",
        pool=STATE_POOL,
        execution_timeout=_LONG,
    )
    switch = FleetOperator(task_id="switch", words=["state", "switch", GENERATION], approved=True, pool=STATE_POOL)
    start = StartStream(task_id="start")
    watch = WaitForBatch(task_id="watch", more=2)
    go_back = RollbackOperator(task_id="go_back", last="watch", execution_timeout=_LONG)
    steps = [plan, approve, stop, act, gate, switch, start, watch, go_back]
    outcome = RunResultOperator(task_id="outcome", of=[step.task_id for step in steps], undone_by="go_back", asked_by=["approve"])
    chain(*steps, outcome)
    go_back.as_teardown(setups=stop)
