"""Fixtures of the tests of DAGs.

Importing this module sets the environment of Airflow, before the first import of ``airflow``.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.airflow import COMMAND, PLACE, STUB, StubCommand


@pytest.fixture(scope="session")
def airflow() -> Path:
    """Return the folder of an Airflow with an initialised database."""
    from airflow.utils.db import initdb

    initdb()
    return PLACE


@pytest.fixture
def stub(airflow: Path) -> StubCommand:
    """Return a home in which generation 1 runs, and a stub command without failures."""
    COMMAND.write_text(STUB)
    COMMAND.chmod(0o755)
    found = StubCommand(PLACE)
    lifecycle = found.home / "checkpoints" / "lifecycle"
    lifecycle.mkdir(parents=True, exist_ok=True)
    (lifecycle / "generations.json").write_text(json.dumps({"current": 1, "generations": []}))
    (found.home / "desired.json").write_text(json.dumps({"what": "running", "by": "nobody yet", "at_ms": 0}))
    (PLACE / "calls").unlink(missing_ok=True)
    found.fail()
    return found


@pytest.fixture
def run_dag(stub: StubCommand, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Return a function that runs a DAG to its end, in which bob approves at once.

    It returns the final state of each task by its id, and that of the run under "".
    """

    from airflow.providers.standard.operators.hitl import HITLOperator

    def answer(task: Any, context: Any) -> Any:
        event = {"chosen_options": ["Approve"], "params_input": {}, "responded_at": datetime.now(UTC)}
        return task.execute_complete(context, {**event, "responded_by_user": {"id": "bob", "name": "bob"}})

    monkeypatch.setattr(HITLOperator, "execute", answer)  # Airflow would wait for its API

    def run(dag: Any, *, mark: str | None = None, **form: Any) -> dict[str, str]:
        from airflow.dag_processing.bundles.manager import DagBundlesManager
        from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
        from airflow.utils.session import create_session

        with create_session() as session:
            DagBundlesManager().sync_bundles_to_db(session=session)
        bag = DagBag(str(PLACE / "no-dags"))
        bag.bag_dag(dag)
        sync_bag_to_db(bag, "dags-folder", None)
        ended = dag.test(mark_success_pattern=mark, run_conf=form or None)
        return {"": str(ended.state), **{ti.task_id: str(ti.state) for ti in ended.get_task_instances()}}

    return run
