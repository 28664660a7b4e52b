"""Airflow operators with real processes: results and errors of a verb, and its end with the task."""

import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fleetpulse.io.home.desired_state import STOPPED, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT
from tests.support.airflow import OF_AIRFLOW
from tests.support.airflow_tasks import Context, place
from tests.support.wait import await_that

pytestmark = OF_AIRFLOW


def program(folder: Path, text: str) -> str:
    """Return the path of a stub command with a script."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("by", "run_type", "skipped"), [
    ("airflow fleet_migrate manual__1", "scheduled", True), ("airflow fleet_migrate manual__1", "manual", False),
    ("./fleet stream stop", "scheduled", False), (None, "scheduled", False),
])  # fmt: skip
def test_a_scheduled_run_is_skipped_while_a_change_has_stopped_the_stream(
    by: str | None, run_type: str, skipped: bool, tmp_path: Path
) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    from fleetpulse.orchestration.operators.verbs import Recurring

    home = Home(tmp_path / "home")
    home.prepare(None)
    if by is not None:
        set_desired(home, STOPPED, by)
    command = program(tmp_path, "echo '{}'; touch " + str(tmp_path / "ran"))
    task = Recurring(task_id="a", words=["maintain"], gives="json", place=place(home.path, command))
    context = Context()
    context["dag_run"] = SimpleNamespace(
        run_type=run_type, dag_id="fleet_maintain", run_id="one", triggering_user_name=None, clear_number=0
    )
    with pytest.raises(AirflowSkipException, match="fleet_migrate") if skipped else nullcontext():
        task.execute(context)
    assert (tmp_path / "ran").exists() is not skipped


def test_a_failure_starts_with_the_error_of_the_command_and_is_not_retried(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators.verbs import FleetOperator

    context = Context()
    task = FleetOperator(task_id="wanted", words=["stream", "wanted"], place=place(tmp_path / "none"))
    with pytest.raises(AirflowFailException, match=r'^there is no fleet in ".*none"; create one with') as caught:
        task.execute(context)
    assert context.left == {"refused": str(caught.value)}


def test_a_usage_error_is_not_retried(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators.verbs import FleetOperator

    command = program(tmp_path, 'echo "starting" >&2; echo "fleet: --form is a number" >&2; exit 2')
    task = FleetOperator(task_id="act", words=["state", "migrate"], place=place(tmp_path, command))
    with pytest.raises(AirflowFailException, match=r"^--form is a number$"):
        task.execute(Context())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill -9 $$", "ended by signal 9 without an error message"),
        ('echo "Traceback" >&2; echo "KeyError: 1" >&2; exit 1', "ended with exit code 1: KeyError: 1"),
    ],
)
def test_a_killed_or_crashed_verb_is_retried(tmp_path: Path, text: str, message: str) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    from fleetpulse.orchestration.operators.verbs import FleetOperator

    task = FleetOperator(task_id="act", words=["x"], place=place(tmp_path, program(tmp_path, text)))
    with pytest.raises(AirflowException) as caught:
        task.execute(Context())
    assert not isinstance(caught.value, AirflowFailException)
    assert str(caught.value).splitlines()[0] == message


def test_a_verb_receives_its_run_and_the_user_that_triggered_it(tmp_path: Path) -> None:
    from fleetpulse.orchestration.operators.verbs import FleetOperator

    task = FleetOperator(
        task_id="act", words=["x"], gives="stderr", place=place(tmp_path, program(tmp_path, "echo $FLEET_ASKED_BY"))
    )
    run = SimpleNamespace(dag_id="fleet_migrate", run_id="manual__1", triggering_user_name="ada", clear_number=0)
    context = Context()
    context["dag_run"] = run
    assert task.execute(context) == "ada, fleet_migrate manual__1"
    run.triggering_user_name = None
    assert task.execute(context) == "fleet_migrate manual__1"
    run.triggering_user_name, run.clear_number = "ada", 1
    assert task.execute(context) == "fleet_migrate manual__1 (cleared)", "Airflow does not record who cleared it"


def test_a_missing_command_is_retried(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowException

    from fleetpulse.orchestration.operators.verbs import FleetOperator

    task = FleetOperator(task_id="act", words=["x"], place=place(tmp_path, str(tmp_path / "none")))
    with pytest.raises(AirflowException, match=r"none cannot be started \(No such file or directory\)"):
        task.execute(Context())


def test_the_result_is_json_of_standard_output_or_text_of_standard_error(tmp_path: Path) -> None:
    from fleetpulse.orchestration.operators.verbs import FleetOperator

    command = program(tmp_path, """echo '{"generation": 2}'; echo 'a word for people'; echo 'the plan' >&2""")
    assert FleetOperator(task_id="a", words=["x"], gives="json", place=place(tmp_path, command)).execute(Context()) == {
        "generation": 2
    }
    assert (
        FleetOperator(task_id="b", words=["x"], gives="stderr", place=place(tmp_path, command)).execute(Context()) == "the plan"
    )


@pytest.mark.parametrize(("rows", "gives", "kind"), [(1, "json", dict), (1, "rows", list), (0, "rows", list), (3, "json", list)])
def test_rows_are_a_list_for_any_number_of_rows(tmp_path: Path, rows: int, gives: Any, kind: type) -> None:
    from fleetpulse.orchestration.operators.verbs import FleetOperator

    command = program(tmp_path, "\n".join(["true", *(f"echo '{{\"row\": {number}}}'" for number in range(rows))]))
    found = FleetOperator(task_id="a", words=["x"], gives=gives, place=place(tmp_path, command)).execute(Context())
    assert isinstance(found, kind)
    assert (found if isinstance(found, list) else [found]) == [{"row": number} for number in range(rows)]


def printing(folder: Path, lines: int, width: int) -> str:
    """Return the path of a program that prints JSON objects, one on each line."""
    text = f"import json\nfor number in range({lines}): print(json.dumps({{'number': number, 'filled': 'x' * {width}}}))"
    (folder / "writes.py").write_text(text)
    return program(folder, f"exec {sys.executable} {folder}/writes.py")


@pytest.mark.parametrize(("lines", "width"), [(3_000, 10), (2, 300_000)])
def test_a_result_is_not_truncated(tmp_path: Path, lines: int, width: int) -> None:
    from fleetpulse.orchestration.operators.verbs import FleetOperator

    task = FleetOperator(task_id="a", words=["x"], gives="rows", place=place(tmp_path, printing(tmp_path, lines, width)))
    assert [(row["number"], len(row["filled"])) for row in task.execute(Context())] == [(one, width) for one in range(lines)]


@pytest.mark.parametrize(("lines", "width"), [(3_000, 10), (1, 100_000)])
def test_a_result_that_is_too_long_fails_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, width: int
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators import verbs

    monkeypatch.setattr(verbs, "_MOST_RETURNED", 50_000)
    command, context = printing(tmp_path, lines, width), Context()
    task = verbs.FleetOperator(task_id="a", words=["late", "all"], gives="json", place=place(tmp_path, command))
    with pytest.raises(AirflowFailException, match=r"^late all succeeded, but wrote more than 50,000 bytes") as caught:
        task.execute(context)
    assert context.left == {"refused": str(caught.value)}


def test_an_empty_field_gives_no_option() -> None:
    from fleetpulse.orchestration.operators.verbs import drop_empty_arguments

    assert drop_empty_arguments(["state", "bootstrap", "--version=", "--only=site = 'north'", "", "--at="]) == [
        "state",
        "bootstrap",
        "--only=site = 'north'",
    ]


def test_a_verb_does_not_inherit_the_secrets_of_airflow(tmp_path: Path) -> None:
    from fleetpulse.orchestration.operators.verbs import FleetOperator

    task = FleetOperator(task_id="a", words=["x"], gives="stderr", place=place(tmp_path, program(tmp_path, "env")))
    assert "AIRFLOW" not in task.execute(Context())


def test_a_program_submitted_to_spark_does_not_inherit_the_secrets_of_airflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    from fleetpulse.orchestration.operators.backtests import BacktestOnSpark

    environments: list[dict[str, str]] = []
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "a secret")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[2]"}')
    monkeypatch.setattr(SparkSubmitOperator, "execute", lambda self, _: environments.append({**os.environ, **self.env_vars}))
    BacktestOnSpark(task_id="a", place=place(tmp_path)).execute(Context())
    assert not any(value for name, value in environments[0].items() if "AIRFLOW" in name)
    assert environments[0]["PYTHONPATH"] == str(ROOT)
    assert environments[0]["FLEET_SPARK_MASTER"] == "local"


def test_a_cluster_of_the_connection_replaces_the_master_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators.backtests import BacktestOnSpark

    submitted: list[BacktestOnSpark] = []
    monkeypatch.setattr(SparkSubmitOperator, "execute", lambda self, _: submitted.append(self))
    (tmp_path / "settings.toml").write_text('spark_key = "spark.key"\ndriver_host = "10.0.0.7"\n')
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "spark://10.0.0.5", "port": 7077}')
    BacktestOnSpark(task_id="a", place=place(tmp_path)).execute(Context())
    assert submitted[0].env_vars["FLEET_SPARK_MASTER"] == "spark://10.0.0.5:7077"
    assert submitted[0].conf["spark.authenticate"] == "true" and "spark.executor.extraClassPath" in submitted[0].conf
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "yarn"}')
    with pytest.raises(AirflowFailException, match="standalone cluster"):
        BacktestOnSpark(task_id="a", place=place(tmp_path)).execute(Context())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "k8s://https://10.0.0.5", "port": 6443}')
    with pytest.raises(AirflowFailException, match="names a Kubernetes"):
        BacktestOnSpark(task_id="a", place=place(tmp_path)).execute(Context())


def test_killing_a_task_ends_the_verb_and_its_child_processes(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowException

    from fleetpulse.orchestration.operators.verbs import FleetOperator

    command = program(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo here; wait")
    task = FleetOperator(task_id="act", words=["x"], place=place(tmp_path, command))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            task.execute(Context())
        except AirflowException as error:
            failures.append(error)

    def child_pid() -> str:
        assert not failures, failures
        return (tmp_path / "child").read_text().strip() if (tmp_path / "child").exists() else ""

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        child = psutil.Process(int(await_that(child_pid, what="the command")))
    finally:
        task.on_kill()
    thread.join(30)
    assert not thread.is_alive()
    assert str(failures[0]).startswith(f"ended by signal {signal.SIGTERM.value}")
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("by", "state"), [("a run", "running"), ("ann", "stopped")])
def test_a_killed_stop_is_undone_with_an_audit_record_unless_the_stop_belongs_to_another_user(
    tmp_path: Path, by: str, state: str
) -> None:
    from airflow.sdk.exceptions import AirflowException

    from fleetpulse.io.home.desired_state import STOPPED, get_desired, set_desired
    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.operators.verbs import StopStream
    from fleetpulse.reports.operations.audit import audited_actions

    (tmp_path / "tables").mkdir()
    set_desired(Home(tmp_path), STOPPED, by)
    task = StopStream(task_id="stop", place=place(tmp_path, program(tmp_path, "kill -9 $$")))
    task.words = ["stream", "stop", "--by", "a run", "--own"]
    with pytest.raises(AirflowException):
        task.execute(Context())
    assert (get_desired(Home(tmp_path)).state, get_desired(Home(tmp_path)).by) == (state, by)
    undone = audited_actions(Home(tmp_path), None)
    assert [(one["action"], one["asked_by"], one["result"]) for one in undone] == (
        [("stream start", "a run", "ok")] if by == "a run" else []
    )


def test_a_verb_ends_although_its_child_process_still_runs(tmp_path: Path) -> None:
    from fleetpulse.orchestration.subprocess import Verb

    lines: list[str] = []
    verb = Verb([program(tmp_path, "sleep 60 & echo $!; printf unfinished")], lines.append)
    ended = verb.wait()
    psutil.Process(int(ended.out[0])).kill()
    assert ended.code == 0
    assert lines == [ended.out[0], "unfinished"]
