"""Properties of all DAGs: their attributes, edges, pools and imports."""

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fleetpulse.paths import ROOT
from tests.support.airflow import OF_AIRFLOW, module

pytestmark = OF_AIRFLOW
FILES = sorted(path.stem for path in (ROOT / "dags").glob("*.py"))
_CHANGE = ["stop", "act", "gate", "switch", "start", "watch", "go_back", "outcome"]
APPROVED = ["plan", "approve", *_CHANGE]
EDGES = {  # downstream tasks by DAG; a teardown has an edge from its setup as well
    "fleet_supervise": {"supervise": []},
    "fleet_snapshot": {"snapshot": []},
    "fleet_bootstrap": APPROVED,
    "fleet_migrate": APPROVED,
    "fleet_repartition": APPROVED,
    "fleet_rescale": APPROVED,
    "fleet_quality": ["check", "docs", "outcome"],
    "fleet_amend": {"amend": []},
    "fleet_backtest": {
        "write_policy": ["choose"],
        "choose": ["backtest", "backtest_on_spark"],
        "backtest": [],
        "backtest_on_spark": [],
    },
    "fleet_maintain": ["maintain"],
    "fleet_tidy": ["tidy"],
    "fleet_report": ["judged", "report"],
    "fleet_rollout": [
        "write_plan",
        *(f"{task}_{number}" for number in (1, 2, 3) for task in ("plan", "approve", "start", "check")),
        "stop",
        "outcome",
    ],
    "fleet_command": ["command"],
}

RUNS = {  # cron line (UTC), assets whose events start a run, and deadline from when a run is queued
    "fleet_supervise": ("* * * * *", set[str](), timedelta(minutes=10)),
    "fleet_snapshot": ("7 * * * *", set[str](), timedelta(minutes=50)),
    "fleet_bootstrap": (None, set[str](), timedelta(hours=24)),
    "fleet_migrate": (None, set[str](), timedelta(hours=24)),
    "fleet_repartition": (None, set[str](), timedelta(hours=24)),
    "fleet_rescale": (None, set[str](), timedelta(hours=24)),
    "fleet_quality": ("23 * * * *", {"device_snapshots", "alerts"}, timedelta(hours=3)),
    "fleet_amend": (None, {"late_events"}, timedelta(hours=3)),
    "fleet_backtest": (None, set[str](), timedelta(hours=3)),
    "fleet_maintain": ("40 * * * *", set[str](), timedelta(hours=3)),
    "fleet_tidy": ("50 2 * * *", set[str](), timedelta(hours=3)),
    "fleet_report": ("15 0 * * *", set[str](), timedelta(hours=7)),
    "fleet_rollout": (None, set[str](), timedelta(hours=336)),
    "fleet_command": (None, set[str](), timedelta(hours=3)),
}
RETRIES = {"supervise": 1, "approve": 1, "approve_1": 1, "approve_2": 1, "approve_3": 1}  # all other tasks have two


@pytest.fixture(scope="module")
def dags() -> dict[str, Any]:
    """Return all DAGs, as Airflow loads them from their files."""
    return {name: module(name).dag for name in FILES}


def expected(edges: Any) -> dict[str, set[str]]:
    """Return edges by task; a list is a chain."""
    if isinstance(edges, dict):
        return {name: set(after) for name, after in edges.items()}
    after = {name: set(edges[index + 1 : index + 2]) for index, name in enumerate(edges)}
    if "go_back" in after:
        after["stop"].add("go_back")
    if "write_plan" in after:
        after["write_plan"].add("stop")
    return after


def test_each_file_defines_only_the_dag_of_its_name(dags: dict[str, Any]) -> None:
    assert {name: dag.dag_id for name, dag in dags.items()} == {name: name for name in EDGES}


@pytest.mark.parametrize("name", FILES)
def test_a_dag_has_the_listed_schedule_deadline_and_retries(name: str, dags: dict[str, Any]) -> None:
    dag, (cron, assets, within) = dags[name], RUNS[name]
    timed = getattr(dag.timetable, "timetable", dag.timetable)  # that of assets or time contains the other
    watched = getattr(getattr(dag.timetable, "asset_condition", None), "objects", [])
    assert getattr(timed, "expression", None) == cron
    assert {asset.name for asset in watched} == assets
    [alert] = dag.deadline
    assert alert.interval == within
    assert {task.task_id: task.retries for task in dag.tasks} == {name: RETRIES.get(name, 2) for name in dag.task_ids}


def test_the_guide_lists_the_deadline_of_each_dag() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) (minutes|hours) \|$", (ROOT / "docs/how-to/airflow.md").read_text(), re.MULTILINE)
    listed = {name: timedelta(**{unit: int(count)}) for names, count, unit in rows for name in re.findall(r"`(\w+)`", names)}
    [others] = [timedelta(**{unit: int(count)}) for names, count, unit in rows if names == "all others"]
    assert {name: listed.get(name, others) for name in RUNS} == {name: within for name, (_, _, within) in RUNS.items()}


@pytest.mark.parametrize("name", FILES)
def test_a_dag_has_owner_tags_runbook_limits_and_callback(name: str, dags: dict[str, Any]) -> None:
    dag = dags[name]
    assert "fleet" in dag.tags and len(dag.tags) == 2
    assert all(heading in dag.doc_md for heading in ("# ", "**When to run it**", "**If it is red**", "**How to undo it**"))
    assert not dag.catchup
    assert dag.max_active_runs == 1
    for task in dag.tasks:
        assert task.owner == "fleet operations"
        assert task.task_id == "outcome" or task.has_on_failure_callback
        assert task.task_id.startswith("approve") or task.execution_timeout <= timedelta(hours=2)


@pytest.mark.parametrize("name", FILES)
def test_the_edges_of_a_dag_are_the_listed_ones(name: str, dags: dict[str, Any]) -> None:
    assert {task.task_id: set(task.downstream_task_ids) for task in dags[name].tasks} == expected(EDGES[name])


@pytest.mark.parametrize("name", FILES)
def test_a_task_that_uses_the_state_is_in_the_state_pool(name: str, dags: dict[str, Any]) -> None:
    assert dags[name].tasks
    for task in dags[name].tasks:
        arguments = getattr(task, "words", [""])
        uses_state = arguments[:1] in ([], ["state"], ["maintain"]) or arguments[:2] in (["stream", "stop"], ["stream", "start"])
        assert (task.pool == "fleet_state") == (uses_state or "gate" in arguments[:2]), task.task_id


@pytest.mark.parametrize("name", FILES)
def test_a_long_task_is_in_a_pool(name: str, dags: dict[str, Any]) -> None:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    from fleetpulse.orchestration.operators.verbs import FleetOperator
    from fleetpulse.orchestration.pools import POOLS

    for task in dags[name].tasks:
        long = isinstance(task, FleetOperator | SparkSubmitOperator) and name != "fleet_supervise"
        assert (task.pool in POOLS) == long, task.task_id
    heavy = {task.task_id for task in dags[name].tasks if task.pool == "fleet_heavy"}
    assert heavy >= {"check", "amend", "backtest", "backtest_on_spark"} & set(dags[name].task_ids)


def test_each_table_is_an_asset_that_a_task_updates(dags: dict[str, Any]) -> None:
    from fleetpulse.core.catalog import TABLES

    updated = {asset.name for dag in dags.values() for task in dag.tasks for asset in task.outlets}
    assert updated == {table.name for table in TABLES}


def test_the_pools_leave_a_slot_for_the_supervision_of_the_stream() -> None:
    from cli.supervisor.airflow_env import environment
    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.pools import POOLS

    name = "AIRFLOW__CORE__PARALLELISM"
    written = (line.partition("=") for line in (ROOT / "infra" / "airflow.env").read_text().splitlines())
    in_containers = {key: value for key, _, value in written}
    with TemporaryDirectory() as home:
        for found in (environment(Home(Path(home)), 8080), in_containers):
            assert sum(slots for slots, _ in POOLS.values()) < int(found[name])


def test_the_pools_can_be_created_repeatedly(airflow: Path) -> None:
    from airflow.models.pool import Pool

    from fleetpulse.orchestration.database import prepare
    from fleetpulse.orchestration.pools import POOLS

    for _ in range(2):
        prepare()
        made = {pool.pool: pool.slots for pool in Pool.get_pools()}
        assert {name: made[name] for name in POOLS} == {name: slots for name, (slots, _) in POOLS.items()}


@pytest.mark.parametrize("name", FILES)
def test_a_run_with_a_failed_step_is_never_green(name: str, dags: dict[str, Any]) -> None:
    """A run takes the state of its leaves: each leaf waits for success, or is the one that checks all tasks."""
    leaves = [task for task in dags[name].tasks if not task.downstream_task_ids]
    for leaf in leaves:
        assert leaf.trigger_rule == "all_success" or type(leaf).__name__ == "RunResultOperator"
    lenient = {task.task_id for task in dags[name].tasks if task.trigger_rule != "all_success"}
    if lenient:
        assert [set(leaf.of) for leaf in leaves] == [set(dags[name].task_ids) - {"outcome"}]


def test_go_back_runs_only_after_the_run_stopped_the_stream(dags: dict[str, Any]) -> None:
    for name in ("fleet_bootstrap", "fleet_migrate", "fleet_repartition", "fleet_rescale"):
        stop, go_back = (dags[name].get_task(task) for task in ("stop", "go_back"))
        assert stop.is_setup and go_back.is_teardown
        assert go_back.trigger_rule == "all_done_setup_success"


def test_a_stopped_stream_is_reported_only_after_the_longest_possible_run(dags: dict[str, Any]) -> None:
    from fleetpulse.core.monitoring.supervision import AIRFLOWS, LONGEST_CHANGE_MS
    from fleetpulse.orchestration.operators.verbs import STOPPED_BY

    assert STOPPED_BY.startswith(AIRFLOWS)
    longest = [task.execution_timeout for task in dags["fleet_maintain"].tasks]  # maintenance may occupy the pool's slot first
    for name in ("fleet_bootstrap", "fleet_migrate", "fleet_repartition", "fleet_rescale"):
        steps = [dags[name].get_task(task).execution_timeout for task in _CHANGE[:-1]]
        assert sum([*steps, max(longest)], timedelta(0)) < timedelta(milliseconds=LONGEST_CHANGE_MS)


@pytest.mark.parametrize("name", FILES)
def test_a_dag_and_its_deadline_survive_serialization(name: str, dags: dict[str, Any]) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    stored = DagSerialization.to_dict(dags[name])
    assert set(DagSerialization.from_dict(stored).task_ids) == set(dags[name].task_ids)
    (alert,) = dags[name].deadline if isinstance(dags[name].deadline, list) else [dags[name].deadline]
    assert resolve_name(alert.callback.path).__name__ == "notify_missed_deadline"


def test_a_triggerer_can_create_the_stored_watchers(airflow: Path, dags: dict[str, Any]) -> None:
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.models.trigger import Trigger
    from airflow.triggers.base import BaseEventTrigger
    from airflow.utils.session import create_session
    from sqlalchemy import select

    bag = DagBag(str(airflow / "no-dags"))
    for dag in dags.values():
        bag.bag_dag(dag)
    with create_session() as session:
        DagBundlesManager().sync_bundles_to_db(session=session)
    for _ in range(2):  # the assets of a DAG are watched only after it is known
        sync_bag_to_db(bag, "dags-folder", None)
    with create_session() as session:
        stored = session.scalars(select(Trigger)).all()
        made = [resolve_name(one.classpath)(**one.kwargs) for one in stored]
    watchers = {type(one).__name__ for one in made if isinstance(one, BaseEventTrigger)}  # runs store triggers of sensors as well
    assert watchers == {"DeltaLogWatch", "AlertWatch"}


_PARSED = """
import json, sys, time
started = time.process_time()
import airflow.sdk
imported = time.process_time() - started
from airflow.sdk import DAG
from airflow.dag_processing.dagbag import DagBag
began = time.process_time()
bag = DagBag(sys.argv[1])
spent = time.process_time() - began
heavy = [name for name in ("pyspark", "great_expectations", "pandas", "pyarrow", "duckdb") if name in sys.modules]
print(json.dumps({"of_import": spent / imported, "dags": sorted(bag.dags), "errors": bag.import_errors, "heavy": heavy}))
"""


def test_the_folder_of_dags_loads_quickly_and_imports_no_heavy_package(tmp_path: Path) -> None:
    environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = f"sqlite:///{tmp_path}/none.db"
    command = [sys.executable, "-P", "-c", _PARSED, str(ROOT / "dags")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == {}
    assert found["dags"] == FILES
    assert found["heavy"] == []
    assert found["of_import"] < 0.5, "CPU time, relative to the import of Airflow; at first it was 0.2"
