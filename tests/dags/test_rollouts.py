"""Runs of `fleet_rollout`: approvals of each cohort, a stopped rollout, and its end however the run ends."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.rollout import Rollout, Status
from fleetpulse.core.rollouts.verdict import Result, Verdict
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout
from fleetpulse.orchestration.approvals import RunApproval
from fleetpulse.orchestration.config import rollout_folder
from tests.support.airflow import COMMAND, OF_AIRFLOW, STUB, StubCommand, built
from tests.support.airflow_tasks import Context, place

pytestmark = OF_AIRFLOW
RunDag = Callable[..., dict[str, str]]
PLAN = 'name = "pumps-2"\nversion = "2.0"\nscope = "TRUE"\nsoak = "1h"\n'
WORSE = 'the rollout "pumps-2" is stopped: 9 of 9 (100.0 %) devices went offline, of the rest 0 of 90 (0.0 %)'
VERBS = """
rollouts = home / "rollouts" / "pumps-2"
if words[:2] == ["rollout", "start"]:
    if "--dry-run" in words:
        print("devices: 1,000 (TRUE)", file=sys.stderr)
    else:
        rollouts.mkdir(parents=True, exist_ok=True)
        record = {"form": 2, "plan": {"name": "pumps-2", "version": "2.0", "scope": "TRUE", "soak": "1h"}, "devices": 1000}
        record |= {"owner": words[words.index("--owner") + 1], "cohorts": [], "status": "running", "ended_ms": None}
        record |= {"end_requester": None, "reason": None}
        record["cohorts"] = [{"number": 1, "devices": 100, "requester": "ada", "started_ms": 1}]
        (rollouts / "rollout.json").write_text(json.dumps(record))
        print(json.dumps({"cohort": 1}))
if words[:2] == ["rollout", "advance"] and "--json" in words:
    record = json.loads((rollouts / "rollout.json").read_text())
    if words[3] == "--to=3":
        record["status"] = "completed"
    (rollouts / "rollout.json").write_text(json.dumps(record))
    print(json.dumps({"cohort": int(words[3][-1])}))
if words[:2] == ["rollout", "check"]:
    found = {"verdict": {"result": "passed", "reason": "as good as the rest", "until_ms": 5}, "observed": {"through_ms": 9}}
    print(json.dumps(found))
"""


@pytest.fixture
def rollouts(stub: StubCommand) -> StubCommand:
    """Return the stub command, which also records a rollout."""
    COMMAND.write_text(f"{STUB}\n{VERBS}")
    StoredRollout(Home(stub.home), "pumps-2").create([])
    (stub.home / "rollouts" / "pumps-2" / "rollout.json").unlink(missing_ok=True)
    return stub


def verbs(stub: StubCommand) -> list[str]:
    """Return the calls, without the path of the plan and the names of the run."""
    return [" ".join(word for word in call.split(" --owner ")[0].split() if "/" not in word) for call in stub.calls()]


def test_a_run_asks_before_each_cohort_and_sends_all(rollouts: StubCommand, run_dag: RunDag) -> None:
    ended = run_dag(built("fleet_rollout"), plan=PLAN)
    assert set(ended.values()) == {"success"} and len(ended) == 16
    assert verbs(rollouts) == [
        "rollout start --dry-run",
        "rollout start --json --devices-at-most=1000",
        "rollout check pumps-2 --json",
        "rollout advance pumps-2 --to=2 --dry-run",
        "rollout advance pumps-2 --to=2 --json",
        "rollout check pumps-2 --json",
        "rollout advance pumps-2 --to=3 --dry-run",
        "rollout advance pumps-2 --to=3 --json",
        "rollout check pumps-2 --json",
    ]
    assert list((rollouts.home / "airflow" / "fleet" / "approvals").iterdir()) == []
    assert list((rollouts.home / "airflow" / "fleet" / "rollouts").iterdir()) == []


def test_a_stopped_rollout_fails_the_run_with_its_arithmetic(
    rollouts: StubCommand, run_dag: RunDag, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts.fail(rollout_check=WORSE)
    ended = run_dag(built("fleet_rollout"), plan=PLAN)
    assert (ended[""], ended["check_1"], ended["plan_2"], ended["stop"]) == ("failed", "failed", "upstream_failed", "success")
    assert [call for call in verbs(rollouts) if "advance" in call] == []
    output = capsys.readouterr()
    expected = f'check_1: {WORSE}\nthen: the rollout "pumps-2" is stopped after cohort 1 of 3'
    assert expected in output.out + output.err


def test_a_rollout_that_nobody_continues_is_stopped_in_the_name_of_its_run(
    rollouts: StubCommand, run_dag: RunDag, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from airflow.providers.standard.operators.hitl import HITLOperator

    def answer(task: Any, context: Any) -> Any:
        chosen = "Reject" if task.task_id == "approve_2" else "Approve"
        event = {"chosen_options": [chosen], "params_input": {}, "responded_at": datetime.now(UTC)}
        return task.execute_complete(context, {**event, "responded_by_user": {"id": "bob", "name": "bob"}})

    monkeypatch.setattr(HITLOperator, "execute", answer)
    ended = run_dag(built("fleet_rollout"), plan=PLAN)
    assert (ended["approve_2"], ended["start_2"], ended["stop"], ended["outcome"]) == ("success", "skipped", "success", "success")
    assert verbs(rollouts)[-1] == "rollout stop pumps-2 --own"
    record = json.loads((rollouts.home / "rollouts" / "pumps-2" / "rollout.json").read_text())
    assert f"--owner {record['owner']} --why" in rollouts.calls()[-1] and record["owner"].startswith("airflow fleet_rollout ")


def test_the_approval_of_a_cohort_is_none_of_the_next(
    rollouts: StubCommand, run_dag: RunDag, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user may mark the tasks of a run as successful."""
    ended = run_dag(built("fleet_rollout"), mark="approve_2", plan=PLAN)
    assert (ended["approve_1"], ended["start_1"], ended["start_2"]) == ("success", "success", "failed")
    output = capsys.readouterr()
    assert "has no approval: nobody answered" in output.out + output.err
    assert verbs(rollouts)[-1] == "rollout stop pumps-2 --own"


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ("name =", "is not TOML"),
        (PLAN + "speed = 1\n", '"speed" is unknown'),
        (PLAN + "cohorts = [50, 100]\n", "asks between 3 cohorts; got 2"),
    ],
)
def test_an_invalid_plan_ends_a_run_before_its_first_verb(
    rollouts: StubCommand, run_dag: RunDag, capsys: pytest.CaptureFixture[str], plan: str, fault: str
) -> None:
    ended = run_dag(built("fleet_rollout"), plan=plan)
    assert (ended[""], ended["write_plan"], ended["plan_1"]) == ("failed", "failed", "upstream_failed")
    assert rollouts.calls() == []
    output = capsys.readouterr()
    assert fault in output.out + output.err


def context_of(home: Path) -> Context:
    """Return the context of a task whose run has the plan."""
    context = Context()
    run = SimpleNamespace(
        dag_id="fleet_rollout", run_id="manual__1", run_type="manual", triggering_user_name="ada", clear_number=0, start_date=None
    )
    context.update(dag_run=run, params={"plan": PLAN})
    folder = rollout_folder(place(home).data_folder, "manual__1")
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(PLAN)
    return context


def command_that_prints(home: Path, found: dict[str, Any]) -> str:
    """Return the path of a command that prints JSON."""
    path = home / "fleet"
    path.write_text(f"#!/bin/sh\ncat <<'E'\n{json.dumps(found)}\nE\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("through_ms", "until_ms", "wanted"),
    [
        (1_000_000, 4_000_000, 1_072_000),
        (3_990_000, 4_000_000, 4_000_000),
        (4_000_000, 4_000_000, 4_072_000),
    ],
)
def test_a_waiting_cohort_is_judged_again_when_the_frontier_has_advanced(
    tmp_path: Path, through_ms: int, until_ms: int, wanted: int
) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    from fleetpulse.orchestration.operators.rollouts import WaitForCohort

    found = {"verdict": {"result": "waiting", "reason": "early", "until_ms": until_ms}, "observed": {"through_ms": through_ms}}
    context = context_of(tmp_path)
    task = WaitForCohort(task_id="check_1", place=place(tmp_path, command_that_prints(tmp_path, found)))
    task.run_name = "manual__1"
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context)
    trigger: Any = deferred.value.trigger
    assert (trigger.wanted, trigger.first_s, deferred.value.method_name) == (wanted, 5.0, "again")
    assert deferred.value.timeout == timedelta(milliseconds=wanted - through_ms) + timedelta(minutes=12)
    with pytest.raises(TaskDeferred):
        task.again(context, {"reached": True, "at": wanted, "wanted": wanted})
    passed = {"verdict": {"result": "passed", "reason": "good", "until_ms": 1}, "observed": {"through_ms": 2}}
    command_that_prints(tmp_path, passed)
    assert task.again(context, {"reached": True, "at": wanted, "wanted": wanted}) == "good"


def test_a_wait_for_a_cohort_has_an_end(tmp_path: Path) -> None:
    from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.operators.rollouts import WaitForCohort

    verdict = {"result": "waiting", "reason": "3 devices acknowledged", "until_ms": 4_000_000}
    found = {"verdict": verdict, "observed": {"through_ms": 4_000_000 + 7_200_001}}
    context = context_of(tmp_path)
    task = WaitForCohort(task_id="check_1", place=place(tmp_path, command_that_prints(tmp_path, found)))
    task.run_name = "manual__1"
    with pytest.raises(AirflowFailException, match=r"made no statement until .*: 3 devices acknowledged"):
        task.execute(context)
    with pytest.raises(AirflowFailException, match=r"the frontier did not reach .* nothing was judged"):
        task.again(context, {"reached": False, "at": None, "wanted": 5_000})
    with pytest.raises(AirflowFailException, match="the triggerer did not respond"):
        task.resume_execution(TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT}, context)
    assert "the triggerer" in str(context.left["refused"])


@pytest.mark.parametrize("state", ["absent", "of another", "completed"])
def test_the_end_of_a_run_leaves_a_rollout_that_is_not_its_own_or_completed(tmp_path: Path, state: str) -> None:
    from fleetpulse.orchestration.operators.rollouts import StopRollout

    context, home = context_of(tmp_path), Home(tmp_path)
    task = StopRollout(task_id="stop", place=place(tmp_path, "/no/such/command"))
    task.run_name, task.rollout_owner = "manual__1", "airflow fleet_rollout manual__1"
    stored, plan = (
        StoredRollout(home, "pumps-2"),
        parse_rollout_plan({"name": "pumps-2", "version": "2", "scope": "TRUE", "soak": "1h", "cohorts": [100]}),
    )
    if state != "absent":
        stored.create([])
        begun = Rollout(plan, 9, "eve" if state == "of another" else task.rollout_owner).starting(9, "ada", 1).sent(2)
        stored.write(begun if state == "of another" else begun.judged(Verdict(Result.PASSED, "good"), "ada", 3))
    said = task.execute(context)
    assert said == f'the rollout "pumps-2" {"is completed" if state == "completed" else "was not started by this run"}'
    assert state == "absent" or stored.read().status is (Status.COMPLETED if state == "completed" else Status.RUNNING)
    assert not task.plan_file.exists()


def test_each_step_has_an_approval_of_its_own(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    first, second = (RunApproval(place(tmp_path), context, f"cohort {number}") for number in (1, 2))
    first.save_plan("the plan")
    first.approve("bob")
    first.require()
    for of in (second, RunApproval(place(tmp_path), context)):
        with pytest.raises(Exception, match="has no plan"):
            of.require()
    tasks = {task.task_id: task for task in built("fleet_rollout").tasks}
    for number in (1, 2, 3):
        steps = {tasks[f"{name}_{number}"].step for name in ("plan", "approve", "start")}
        assert steps == {f"cohort {number}"} and tasks[f"start_{number}"].approved
