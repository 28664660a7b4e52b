"""Spark standalone cluster: the lifecycle job and a submitted backtest run on its workers.

The workers have folders and an environment of their own, so that a path or variable of the driver
in a task is an error. As root on Linux, driver and workers also run as another user who sees the
installation and the shared folder only, as on hosts of their own.

The last test kills one of the two workers. The remaining worker then takes the snapshot, by a relative
path of the home.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.orchestration.config import backtest_folder
from fleetpulse.paths import ROOT
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.fleet_command import await_none_left, fleet_command
from tests.support.histories import histories
from tests.support.histories.streams import DEPLOYMENT, land
from tests.support.homes.homes import landed_home
from tests.support.spark_cluster import SparkCluster, has_judged, spark_cluster, start_job
from tests.support.wait import await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(2400)]  # each step has its own, shorter limit
_SUBMIT = """
import json, pathlib, sys
from fleetpulse.orchestration.operators.backtests import BacktestOnSpark
from fleetpulse.orchestration.config import OrchestrationConfig
class Context(dict):
    def xcom_push(self, key, value):
        pass
context = Context()
context["ti"] = context
task = BacktestOnSpark(task_id="t", place=OrchestrationConfig("fleet", pathlib.Path(sys.argv[1])))
task.words, task.run_name = sys.argv[2:], "a run"
print(json.dumps(task.execute(context)))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with spark_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def test_workers_run_as_another_user_who_sees_none_of_the_drivers_folders(cluster: SparkCluster) -> None:
    if cluster.host is None:
        pytest.skip(cluster.unavailable)
    for worker in cluster.parts.workers:
        await_that(lambda one=worker: psutil.Process(one.pid).name() == "java", what="the worker")
        assert psutil.Process(worker.pid).uids().effective != os.geteuid()
        seen = Path(f"/proc/{worker.pid}/root")
        assert (seen / cluster.shared.relative_to("/")).is_dir()
        assert not (seen / cluster.driver.relative_to("/")).exists()
        assert cluster.driver.exists()


def test_a_backtest_submitted_to_the_cluster_writes_its_page(cluster: SparkCluster) -> None:
    rows = [*(histories.signal(at, "pump") for at in range(0, 3000, 100)), histories.tick(6000)]
    home = landed_home(cluster.shared / "backtest", rows, Deployment(10_000)).path
    run = backtest_folder(home / "airflow" / "fleet", "a run")
    run.mkdir(parents=True)
    (run / "policy.toml").write_text('[rules]\ntimeout = "50s"\n')
    cluster.share(home)
    environment = {
        **{name: value for name, value in cluster.settings().items() if name != "FLEET_SPARK_MASTER"},
        "AIRFLOW_HOME": str(home / "airflow"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/none.db",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": cluster.parts.master}),
    }
    command = [sys.executable, "-P", "-c", _SUBMIT, str(home), "backtest", "--spark"]
    before = cluster.parts.applications()
    done = cluster.run_driver(command, environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"page": str(run / "report.html")}
    assert "<svg" in (run / "report.html").read_text()
    assert cluster.parts.applications() == before + 1, "executors of the cluster replayed it, not the driver"


_ON_A_SESSION = (
    "tests/spark/batch/state/test_operations.py::test_state_operations_between_batches_keep_the_verdicts_of_one_run",
    "tests/spark/batch/quality/test_run.py::test_the_gate_accepts_a_sound_state_and_names_damaged_devices",
)


def test_state_operations_and_the_gate_on_the_cluster_give_the_rows_of_the_definition(cluster: SparkCluster) -> None:
    folder = cluster.shared / "state"
    folder.mkdir()
    cluster.share(folder)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}", *_ON_A_SESSION]
    before = cluster.parts.applications()
    done = cluster.run_driver(command, cluster.settings(), limit_s=1500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"{len(_ON_A_SESSION)} passed" in done.stdout
    assert cluster.parts.applications() == before + 1, "executors of the cluster ran the tasks"


def marks_of_executors() -> list[str]:
    """Return the paths of the marks that running daemons of Python workers have looked for."""
    found = psutil.process_iter(["cmdline", "environ"])
    daemons = [one for one in found if "fleetpulse.io.lifecycle.python_daemon" in (one.info["cmdline"] or ())]
    return [(one.info["environ"] or {}).get("FLEET_SHARED_MARK", "") for one in daemons]


def command_lines() -> list[str]:
    return [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]


def test_job_and_snapshot_on_a_cluster_equal_the_definition_and_a_killed_worker_costs_nothing(cluster: SparkCluster) -> None:
    home, rows, cut, job = start_job(cluster)
    assert all(cluster.parts.executors(one) for one in range(2)), "both workers run an executor"
    executors = [one for number in range(2) for one in cluster.parts.executors(number)]
    assert all(cluster.ports(2, one) for one in executors), "a firewall knows the ports"
    drivers = psutil.Process(job.pid).children(recursive=True)
    assert all(any(cluster.ports(kind, one) for one in drivers) for kind in (0, 1))
    assert any(str(home.path) in mark for mark in marks_of_executors()), "executors look for the mark of the session"
    secret = cluster.parts.secret.read_text().strip()
    assert not any(secret in line for line in command_lines())
    land(home, rows[cut:], 2)
    cluster.share(home.table(MESSAGES.name))
    await_that((home.checkpoint / "offsets" / "1").exists, what="the second batch", by=job, pause_s=0.02)
    cluster.parts.kill_worker(0)
    await_that(lambda: has_judged(home, rows[-1].received_at_ms), what="the end of the rows", by=job)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 0, job.communicate()[0]
    assert emitted(home) == defined(rows, DEPLOYMENT)
    before = cluster.parts.applications()
    words = ("state", "snapshot", "--gate", "--home", os.path.relpath(home.path, ROOT))
    taken = cluster.run_driver(fleet_command(*words), {**cluster.settings(), "FLEET_EXECUTORS": "1"})
    assert taken.returncode == 0, taken.stderr
    assert cluster.parts.applications() == before + 1
    [snapshot] = snapshots(home)
    query = "SELECT count(*) AS found FROM device_snapshots WHERE part = 'device'"
    assert tables.query(home, query, tables=["device_snapshots"])[0]["found"] == snapshot.devices > 0
    await_none_left(home.path)
