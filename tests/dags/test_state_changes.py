"""A change of the state, run to its end: what happens where each step is refused, and where two want to change it at once."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from tests.support.airflow import COMMAND, OF_AIRFLOW, STAND_IN, Stand, built

pytestmark = OF_AIRFLOW
GATE = 'suite "transitions": 3 rows fail "numbers without gap or repeat", first: device pump-1, life 1, number 4'
Trial = Callable[[Any], dict[str, str]]


def verbs(stand: Stand) -> list[str]:
    """Return the verbs that were called, without who called."""
    return [call.partition(" --by ")[0] for call in stand.calls()]


def test_a_gate_that_refuses_leaves_the_old_generation_running_and_the_run_red(
    stand: Stand, trial: Trial, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.fail(quality_gate=GATE)
    ended = trial(built("fleet_migrate"))
    assert verbs(stand) == [
        "state migrate --dry-run --once-stopped",
        "stream stop",
        "state migrate --hold --json",
        "quality gate --generation 2 --json",
        "state discard 2",
        "stream start",
    ]
    assert stand.wanted()["what"] == "running"
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
    said = capsys.readouterr()
    assert f"AirflowFailException: gate: {GATE}\nthen: discarded generation 2; started the stream again" in said.out + said.err


def test_a_verb_that_refuses_starts_the_stream_again(stand: Stand, trial: Trial) -> None:
    stand.fail(**{"state_rescale_--key-groups=8_--hold": "two devices share a place"})
    ended = trial(built("fleet_rescale"))
    assert verbs(stand)[-3:] == ["stream stop", "state rescale --key-groups=8 --hold --json", "stream start"]
    assert ended[""] == "failed" and ended["go_back"] == "success"


def test_a_generation_that_was_held_by_a_task_that_could_not_say_so_is_discarded(stand: Stand, trial: Trial) -> None:
    stand.fail(**{"state_rescale_--key-groups=8_--hold": "the machine was switched off"})
    held = {"number": 3, "key_groups": 8, "form": 4, "made_by": "rescale", "made_at_ms": 5, "status": "held"}
    record = stand.home / "checkpoints" / "lifecycle" / "generations.json"
    record.write_text(json.dumps({"current": 1, "generations": [held]}))
    assert trial(built("fleet_rescale"))["go_back"] == "success"
    assert verbs(stand)[-2:] == ["state discard 3", "stream start"]


def test_a_run_that_finds_the_stream_stopped_by_another_refuses_and_undoes_nothing(stand: Stand, trial: Trial) -> None:
    by_another = {"what": "stopped", "by": "airflow fleet_migrate manual__earlier", "at_ms": 1}
    (stand.home / "desired.json").write_text(json.dumps(by_another))
    ended = trial(built("fleet_repartition"))
    assert verbs(stand) == ["state repartition 2 --dry-run --once-stopped", "stream stop"]
    assert stand.wanted() == by_another
    assert ended["stop"] == "failed" and ended["go_back"] in ("upstream_failed", "skipped") and ended[""] == "failed"


def test_a_stream_that_does_not_advance_is_rolled_back(stand: Stand, trial: Trial) -> None:
    dag = built("fleet_bootstrap")
    dag.get_task("watch").patience = timedelta(0)
    ended = trial(dag)
    assert verbs(stand)[-6:] == [
        "quality gate --generation 2 --json",
        "state switch 2",
        "stream start",
        "stream stop",
        "state rollback",
        "stream start",
    ]
    assert ended["watch"] == "failed" and ended["go_back"] == "success" and ended[""] == "failed"


def test_a_stream_that_somebody_stops_while_a_run_goes_back_stays_stopped(stand: Stand, trial: Trial) -> None:
    by_ann = {"what": "stopped", "by": "ann", "at_ms": 7}
    stops = f"(home / 'desired.json').write_text({json.dumps(by_ann)!r})"
    COMMAND.write_text(f"{STAND_IN}\nif said.startswith('state rollback'): {stops}\n")
    dag = built("fleet_bootstrap")
    dag.get_task("watch").patience = timedelta(0)
    ended = trial(dag)
    assert verbs(stand)[-2:] == ["stream stop", "state rollback"]
    assert stand.wanted() == by_ann and ended["go_back"] == "success"


def test_a_run_waits_for_who_still_makes_a_generation_before_it_looks_what_there_is_to_undo(stand: Stand) -> None:
    from threading import Timer

    from fleetpulse.io.home.exclusive import exclusive_state_change
    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.operators import RollbackOperator

    record = stand.home / "checkpoints" / "lifecycle" / "generations.json"
    held = {"number": 3, "key_groups": 8, "form": 4, "made_by": "rescale", "made_at_ms": 5, "status": "held"}
    task = RollbackOperator(task_id="go_back", made_by="act", last="watch")
    (stand.home / "desired.json").write_text(json.dumps({"what": "stopped", "by": task.by, "at_ms": 1}))
    with ExitStack() as maker:
        maker.enter_context(exclusive_state_change(Home(stand.home), "a test", lambda words: None))

        def end() -> None:
            record.write_text(json.dumps({"current": 1, "generations": [held]}))
            maker.close()

        Timer(0.2, end).start()
        steps = [" ".join(words[:3]) for words, _ in task._steps(None)]
    assert steps == ["state discard 3", "stream start --by"]


@pytest.mark.parametrize("dies_after", ["state discard", "state rollback"])
def test_going_back_a_second_time_finds_nothing_left_and_starts_the_stream(stand: Stand, trial: Trial, dies_after: str) -> None:
    COMMAND.write_text(f"{STAND_IN}\nif said.startswith({dies_after!r}): import os; os.kill(os.getpid(), 9)\n")
    dag = built("fleet_bootstrap")
    if dies_after == "state discard":
        stand.fail(quality_gate=GATE)
    dag.get_task("watch").patience = timedelta(0)
    trial(dag)
    COMMAND.write_text(STAND_IN)
    task = dag.get_task("go_back")
    task.by = stand.wanted()["by"]
    steps = [(" ".join(words[:2]), told) for words, told in task._steps({"generation": 2})]
    left = "generation 2 is no longer held; nothing is left to undo"
    assert steps == [("", left), ("stream start", "started the stream again")]


def test_a_change_that_goes_well_undoes_nothing(stand: Stand, trial: Trial) -> None:
    dag = built("fleet_migrate")
    dag.get_task("watch").batch = -1
    batches = stand.home / "checkpoints" / "lifecycle" / "gen-0002"
    for folder in ("commits", "offsets"):
        (batches / folder).mkdir(parents=True, exist_ok=True)
    (batches / "commits" / "4").write_text('v1\n{"nextBatchWatermarkMs": 1000}')
    (batches / "offsets" / "4").write_text('v1\n{"batchWatermarkMs": 0}\n{}')
    ended = trial(dag)
    assert set(ended.values()) == {"success"}
    assert verbs(stand)[-2:] == ["state switch 2", "stream start"]
