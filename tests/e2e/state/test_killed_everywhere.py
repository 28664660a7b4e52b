"""Every verb that changes the state, killed with SIGKILL as it says each of its steps, and given again: no verdict is changed.

tests/support/homes/state_steps.py lists the verbs and the steps at which each is killed;
tests/unit/batch/state/test_fault_points.py compares that list with the code.
Only `./fleet test --long` runs this file: a real kill costs a start of Spark, and there are some eighty.
tests/e2e/state/test_killed.py is the short form.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpulse.core.scenario import Scenario
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.io.checkpoints.checkpoint import committed_batches, judged_up_to, unfinished
from fleetpulse.io.checkpoints.generations import discard_generation, load_generations
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import runs
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import files_of, snapshots
from fleetpulse.reports import messages
from fleetpulse.reports.agreement import defined, differences, emitted
from tests.support.fleet_command import await_none_left, begin, fleet
from tests.support.form import IS_LONG
from tests.support.histories.histories import START
from tests.support.histories.recordings import record
from tests.support.homes.state_steps import BESIDE_THE_JOB, ON_ANOTHER, ON_ONE_HOME, PROGRESS, WAITING, Call, is_said
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(3600),  # each step has its own, shorter limit
    pytest.mark.skipif(
        not IS_LONG, reason="twenty minutes: ./fleet test --long; tests/e2e/state/test_killed.py is the short form"
    ),
]
DAY_MS = 86_400_000
SPAN_MS = 120 * 60_000
_STEPS = {  # by verb
    call.words[0]: {step for one in (*ON_ONE_HOME, *ON_ANOTHER) if one.words[0] == call.words[0] for step in one.steps}
    for call in (*ON_ONE_HOME, *ON_ANOTHER)
}


def _unfinished(home: Home) -> None:
    """Lose the commit of the newest batch, as a kill behind Delta's commit and before Spark's does: what was said stays said."""
    if home.generation().number == 1 and unfinished(home.checkpoint) is None:
        (home.checkpoint / "commits" / str(committed_batches(home.checkpoint)[-1])).unlink()


def _discarded(home: Home) -> None:
    """Remove what is held."""
    if (held := load_generations(home.lifecycle).held()) is not None:
        discard_generation(home.lifecycle, held)


def _damage(home: Home, *folders: str) -> None:
    for folder in folders:
        for path in (home.checkpoint / folder).rglob("*"):
            if path.is_file():
                path.write_bytes(b"\0" * 40)


def _snapshot_damaged(home: Home) -> None:
    newest = snapshots(home)[0].version
    for path in files_of(home.table(DEVICE_SNAPSHOTS.name), newest or 0):
        path.write_bytes(path.read_bytes()[:-40])


BEFORE: dict[str, Callable[[Home], None]] = {
    "": lambda home: None,
    "unfinished": _unfinished,
    "discarded": _discarded,
    "state damaged": lambda home: _damage(home, "state"),
    "logs damaged": lambda home: _damage(home, "offsets", "commits", "state"),
    "snapshot damaged": _snapshot_damaged,
}


def _kill_at(step: str, *command: str) -> None:
    """Kill a command, and see that it had come to the step."""
    running = begin(*command)
    assert running.stdout is not None
    heard: list[str] = []
    for line in running.stdout:
        heard.append(line)
        if is_said(step, line):
            os.kill(running.pid, signal.SIGKILL)
            break
    else:
        pytest.fail(f"{command} never said {step!r}: {heard}")
    assert running.wait(PATIENCE_S) == -signal.SIGKILL, f"{command} had ended: {heard}"
    running.stdout.close()


def _given_again(home: Home, command: tuple[str, ...], call: Call) -> None:
    """Give a verb once more, behind the last step at which it was killed."""
    again = fleet(*command)
    assert again.returncode == (1 if call.again else 0), again.stderr
    assert call.again in again.stderr
    lines = again.stderr.splitlines()
    steps = [line for line in lines if not any(line.startswith(f"{step}: ") for step in lines)]  # others say how far one is
    known = {*_STEPS[call.words[0]], *PROGRESS}
    strange = [line for line in steps if not any(is_said(step, line) for step in known)]
    assert call.again or not strange, "it says a step at which it was not killed"
    record = load_generations(home.lifecycle)
    statuses = [one.status for one in record.known.values()]
    assert "new" not in statuses and statuses.count("current") == min(1, len(statuses))
    known = {home.generation().number, *(one.number for one in record.known.values() if one.status in ("retired", "held"))}
    assert {path.name for path in home.lifecycle.glob("gen-*")} == {f"gen-{number:04d}" for number in known}
    assert not list(home.lifecycle.glob("told-*"))


def _killed_at_each_step(home: Home, call: Call, listed: Path) -> None:
    command = ("state", *(word.replace("{list}", str(listed)) for word in call.words), "--home", str(home.path))
    for step in call.steps:
        BEFORE[call.before](home)
        before = home.generation().number
        _kill_at(step, *command)
        switched = " is current; " in step or step.startswith("emitting the missing")
        assert (home.generation().number > before) == switched, f"{command}, killed at {step!r}"
    _given_again(home, command, call)


def _played(home: Path, recording: Path) -> None:
    done = fleet("replay", str(recording), "--home", str(home), "--lateness", "1m", "--timeout", "20m")
    assert done.returncode == 0, done.stderr
    await_none_left(home)


def _part(tmp_path: Path, number: int) -> Path:
    return record(tmp_path / f"part-{number}.ndjson.gz", Scenario(2 + number, 12, START + (number - 1) * DAY_MS, SPAN_MS))


def test_killed_at_any_step_each_verb_finishes_and_the_verdicts_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    _played(home.path, _part(tmp_path, 1))
    with exclusive_state_change(home, "a test", lambda words: None):
        _kill_at(WAITING, "state", "snapshot", "--home", str(home.path))
    before = emitted(home)
    for call in ON_ONE_HOME:
        _killed_at_each_step(home, call, tmp_path / "no list")
        assert emitted(home) == before, f"{call.words} said something, though all had been judged"
        if call.words[0] == "snapshot":
            assert len(snapshots(home)) == 1, "none is there twice"
            _played(home.path, _part(tmp_path, 2))  # so that something is judged again since
            before = emitted(home)
    _played(home.path, _part(tmp_path, 3))
    said = emitted(home)
    assert before and said - before and not before - said
    assert differences(said, defined(messages.rows(home), home.deployment())) == []


def test_killed_at_any_step_a_verb_that_chooses_devices_finishes_and_says_nothing_twice(tmp_path: Path) -> None:
    home, listed = Home(tmp_path / "home"), tmp_path / "list.csv"
    _played(home.path, _part(tmp_path, 1))
    listed.write_text("device_id,site,registered_at\npump-1,oslo,2020-01-01T00:00:00Z\n")
    for call in ON_ANOTHER:
        _killed_at_each_step(home, call, listed)
    _played(home.path, _part(tmp_path, 2))
    ids = tables.query(home, "SELECT device_id, life, transition_no FROM judged_transitions")
    assert ids and len({tuple(one.values()) for one in ids}) == len(ids)


def test_killed_at_any_step_a_canary_lets_the_job_run_and_given_again_it_finishes(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    _played(home.path, _part(tmp_path, 1))
    running = begin("up", "--home", str(home.path), "--no-sim", "--no-airflow", "--port", "0")
    command = ("state", *BESIDE_THE_JOB.words, "--home", str(home.path))
    try:
        for step in BESIDE_THE_JOB.steps:
            await_that(lambda: home.state_holder() and runs(home, "lifecycle"), what="the job", by=running)
            await_that(lambda: judged_up_to(home.checkpoint), what="a batch", by=running)
            before = home.generation().number
            _kill_at(step, *command)
            assert (home.generation().number > before) == (" is current; " in step), f"killed at {step!r}"
        await_that(lambda: home.state_holder() and runs(home, "lifecycle"), what="the job", by=running)
        _given_again(home, command, BESIDE_THE_JOB)
    finally:
        running.terminate()
        running.communicate(timeout=PATIENCE_S)
    await_none_left(home.path)
    assert differences(emitted(home), defined(messages.rows(home), home.deployment())) == []
