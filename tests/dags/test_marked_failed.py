"""A run that a person marks as failed ends red, with what was undone, whether a task was running then or none."""

from typing import Any

import pytest

from tests.support.airflow import OF_AIRFLOW, PLACE, Stand, built

pytestmark = OF_AIRFLOW
OUTCOMES = {  # what of a run has ended when it is marked, and what is running
    "fleet_migrate": [(["plan", "approve", "stop"], "act"), (["plan", "approve", "stop", "act", "gate"], None), (["plan"], None)],
    "fleet_quality": [([], "check"), (["check"], None)],
}


class Ti:
    """The little of a task's instance that the outcome asks."""

    dag_id, run_id = "a", "b"

    def __init__(self, states: dict[str, str], left: dict[str, Any] | None = None) -> None:
        self.states, self.left = states, left or {}

    def get_task_states(self, dag_id: str, run_ids: list[str]) -> dict[str, dict[str, str]]:
        return {run_ids[0]: self.states}

    def xcom_pull(self, task_ids: str, key: str = "return_value") -> Any:
        return self.left.get(task_ids) if key == "answered" else None


@pytest.mark.parametrize(("name", "ended", "running"), [(name, *one) for name, several in OUTCOMES.items() for one in several])
def test_a_run_that_is_marked_as_failed_ends_red(stand: Stand, name: str, ended: list[str], running: str | None) -> None:
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
        assert (_next(run, session) or _next(run, session)) == ["outcome"], "who had stopped nothing is skipped first"
        states = {task: str(ti.state) for task, ti in tis.items() if ti.state}
        with pytest.raises(AirflowFailException, match=r"^act: |^check: |^the run was ended before (switch|docs|approve)"):
            dag.get_task("outcome").execute({"ti": Ti(states)})
        tis["outcome"].state = "failed"
        session.flush()
        assert _next(run, session) == []
        assert str(run.state) == "failed"


def _run_of(dag: Any, session: Any) -> Any:
    """Return a run of a DAG that goes on, as the scheduler has it."""
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
    """Let the scheduler look at a run; return what it would start."""
    found, _ = run.update_state(session=session, execute_callbacks=False)
    session.flush()
    return [ti.task_id for ti in found]


@pytest.mark.parametrize(
    ("answer", "said"),
    [(["Reject"], "nothing was changed"), (["Approve"], ""), (None, "")],
)
def test_a_no_is_no_failure_and_what_was_skipped_after_a_yes_is_one(answer: Any, said: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators import RunResultOperator

    task = RunResultOperator(task_id="outcome", of=["approve", "stop"], asked_by="approve")
    context = {"ti": Ti({"approve": "success", "stop": "skipped"}, {"approve": answer})}
    if said:
        assert task.execute(context) == said
        return
    with pytest.raises(AirflowFailException, match=r"^the run was ended before stop$"):
        task.execute(context)
