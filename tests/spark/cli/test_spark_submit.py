"""Verbs through spark-submit: the arguments and the result are those of the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.paths import ROOT
from tests.support.histories.histories import signal, tick
from tests.support.homes.homes import landed_home

pytestmark = [pytest.mark.spark, pytest.mark.extended]
_SUBMIT = """
import json, pathlib, sys
from fleetpulse.orchestration.backtest_operators import BacktestOnSpark
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


def submit(home: Path, *arguments: str) -> object:
    """Return the result of a task that submits a verb to Spark."""
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(home / "airflow"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/none.db",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-P", "-c", _SUBMIT, str(home), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_backtest_submitted_to_spark_writes_its_page(tmp_path: Path) -> None:
    rows = [*(signal(at, "pump") for at in range(0, 3000, 100)), tick(6000)]
    home = landed_home(tmp_path / "home", rows, Deployment(10_000)).path
    run = home / "airflow" / "fleet" / "backtests" / "a-run"
    run.mkdir(parents=True)
    (run / "policy.toml").write_text('[rules]\ntimeout = "50s"\n')
    assert submit(home, "backtest", "--spark") == {"page": str(run / "report.html")}
    assert "<svg" in (run / "report.html").read_text()
