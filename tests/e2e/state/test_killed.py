"""State verbs killed with SIGKILL on a stopped home: a repeated call finishes, and no verdict changes.

A real kill costs a start of Spark. So this file kills a snapshot, a migration and a bootstrap, only
at steps that change the disk: after the commit of the snapshot, while a generation is built, and
after the switch. The default suite kills one migration while it builds a generation.

Related tests:

- tests/e2e/state/test_killed_everywhere.py, the long form, kills every verb at every step.
- tests/spark/batch/state/test_crashes.py continues from the disk as it is at each step.
- tests/e2e/state/test_state.py kills rescale while it builds a generation, and repeats it at once.
"""

from pathlib import Path

import pytest

from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.home.home import KEY_GROUPS, Home
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.reports import messages
from fleetpulse.reports.operations.agreement import defined, differences, emitted
from streaming.simulator.scenario import Scenario
from tests.support.fleet_command import await_none_left, fleet, kill_at
from tests.support.form import IS_DEFAULT
from tests.support.histories.histories import START
from tests.support.histories.recordings import record

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]  # each step has its own, shorter limit
DAY_MS = 86_400_000
SPAN_MS = 120 * 60_000
SWITCHED = "is current; generation"
KILLED: tuple[
    tuple[tuple[str, ...], tuple[str, ...], bool], ...
] = (  # a verb, the steps at which it is killed, once each, and whether the next call then makes a generation
    (("snapshot",), ("is written",), False),
    (("migrate", "--form", "4"), ("building generation", SWITCHED), False),
    (("bootstrap",), ("building generation",), True),
)
KILLED_ONCE = ((("migrate", "--form", "4"), ("building generation",), True),)


def _replay(home: Path, recording: Path) -> None:
    done = fleet("replay", str(recording), "--home", str(home), "--lateness", "1m", "--timeout", "20m")
    assert done.returncode == 0, done.stderr
    await_none_left(home)


def _kill_and_repeat(home: Home, arguments: tuple[str, ...], steps: tuple[str, ...], *, makes_another: bool) -> None:
    command = ("state", *arguments, "--home", str(home.path))
    first = home.generation().number
    for step in steps:
        kill_at(step, *command)
        assert (home.generation().number > first) == (step == SWITCHED), f"{arguments}, killed at {step!r}"
    number = home.generation().number
    again = fleet(*command)
    assert again.returncode == (0 if makes_another or arguments == ("snapshot",) else 1), again.stderr
    assert makes_another or "nothing to do" in again.stderr
    assert (home.generation().number > number) == makes_another
    statuses = [one.status for one in load_generations(home.lifecycle).known.values()]
    assert "new" not in statuses and statuses.count("current") == min(1, len(statuses))


def test_a_killed_state_verb_finishes_when_it_is_repeated_and_keeps_the_verdicts(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path / "home")
    _replay(home.path, record(tmp_path / "first.ndjson.gz", Scenario(3, 12, START, SPAN_MS)))
    partitions = position_after(home.checkpoint).partitions
    killed = KILLED_ONCE if IS_DEFAULT else KILLED
    for arguments, steps, makes_another in killed:
        _kill_and_repeat(home, arguments, steps, makes_another=makes_another)
    assert (home.key_groups(), position_after(home.checkpoint).partitions, home.generation().form) == (KEY_GROUPS, partitions, 4)
    taken = sum(arguments == ("snapshot",) for arguments, _, _ in killed)
    assert len(snapshots(home)) == taken, "the snapshot that was killed after its commit is not written twice"
    before = emitted(home)
    _replay(home.path, record(tmp_path / "second.ndjson.gz", Scenario(4, 12, START + DAY_MS, SPAN_MS)))
    after = emitted(home)
    assert before and after - before and not before - after
    assert differences(after, defined(messages.rows(home), home.deployment())) == []
