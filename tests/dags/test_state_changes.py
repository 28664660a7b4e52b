"""DAG runs that change the state: refused steps, failed steps and concurrent changes."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.airflow import COMMAND, OF_AIRFLOW, STUB, StubCommand, built
from tests.support.airflow_tasks import Context

pytestmark = OF_AIRFLOW
GATE = 'suite "transitions": 3 rows fail "numbered without gap or repeat", first: device pump-1, life 1, number 4'
RunDag = Callable[[Any], dict[str, str]]


def verbs(stub: StubCommand) -> list[str]:
    """Return the calls of verbs, without ``--by`` and later arguments."""
    return [call.partition(" --by ")[0] for call in stub.calls()]


def test_a_refusing_gate_keeps_the_old_generation_and_fails_the_run(
    stub: StubCommand, run_dag: RunDag, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.fail(quality_gate=GATE)
    ended = run_dag(built("fleet_migrate"))
    assert verbs(stub) == [
        "state migrate --dry-run --once-stopped",
        "stream stop",
        "state migrate --hold --json",
        "quality gate --generation 2 --json",
        "state discard 2",
        "stream start",
    ]
    assert stub.desired()["what"] == "running"
    assert ended[""] == "failed"
    assert [ended[task] for task in ("act", "gate", "switch", "start", "watch", "go_back", "outcome")] == [
        "success",
        "failed",
        "upstream_failed",
        "upstream_failed",
        "upstream_failed",
        "success",
        "failed",
    ]
    output = capsys.readouterr()
    assert (
        f"AirflowFailException: gate: {GATE}\nthen: discarded generation 2; started the stream again" in output.out + output.err
    )


def test_the_stream_is_started_again_after_a_verb_refuses(stub: StubCommand, run_dag: RunDag) -> None:
    stub.fail(**{"state_rescale_--key-groups=8_--hold": "two devices share a place"})
    ended = run_dag(built("fleet_rescale"))
    assert verbs(stub)[-3:] == ["stream stop", "state rescale --key-groups=8 --hold --json", "stream start"]
    assert ended[""] == "failed" and ended["go_back"] == "success"


def test_a_generation_held_by_a_failed_task_is_discarded(stub: StubCommand, run_dag: RunDag) -> None:
    stub.fail(**{"state_rescale_--key-groups=8_--hold": "the machine was switched off"})
    held = {"number": 3, "key_groups": 8, "form": 4, "made_by": "rescale", "made_at_ms": 5, "status": "held"}
    record = stub.home / "checkpoints" / "lifecycle" / "generations.json"
    record.write_text(json.dumps({"current": 1, "generations": [held]}))
    assert run_dag(built("fleet_rescale"))["go_back"] == "success"
    assert verbs(stub)[-2:] == ["state discard 3", "stream start"]


def test_a_run_refuses_a_stream_stopped_by_another_run_and_undoes_nothing(stub: StubCommand, run_dag: RunDag) -> None:
    by_another = {"what": "stopped", "by": "airflow fleet_migrate manual__earlier", "at_ms": 1}
    (stub.home / "desired.json").write_text(json.dumps(by_another))
    ended = run_dag(built("fleet_repartition"))
    assert verbs(stub) == ["state repartition 2 --dry-run --once-stopped", "stream stop"]
    assert stub.desired() == by_another
    assert ended["stop"] == "failed" and ended["go_back"] in ("upstream_failed", "skipped") and ended[""] == "failed"


def test_a_stream_that_does_not_advance_is_rolled_back(stub: StubCommand, run_dag: RunDag) -> None:
    dag = built("fleet_bootstrap")
    dag.get_task("watch").patience = timedelta(0)
    ended = run_dag(dag)
    assert verbs(stub)[-7:] == [
        "state bootstrap --hold --json --version=3 --drops-at-most=0",
        "quality gate --generation 2 --json",
        "state switch 2",
        "stream start",
        "stream stop",
        "state rollback",
        "stream start",
    ]
    assert ended["watch"] == "failed" and ended["go_back"] == "success" and ended[""] == "failed"


def test_a_stream_that_a_user_stops_during_a_rollback_stays_stopped(stub: StubCommand, run_dag: RunDag) -> None:
    by_ann = {"what": "stopped", "by": "ann", "at_ms": 7}
    stops = f"(home / 'desired.json').write_text({json.dumps(by_ann)!r})"
    COMMAND.write_text(f"{STUB}\nif line.startswith('state rollback'): {stops}\n")
    dag = built("fleet_bootstrap")
    dag.get_task("watch").patience = timedelta(0)
    ended = run_dag(dag)
    assert verbs(stub)[-2:] == ["stream stop", "state rollback"]
    assert stub.desired() == by_ann and ended["go_back"] == "success"


@pytest.mark.parametrize("status", ["held", "current"])
@pytest.mark.parametrize("begun", [True, False])
def test_the_generation_that_an_xcom_names_is_neither_checked_nor_undone(stub: StubCommand, status: str, begun: bool) -> None:
    """A user may write the XCom of a run, and mark its task act as successful."""
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.approvals import RunApproval
    from fleetpulse.orchestration.operators.verbs import GENERATION, FleetOperator, RollbackOperator

    class Forged(Context):
        dag_id, run_id = "fleet_migrate", "manual__1"

        def xcom_pull(self, **which: Any) -> Any:
            return {"generation": 7}

        def get_task_states(self, dag_id: str, **which: Any) -> Any:
            return {self.run_id: {}}

    other = {"number": 7, "key_groups": 8, "form": 4, "made_by": "rescale", "made_at_ms": 5, "status": status}
    record = {"current": 7 if status == "current" else 1, "generations": [other]}
    (stub.home / "checkpoints" / "lifecycle" / "generations.json").write_text(json.dumps(record))
    context = Forged()
    context["dag_run"] = SimpleNamespace(
        dag_id="fleet_migrate", run_id="manual__1", triggering_user_name="ada", clear_number=0, start_date=None
    )
    switch = FleetOperator(task_id="switch", words=["state", "switch", GENERATION], approved=True)
    go_back = RollbackOperator(task_id="go_back", last="watch")
    approval = RunApproval(go_back.place, context)
    approval.save_plan("the plan")
    approval.approve("bob")
    if begun:
        approval.begin()
    with pytest.raises(AirflowFailException, match=r"has made no generation"):
        switch.execute(context)
    assert go_back.execute(context) == "started the stream again"
    assert [call.partition(" --by ")[0] for call in stub.calls()] == ["stream start"]
    approval.made(7)
    assert re.match("discarded|stopped the stream; rolled back", go_back.execute(context))


def test_go_back_waits_for_a_generation_that_is_still_being_built(stub: StubCommand) -> None:
    from threading import Timer

    from fleetpulse.io.home.exclusive import exclusive_state_change
    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.operators.verbs import RollbackOperator

    record = stub.home / "checkpoints" / "lifecycle" / "generations.json"
    held = {"number": 3, "key_groups": 8, "form": 4, "made_by": "rescale", "made_at_ms": 5, "status": "held"}
    task = RollbackOperator(task_id="go_back", last="watch")
    (stub.home / "desired.json").write_text(json.dumps({"what": "stopped", "by": task.by, "at_ms": 1}))
    with ExitStack() as building:
        building.enter_context(exclusive_state_change(Home(stub.home), "a test", lambda arguments: None))

        def end() -> None:
            record.write_text(json.dumps({"current": 1, "generations": [held]}))
            building.close()

        Timer(0.2, end).start()
        steps = [" ".join(arguments[:3]) for arguments, _ in task._steps(None, begun=True)]
    assert steps == ["state discard 3", "stream start --by"]


@pytest.mark.parametrize("dies_after", ["state discard", "state rollback"])
def test_a_repeated_go_back_undoes_nothing_and_starts_the_stream(stub: StubCommand, run_dag: RunDag, dies_after: str) -> None:
    COMMAND.write_text(f"{STUB}\nif line.startswith({dies_after!r}): import os; os.kill(os.getpid(), 9)\n")
    dag = built("fleet_bootstrap")
    if dies_after == "state discard":
        stub.fail(quality_gate=GATE)
    dag.get_task("watch").patience = timedelta(0)
    run_dag(dag)
    COMMAND.write_text(STUB)
    task = dag.get_task("go_back")
    task.by = stub.desired()["by"]
    steps = [(" ".join(arguments[:2]), message) for arguments, message in task._steps(2, begun=True)]
    nothing_left = "generation 2 is no longer held; nothing is left to undo"
    assert steps == [("", nothing_left), ("stream start", "started the stream again")]


def test_a_successful_change_undoes_nothing(stub: StubCommand, run_dag: RunDag) -> None:
    dag = built("fleet_migrate")
    dag.get_task("watch").batch = -1
    batches = stub.home / "checkpoints" / "lifecycle" / "gen-0002"
    for folder in ("commits", "offsets"):
        (batches / folder).mkdir(parents=True, exist_ok=True)
    (batches / "commits" / "4").write_text('v1\n{"nextBatchWatermarkMs": 1000}')
    (batches / "offsets" / "4").write_text('v1\n{"batchWatermarkMs": 0}\n{}')
    ended = run_dag(dag)
    assert set(ended.values()) == {"success"}
    assert verbs(stub)[-2:] == ["state switch 2", "stream start"]
