"""State verbs killed with SIGKILL at every step: a repeated call finishes, and no verdict changes.

tests/support/homes/state_steps.py lists the verbs and the steps at which each is killed;
tests/unit/batch/state/test_fault_points.py compares that list with the code.
Only `./fleet test --long` runs this file: a real kill costs a start of Spark, and there are about eighty kills.
tests/e2e/state/test_killed.py is the short form.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.io.checkpoints.checkpoint import committed_batches, judged_up_to, unfinished
from fleetpulse.io.checkpoints.generations import discard_generation, load_generations
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import runs
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import files_of, snapshots
from fleetpulse.reports import messages
from fleetpulse.reports.operations.agreement import defined, differences, emitted
from streaming.simulator.scenario import Scenario
from tests.support.fleet_command import await_none_left, begin, fleet
from tests.support.form import IS_LONG
from tests.support.histories.histories import START
from tests.support.histories.recordings import record
from tests.support.homes.state_steps import BESIDE_THE_JOB, ON_ANOTHER, ON_ONE_HOME, PROGRESS, WAITING, Call, is_line_of
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


def _lose_last_commit(home: Home) -> None:
    """Delete Spark's commit of the newest batch, as if a kill preceded it; Delta's commit, with its judgements, stays."""
    if home.generation().number == 1 and unfinished(home.checkpoint) is None:
        (home.checkpoint / "commits" / str(committed_batches(home.checkpoint)[-1])).unlink()


def _discard(home: Home) -> None:
    """Discard the held generation."""
    if (held := load_generations(home.lifecycle).held()) is not None:
        discard_generation(home.lifecycle, held)


def _damage(home: Home, *folders: str) -> None:
    for folder in folders:
        for path in (home.checkpoint / folder).rglob("*"):
            if path.is_file():
                path.write_bytes(b"\0" * 40)


def _damage_snapshot(home: Home) -> None:
    newest = snapshots(home)[0].version
    for path in files_of(home.table(DEVICE_SNAPSHOTS.name), newest or 0):
        path.write_bytes(path.read_bytes()[:-40])


BEFORE: dict[str, Callable[[Home], None]] = {
    "": lambda home: None,
    "unfinished": _lose_last_commit,
    "discarded": _discard,
    "state damaged": lambda home: _damage(home, "state"),
    "logs damaged": lambda home: _damage(home, "offsets", "commits", "state"),
    "snapshot damaged": _damage_snapshot,
}


def _kill_at(step: str, *command: str) -> None:
    """Kill a command when it prints a step."""
    running = begin(*command, own_jvm=True)
    assert running.stdout is not None
    lines: list[str] = []
    for line in running.stdout:
        lines.append(line)
        if is_line_of(step, line):
            os.kill(running.pid, signal.SIGKILL)
            break
    else:
        pytest.fail(f"{command} never printed {step!r}: {lines}")
    assert running.wait(PATIENCE_S) == -signal.SIGKILL, f"{command} had ended: {lines}"
    running.stdout.close()


def _repeat(home: Home, command: tuple[str, ...], call: Call) -> None:
    """Run a verb again, after the last step at which it was killed."""
    again = fleet(*command)
    assert again.returncode == (1 if call.again else 0), again.stderr
    assert call.again in again.stderr
    lines = again.stderr.splitlines()
    steps = [line for line in lines if not any(line.startswith(f"{step}: ") for step in lines)]  # the other lines report progress
    known = {*_STEPS[call.words[0]], *PROGRESS}
    unknown = [line for line in steps if not any(is_line_of(step, line) for step in known)]
    assert call.again or not unknown, "it prints a step at which it was not killed"
    record = load_generations(home.lifecycle)
    statuses = [one.status for one in record.known.values()]
    assert "new" not in statuses and statuses.count("current") == min(1, len(statuses))
    known = {home.generation().number, *(one.number for one in record.known.values() if one.status in ("retired", "held"))}
    assert {path.name for path in home.lifecycle.glob("gen-*")} == {f"gen-{number:04d}" for number in known}
    assert not list(home.lifecycle.glob("scratch-*"))


def _kill_at_each_step(home: Home, call: Call, listed: Path) -> None:
    command = ("state", *(argument.replace("{list}", str(listed)) for argument in call.words), "--home", str(home.path))
    for step in call.steps:
        BEFORE[call.before](home)
        before = home.generation().number
        _kill_at(step, *command)
        switched = " is current; " in step or step.startswith("emitting the missing")
        assert (home.generation().number > before) == switched, f"{command}, killed at {step!r}"
    _repeat(home, command, call)


def _replay(home: Path, recording: Path) -> None:
    done = fleet("replay", str(recording), "--home", str(home), "--lateness", "1m", "--timeout", "20m")
    assert done.returncode == 0, done.stderr
    await_none_left(home)


def _part(tmp_path: Path, number: int) -> Path:
    return record(tmp_path / f"part-{number}.ndjson.gz", Scenario(2 + number, 12, START + (number - 1) * DAY_MS, SPAN_MS))


def test_each_verb_killed_at_any_step_finishes_and_keeps_the_verdicts(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    _replay(home.path, _part(tmp_path, 1))
    with exclusive_state_change(home, "a test", lambda words: None):
        _kill_at(WAITING, "state", "snapshot", "--home", str(home.path))
    before = emitted(home)
    for call in ON_ONE_HOME:
        _kill_at_each_step(home, call, tmp_path / "no list")
        assert emitted(home) == before, f"{call.words} emitted judgements, although all rows had been judged"
        if call.words[0] == "snapshot":
            assert len(snapshots(home)) == 1, "the snapshot is not written twice"
            _replay(home.path, _part(tmp_path, 2))  # so that rows are judged after the snapshot
            before = emitted(home)
    _replay(home.path, _part(tmp_path, 3))
    after = emitted(home)
    assert before and after - before and not before - after
    assert differences(after, defined(messages.rows(home), home.deployment())) == []


def test_a_verb_for_some_devices_killed_at_any_step_emits_nothing_twice(tmp_path: Path) -> None:
    home, listed = Home(tmp_path / "home"), tmp_path / "list.csv"
    _replay(home.path, _part(tmp_path, 1))
    listed.write_text("device_id,site,registered_at\npump-1,oslo,2020-01-01T00:00:00Z\n")
    for call in ON_ANOTHER:
        _kill_at_each_step(home, call, listed)
    _replay(home.path, _part(tmp_path, 2))
    ids = tables.query(home, "SELECT device_id, life, transition_no FROM judged_transitions")
    assert ids and len({tuple(one.values()) for one in ids}) == len(ids)


def test_a_canary_killed_at_any_step_leaves_the_job_running_and_can_be_repeated(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    _replay(home.path, _part(tmp_path, 1))
    running = begin("up", "--home", str(home.path), "--no-sim", "--no-airflow", "--no-page", "--port", "0")
    command = ("state", *BESIDE_THE_JOB.words, "--home", str(home.path))
    try:
        for step in BESIDE_THE_JOB.steps:
            await_that(lambda: home.state_holder() and runs(home, "lifecycle"), what="the job", by=running)
            await_that(lambda: judged_up_to(home.checkpoint), what="a batch", by=running)
            before = home.generation().number
            _kill_at(step, *command)
            assert (home.generation().number > before) == (" is current; " in step), f"killed at {step!r}"
        await_that(lambda: home.state_holder() and runs(home, "lifecycle"), what="the job", by=running)
        _repeat(home, command, BESIDE_THE_JOB)
    finally:
        running.terminate()
        running.communicate(timeout=PATIENCE_S)
    await_none_left(home.path)
    assert differences(emitted(home), defined(messages.rows(home), home.deployment())) == []
