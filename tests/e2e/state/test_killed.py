"""A verb that changes the state of a stopped home, killed with SIGKILL as it says a step, and given again: no verdict is changed.

A real kill costs a start of Spark, so this is a snapshot, a migration and a bootstrap, at the steps that change what is on the
disk: behind the snapshot's commit, while a generation is built, and behind the switch, which is said when it is done. The default
suite kills one migration while it builds. In the long form tests/e2e/state/test_killed_everywhere.py kills at every step of every
verb; tests/spark/batch/state/test_crashes.py goes on from the disk as it is at each of them; tests/e2e/state/test_state.py
kills rescale while it builds, and goes on at once.
"""

from pathlib import Path

import pytest

from fleetpulse.core.scenario import Scenario
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.home.home import KEY_GROUPS, Home
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.reports import messages
from fleetpulse.reports.agreement import defined, differences, emitted
from tests.support.fleet_command import await_none_left, fleet, kill_at
from tests.support.form import IS_DEFAULT
from tests.support.histories.histories import START
from tests.support.histories.recordings import record

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]  # each step has its own, shorter limit
DAY_MS = 86_400_000
SPAN_MS = 120 * 60_000
SWITCHED = "is current; generation"
KILLED: tuple[
    tuple[tuple[str, ...], tuple[str, ...], bool], ...
] = (  # a verb, the steps at which it is killed, once each, and whether it then has something to do when it is given again
    (("snapshot",), ("is written",), False),
    (("migrate", "--form", "4"), ("building generation", SWITCHED), False),
    (("bootstrap",), ("building generation",), True),
)
KILLED_ONCE = ((("migrate", "--form", "4"), ("building generation",), True),)


def _played(home: Path, recording: Path) -> None:
    done = fleet("replay", str(recording), "--home", str(home), "--lateness", "1m", "--timeout", "20m")
    assert done.returncode == 0, done.stderr
    await_none_left(home)


def _killed_and_given_again(home: Home, words: tuple[str, ...], steps: tuple[str, ...], *, anew: bool) -> None:
    command = ("state", *words, "--home", str(home.path))
    first = home.generation().number
    for step in steps:
        kill_at(step, *command)
        assert (home.generation().number > first) == (step == SWITCHED), f"{words}, killed at {step!r}"
    number = home.generation().number
    again = fleet(*command)
    assert again.returncode == (0 if anew or words == ("snapshot",) else 1), again.stderr
    assert anew or "nothing to do" in again.stderr
    assert (home.generation().number > number) == anew
    statuses = [one.status for one in load_generations(home.lifecycle).known.values()]
    assert "new" not in statuses and statuses.count("current") == min(1, len(statuses))


def test_whatever_was_killed_where_the_same_verb_finishes_and_the_verdicts_are_those_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path / "home")
    _played(home.path, record(tmp_path / "first.ndjson.gz", Scenario(3, 12, START, SPAN_MS)))
    partitions = position_after(home.checkpoint).partitions
    killed = KILLED_ONCE if IS_DEFAULT else KILLED
    for words, steps, anew in killed:
        _killed_and_given_again(home, words, steps, anew=anew)
    assert (home.key_groups(), position_after(home.checkpoint).partitions, home.generation().form) == (KEY_GROUPS, partitions, 4)
    taken = sum(words == ("snapshot",) for words, _, _ in killed)
    assert len(snapshots(home)) == taken, "the one that was killed behind its commit is not there twice"
    before = emitted(home)
    _played(home.path, record(tmp_path / "second.ndjson.gz", Scenario(4, 12, START + DAY_MS, SPAN_MS)))
    said = emitted(home)
    assert before and said - before and not before - said
    assert differences(said, defined(messages.rows(home), home.deployment())) == []
