"""Crash recovery of state commands without Spark: a repeated command completes or is refused."""

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from batch.state.generation import activate
from batch.state.handoff import discard, hold, switch
from batch.state.operations import StateOperation, activate_or_hold
from batch.state.prune import prune
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of, load_generations
from fleetpulse.io.home.home import Home
from tests.support.homes.checkpoints import begun
from tests.support.homes.checkpoints import write_batch as batch
from tests.support.refusals import refused

_MOST_STEPS = 60
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def _ignore(line: str) -> None:
    """Discard a progress line."""


VERBS: dict[str, Callable[[Home], object]] = {
    "switch": lambda home: switch(home, 3, _ignore),
    "discard": lambda home: discard(home, 3, _ignore),
    "prune": lambda home: prune(home, 0, _ignore, dry=False),
}
ENDS = {  # current generation, and status of each generation, afterwards
    "switch": (3, {1: "retired", 2: "retired", 3: "current"}),
    "discard": (2, {1: "retired", 2: "current", 3: "discarded"}),
    "prune": (2, {1: "pruned", 2: "current", 3: "held"}),
}


@pytest.fixture
def held(tmp_path: Path) -> Home:
    """Return a home whose second generation is current, and whose third is held."""
    home = Home(tmp_path / "home")
    home.prepare(None)
    home.lifecycle.mkdir(parents=True)
    batch(home.checkpoint, 0, 5, (0, 10))
    batch(home.checkpoint, 1, 5, (10, 10))
    for number in (2, 3):
        generation = begun(home)
        shutil.copytree(home.checkpoint, checkpoint_of(home.lifecycle, number))
        if number == 2:
            activate(home, generation, position_after(home.checkpoint), _ignore)
        else:
            hold(home, generation, position_after(home.checkpoint), _ignore)
    return home


def _killed(command: Callable[[], object], change_no: int) -> bool:
    """Run a command in a child process that is killed before change ``change_no``; return whether it was killed."""
    child = os.fork()
    if child == 0:
        remaining = change_no

        def count_changes(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal remaining
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            remaining -= bool(event in _CHANGES or writes)
            if remaining == 0:
                remaining = -1  # os.kill is an audit event, too
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count_changes)
        try:
            command()
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            os._exit(sys.exc_info()[0] is not None)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("verb", VERBS)
def test_command_killed_at_any_change_and_repeated_completes_or_is_refused(held: Home, tmp_path: Path, verb: str) -> None:
    position, change_no = position_after(held.checkpoint), 1
    while change_no < _MOST_STEPS:
        home = Home(tmp_path / f"home-{change_no}")
        shutil.copytree(held.path, home.path)
        was_killed = _killed(lambda home=home: VERBS[verb](home), change_no)
        assert position_after(home.checkpoint) == position, "the current generation has the position of its predecessor"
        was_discarded = verb == "discard" and load_generations(home.lifecycle).held() is None  # before the kill
        with refused("generation-not-held") if was_discarded else nullcontext():
            VERBS[verb](home)
        record = load_generations(home.lifecycle)
        assert (record.current, {number: one.status for number, one in record.known.items()}) == ENDS[verb]
        if not was_killed:
            break
        change_no += 1
    assert 2 < change_no < _MOST_STEPS
    prune(home, 5, _ignore, dry=False)
    remaining = {number for number in (1, 2, 3) if checkpoint_of(home.lifecycle, number).exists()}
    assert remaining == {number for number, status in ENDS[verb][1].items() if status not in ("discarded", "pruned")}


def test_generation_that_fails_the_gate_is_discarded_and_the_current_one_stays(held: Home) -> None:
    def failing_gate(operation: StateOperation, generation: Generation) -> None:
        raise FleetError(f"nothing may be built on generation {generation.number}", code="gate-of-the-test")

    discard(held, 3, _ignore)
    generation = begun(held)
    shutil.copytree(held.checkpoint, checkpoint_of(held.lifecycle, generation.number))
    operation = StateOperation(lambda: pytest.fail("no session is needed"), held, _ignore, gate=failing_gate)
    with refused("gate-of-the-test", match="generation 4"):
        activate_or_hold(operation, generation, position_after(held.checkpoint))
    record = load_generations(held.lifecycle)
    assert (record.current, record.known[4].status) == (2, "discarded")
    assert not checkpoint_of(held.lifecycle, 4).exists()
