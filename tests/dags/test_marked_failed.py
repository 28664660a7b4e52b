"""Runs that a user marks as failed: the run ends as failed, whether or not a task was running."""

from typing import Any

import pytest

from tests.support.airflow import OF_AIRFLOW, PLACE, StubCommand, built

pytestmark = OF_AIRFLOW
OUTCOMES = {  # by DAG: the tasks that have ended when the run is marked, and the running task
    "fleet_migrate": [(["plan", "approve", "stop"], "act"), (["plan", "approve", "stop", "act", "gate"], None), (["plan"], None)],
    "fleet_quality": [([], "check"), (["check"], None)],
}


class Ti:
    """Minimal task instance for the operator of the outcome."""

    dag_id, run_id = "a", "b"

    def __init__(self, states: dict[str, str], answers: dict[str, Any] | None = None) -> None:
        self.states, self.answers = states, answers or {}

    def get_task_states(self, dag_id: str, run_ids: list[str]) -> dict[str, dict[str, str]]:
        return {run_ids[0]: self.states}

    def xcom_pull(self, task_ids: str, key: str = "return_value") -> Any:
        return self.answers.get(task_ids) if key == "answered" else None


@pytest.mark.parametrize(("name", "ended", "running"), [(name, *one) for name, several in OUTCOMES.items() for one in several])
def test_a_run_that_is_marked_as_failed_ends_as_failed(
    stub: StubCommand, name: str, ended: list[str], running: str | None
) -> None:
    from airflow.api.common.mark_tasks import set_dag_run_state_to_failed
    from airflow.sdk.exceptions import AirflowFailException
    from airflow.utils.session import create_session

    dag = built(name)
    with create_session() as session:
        run = _run_of(dag, session)
        tis = {ti.task_id: ti for ti in run.get_task_instances(session=session)}
        for task in ended:
            tis[task].state = "success"
        if running:
            tis[running].state = "running"
        session.flush()
        set_dag_run_state_to_failed(dag=run.dag, run_id=run.run_id, commit=True, session=session)
        session.flush()
        if "stop" in ended:
            assert _next(run, session) == ["go_back"]
            tis["go_back"].state = "success"
        session.flush()
        assert (_next(run, session) or _next(run, session)) == ["outcome"], (
            "go_back is skipped first if the run had not stopped the stream"
        )
        states = {task: str(ti.state) for task, ti in tis.items() if ti.state}
        with pytest.raises(AirflowFailException, match=r"^act: |^check: |^the run was ended before (switch|docs|approve)"):
            dag.get_task("outcome").execute({"ti": Ti(states)})
        tis["outcome"].state = "failed"
        session.flush()
        assert _next(run, session) == []
        assert str(run.state) == "failed"


def _run_of(dag: Any, session: Any) -> Any:
    """Return a running run of a DAG, as the scheduler has it."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.models.dagrun import DagRun
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.sdk import timezone
    from airflow.utils.state import DagRunState
    from airflow.utils.types import DagRunTriggeredByType, DagRunType

    DagBundlesManager().sync_bundles_to_db(session=session)
    session.commit()
    bag = DagBag(str(PLACE / "no-dags"))
    bag.bag_dag(dag)
    sync_bag_to_db(bag, "dags-folder", None)
    stored = SerializedDagModel.get(dag.dag_id, session=session)
    assert stored is not None
    now = timezone.utcnow()
    made: DagRun = stored.dag.create_dagrun(
        run_id=f"manual__{now.isoformat()}",
        run_after=now,
        run_type=DagRunType.MANUAL,
        triggered_by=DagRunTriggeredByType.TEST,
        state=DagRunState.RUNNING,
        session=session,
    )
    made.dag = stored.dag
    return made


def _next(run: Any, session: Any) -> list[str]:
    """Let the scheduler update a run; return the tasks that it would start."""
    found, _ = run.update_state(session=session, execute_callbacks=False)
    session.flush()
    return [ti.task_id for ti in found]


@pytest.mark.parametrize(
    ("answer", "result"),
    [(["Reject"], "nothing was changed"), (["Approve"], ""), (None, "")],
)
def test_a_rejection_is_no_failure_but_a_skipped_step_after_an_approval_is(answer: Any, result: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators.verbs import RunResultOperator

    task = RunResultOperator(task_id="outcome", of=["approve", "stop"], asked_by=["approve"])
    context = {"ti": Ti({"approve": "success", "stop": "skipped"}, {"approve": answer})}
    if result:
        assert task.execute(context) == result
        return
    with pytest.raises(AirflowFailException, match=r"^the run was ended before stop$"):
        task.execute(context)
