"""The operators with real processes: what a verb says is what a failure says, and no verb outlives its task."""

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
    """Return a program that stands in for the command."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("by", "run_type", "left_out"), [
    ("airflow fleet_migrate manual__1", "scheduled", True), ("airflow fleet_migrate manual__1", "manual", False),
    ("./fleet stream stop", "scheduled", False), (None, "scheduled", False),
])  # fmt: skip
def test_what_comes_again_by_itself_stays_away_from_a_change(
    by: str | None, run_type: str, left_out: bool, tmp_path: Path
) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    from fleetpulse.orchestration.operators import Recurring

    home = Home(tmp_path / "home")
    home.prepare(None)
    if by is not None:
        set_desired(home, STOPPED, by)
    command = program(tmp_path, "echo '{}'; touch " + str(tmp_path / "ran"))
    task = Recurring(task_id="a", words=["maintain"], gives="json", place=place(home.path, command))
    context = Context()
    context["dag_run"] = SimpleNamespace(run_type=run_type, dag_id="fleet_maintain", run_id="one", triggering_user_name=None)
    with pytest.raises(AirflowSkipException, match="fleet_migrate") if left_out else nullcontext():
        task.execute(context)
    assert (tmp_path / "ran").exists() is not left_out


def test_the_first_line_of_a_failure_is_the_sentence_of_the_command_and_it_is_not_tried_again(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators import FleetOperator

    context = Context()
    task = FleetOperator(task_id="wanted", words=["stream", "wanted"], place=place(tmp_path / "none"))
    with pytest.raises(AirflowFailException, match=r'^there is no fleet in ".*none"; create one with') as caught:
        task.execute(context)
    assert context.left == {"refused": str(caught.value)}


def test_misuse_is_a_refusal_too(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators import FleetOperator

    command = program(tmp_path, 'echo "starting" >&2; echo "fleet: --form is a number" >&2; exit 2')
    task = FleetOperator(task_id="act", words=["state", "migrate"], place=place(tmp_path, command))
    with pytest.raises(AirflowFailException, match=r"^--form is a number$"):
        task.execute(Context())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill -9 $$", "ended by signal 9 without an error message"),
        ('echo "Traceback" >&2; echo "KeyError: 1" >&2; exit 1', "ended with exit code 1: KeyError: 1"),
    ],
)
def test_a_verb_that_was_ended_or_crashed_is_tried_again(tmp_path: Path, text: str, said: str) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    from fleetpulse.orchestration.operators import FleetOperator

    task = FleetOperator(task_id="act", words=["x"], place=place(tmp_path, program(tmp_path, text)))
    with pytest.raises(AirflowException) as caught:
        task.execute(Context())
    assert not isinstance(caught.value, AirflowFailException)
    assert str(caught.value).splitlines()[0] == said


def test_a_verb_is_told_which_run_asks_for_it_and_who_triggered_that(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from fleetpulse.orchestration.operators import FleetOperator

    task = FleetOperator(
        task_id="act", words=["x"], gives="told", place=place(tmp_path, program(tmp_path, "echo $FLEET_ASKED_BY"))
    )
    for user, said in (("ada", "ada, fleet_migrate manual__1"), (None, "fleet_migrate manual__1")):
        context = Context()
        context["dag_run"] = SimpleNamespace(dag_id="fleet_migrate", run_id="manual__1", triggering_user_name=user)
        assert task.execute(context) == said


def test_a_command_that_is_not_there_is_tried_again(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowException

    from fleetpulse.orchestration.operators import FleetOperator

    task = FleetOperator(task_id="act", words=["x"], place=place(tmp_path, str(tmp_path / "none")))
    with pytest.raises(AirflowException, match=r"none cannot be started \(No such file or directory\)"):
        task.execute(Context())


def test_json_on_standard_output_is_the_result_and_what_else_is_there_is_not(tmp_path: Path) -> None:
    from fleetpulse.orchestration.operators import FleetOperator

    command = program(tmp_path, """echo '{"generation": 2}'; echo 'a word for people'; echo 'the plan' >&2""")
    assert FleetOperator(task_id="a", words=["x"], gives="json", place=place(tmp_path, command)).execute(Context()) == {
        "generation": 2
    }
    assert FleetOperator(task_id="b", words=["x"], gives="told", place=place(tmp_path, command)).execute(Context()) == "the plan"


@pytest.mark.parametrize(("rows", "gives", "kind"), [(1, "json", dict), (1, "rows", list), (0, "rows", list), (3, "json", list)])
def test_rows_are_a_list_however_many(tmp_path: Path, rows: int, gives: Any, kind: type) -> None:
    from fleetpulse.orchestration.operators import FleetOperator

    command = program(tmp_path, "\n".join(["true", *(f"echo '{{\"row\": {number}}}'" for number in range(rows))]))
    found = FleetOperator(task_id="a", words=["x"], gives=gives, place=place(tmp_path, command)).execute(Context())
    assert isinstance(found, kind)
    assert (found if isinstance(found, list) else [found]) == [{"row": number} for number in range(rows)]


def writing(folder: Path, lines: int, width: int) -> str:
    """Return a program that prints objects, each on a line of its own."""
    text = f"import json\nfor number in range({lines}): print(json.dumps({{'number': number, 'filled': 'x' * {width}}}))"
    (folder / "writes.py").write_text(text)
    return program(folder, f"exec {sys.executable} {folder}/writes.py")


@pytest.mark.parametrize(("lines", "width"), [(3_000, 10), (2, 300_000)])
def test_of_a_result_nothing_is_cut(tmp_path: Path, lines: int, width: int) -> None:
    from fleetpulse.orchestration.operators import FleetOperator

    task = FleetOperator(task_id="a", words=["x"], gives="rows", place=place(tmp_path, writing(tmp_path, lines, width)))
    assert [(row["number"], len(row["filled"])) for row in task.execute(Context())] == [(one, width) for one in range(lines)]


@pytest.mark.parametrize(("lines", "width"), [(3_000, 10), (1, 100_000)])
def test_a_result_that_is_too_long_is_a_failure_and_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, width: int
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration import operators

    monkeypatch.setattr(operators, "_MOST_RETURNED", 50_000)
    command, context = writing(tmp_path, lines, width), Context()
    task = operators.FleetOperator(task_id="a", words=["late", "all"], gives="json", place=place(tmp_path, command))
    with pytest.raises(AirflowFailException, match=r"^late all succeeded, but wrote more than 50,000 bytes") as told:
        task.execute(context)
    assert context.left == {"refused": str(told.value)}


def test_a_field_that_is_empty_is_an_option_that_is_not_given() -> None:
    from fleetpulse.orchestration.operators import drop_empty_words

    assert drop_empty_words(["state", "bootstrap", "--version=", "--only=site = 'north'", "", "--at="]) == [
        "state",
        "bootstrap",
        "--only=site = 'north'",
    ]


def test_the_secrets_of_airflow_are_not_the_verbs(tmp_path: Path) -> None:
    from fleetpulse.orchestration.operators import FleetOperator

    task = FleetOperator(task_id="a", words=["x"], gives="told", place=place(tmp_path, program(tmp_path, "env")))
    assert "AIRFLOW" not in task.execute(Context())


def test_the_secrets_of_airflow_are_not_those_of_a_program_that_is_handed_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    from fleetpulse.orchestration.backtest_operators import BacktestOnSpark

    handed: list[dict[str, str]] = []
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "a secret")
    monkeypatch.setattr(SparkSubmitOperator, "execute", lambda self, _: handed.append({**os.environ, **self.env_vars}))
    BacktestOnSpark(task_id="a", place=place(tmp_path)).execute(Context())
    assert not any(value for name, value in handed[0].items() if "AIRFLOW" in name)
    assert handed[0]["PYTHONPATH"] == str(ROOT)


def test_killing_a_task_ends_the_verb_and_all_that_it_started(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowException

    from fleetpulse.orchestration.operators import FleetOperator

    command = program(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo here; wait")
    task = FleetOperator(task_id="act", words=["x"], place=place(tmp_path, command))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            task.execute(Context())
        except AirflowException as error:
            failures.append(error)

    def begun() -> str:
        assert not failures, failures
        return (tmp_path / "child").read_text().strip() if (tmp_path / "child").exists() else ""

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        child = psutil.Process(int(await_that(begun, what="the command")))
    finally:
        task.on_kill()
    thread.join(30)
    assert not thread.is_alive()
    assert str(failures[0]).startswith(f"ended by signal {signal.SIGTERM.value}")
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("by", "left"), [("a run", "running"), ("ann", "stopped")])
def test_a_stop_that_is_ended_is_taken_back_and_one_of_somebody_else_is_not(tmp_path: Path, by: str, left: str) -> None:
    from airflow.sdk.exceptions import AirflowException

    from fleetpulse.io.home.desired_state import STOPPED, get_desired, set_desired
    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.operators import StopStream

    set_desired(Home(tmp_path), STOPPED, by)
    task = StopStream(task_id="stop", place=place(tmp_path, program(tmp_path, "kill -9 $$")))
    task.words = ["stream", "stop", "--by", "a run", "--own"]
    with pytest.raises(AirflowException):
        task.execute(Context())
    assert (get_desired(Home(tmp_path)).what, get_desired(Home(tmp_path)).by) == (left, by)


def test_a_verb_that_leaves_another_running_has_ended_all_the_same(tmp_path: Path) -> None:
    from fleetpulse.orchestration.subprocess import Verb

    said: list[str] = []
    verb = Verb([program(tmp_path, "sleep 60 & echo $!; printf unfinished")], said.append)
    ended = verb.wait()
    psutil.Process(int(ended.out[0])).kill()
    assert ended.code == 0
    assert said == [ended.out[0], "unfinished"]
