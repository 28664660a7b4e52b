"""How every DAG is made: owner, tags, retries, deadline and callback in one place, and the one way to change the state.

Rule 1: a DAG file holds a schedule, arguments and edges; what all share is here.
Rule 2: the state is changed in the same order by every DAG: plan, approval, stop, act, gate, switch, start, watch. What follows
a failure does not depend on which step failed: the teardown looks at what there is, and undoes it.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from airflow.sdk import DAG, CronTriggerTimetable, chain
from airflow.sdk.definitions.param import ParamsDict

from fleetpulse.orchestration.notifications import deadline, tell_of_failure
from fleetpulse.orchestration.operators import (
    FleetOperator,
    QualityOperator,
    RollbackOperator,
    RunResultOperator,
    StartStream,
    StopStream,
)
from fleetpulse.orchestration.pools import STATE_POOL
from fleetpulse.orchestration.sensors import Approval, WaitForBatch

OWNER: Final = "fleet operations"
_LONG: Final = timedelta(hours=2)  # a verb that makes a generation of a large fleet


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
    """Return a DAG to be filled.

    Args:
        dag_id: its name.
        doc: its runbook: the docstring of its file.
        within: in what time a run is to have ended, counted from when it is queued; later is told as a failure is.
        tags: besides ``fleet``.
        schedule: a cron line (UTC), or what Airflow knows beside; None: only when asked.
        params: the form.
        alarmed: False leaves the deadline out, with which ``dag.test`` cannot run a DAG.
    """
    return DAG(
        dag_id,
        schedule=CronTriggerTimetable(schedule, timezone="UTC") if isinstance(schedule, str) else schedule,
        start_date=None,  # with one, all that has a schedule would run at once when Airflow is first started
        catchup=False,
        max_active_runs=1,
        doc_md=doc,
        tags=["fleet", *tags],
        params=ParamsDict(params or {}),
        deadline=deadline(dag_id, within) if alarmed else None,
        default_args={
            "owner": OWNER,
            "retries": 2,  # after a signal or an error of the system: a refusal, or what took too long, is not tried again
            "retry_delay": timedelta(seconds=20),
            "execution_timeout": timedelta(minutes=30),
            "on_failure_callback": tell_of_failure,
        },
    )


def change_state(words: Sequence[str], *, question: str | None) -> None:
    """Fill a DAG with the steps of a change of the state.

    Args:
        words: the verb that makes the new generation, and its arguments.
        question: what a person is asked, with the plan below it; None where nobody is.
    """
    plan = FleetOperator(task_id="plan", words=[*words, "--dry-run", "--once-stopped"], gives="told", pool=STATE_POOL)
    stop = StopStream(task_id="stop")
    act = FleetOperator(task_id="act", words=[*words, "--hold", "--json"], gives="json", pool=STATE_POOL, execution_timeout=_LONG)
    made = "{{ ti.xcom_pull(task_ids='act')['generation'] }}"
    gate = QualityOperator(
        task_id="gate",
        words=["quality", "gate", "--generation", made, "--json"],
        gives="json",
        pool=STATE_POOL,
        execution_timeout=_LONG,
    )
    switch = FleetOperator(task_id="switch", words=["state", "switch", made], pool=STATE_POOL)
    start = StartStream(task_id="start")
    watch = WaitForBatch(task_id="watch", more=2)
    go_back = RollbackOperator(task_id="go_back", made_by="act", last="watch", execution_timeout=_LONG)
    steps = [plan, *([] if question is None else [_approval(question)]), stop, act, gate, switch, start, watch, go_back]
    asked_by = None if question is None else "approve"
    outcome = RunResultOperator(task_id="outcome", of=[step.task_id for step in steps], undone_by="go_back", asked_by=asked_by)
    chain(*steps, outcome)
    go_back.as_teardown(setups=stop)


def _approval(question: str) -> Approval:
    return Approval(
        task_id="approve",
        subject=question,
        body="What it would do, by `--dry-run`:\n\n{{ ti.xcom_pull(task_ids='plan') | replace('\\n', '\\n\\n') }}\n\n"
        "The stream stops for it; what comes in meanwhile waits, and is judged afterwards.",
        response_timeout=timedelta(hours=12),
    )
