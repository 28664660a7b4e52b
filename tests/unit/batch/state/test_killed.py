"""Verbs that only write down and remove, killed before any change to the disk: given again, they finish or say why not."""

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


def _quietly(words: str) -> None:
    """Say nothing."""


VERBS: dict[str, Callable[[Home], object]] = {
    "switch": lambda home: switch(home, 3, _quietly),
    "discard": lambda home: discard(home, 3, _quietly),
    "prune": lambda home: prune(home, 0, _quietly, dry=False),
}
ENDS = {  # the current generation, and how each stands afterwards
    "switch": (3, {1: "retired", 2: "retired", 3: "current"}),
    "discard": (2, {1: "retired", 2: "current", 3: "discarded"}),
    "prune": (2, {1: "pruned", 2: "current", 3: "held"}),
}


@pytest.fixture
def held(tmp_path: Path) -> Home:
    """Return a home whose second generation runs, and whose third is held."""
    home = Home(tmp_path / "home")
    home.prepare(None)
    home.lifecycle.mkdir(parents=True)
    batch(home.checkpoint, 0, 5, (0, 10))
    batch(home.checkpoint, 1, 5, (10, 10))
    for number in (2, 3):
        made = begun(home)
        shutil.copytree(home.checkpoint, checkpoint_of(home.lifecycle, number))
        if number == 2:
            activate(home, made, position_after(home.checkpoint), _quietly)
        else:
            hold(home, made, position_after(home.checkpoint), _quietly)
    return home


def _killed(act: Callable[[], object], at: int) -> bool:
    """Run in a process of its own that dies before its change of the disk with this number; return whether it did."""
    child = os.fork()
    if child == 0:
        left = at

        def look(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            left -= bool(event in _CHANGES or writes)
            if left == 0:
                left = -1  # to kill is an event too
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        try:
            act()
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            os._exit(sys.exc_info()[0] is not None)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("verb", VERBS)
def test_killed_before_any_change_a_verb_is_given_again_and_finishes_or_says_why_not(
    held: Home, tmp_path: Path, verb: str
) -> None:
    stood, at = position_after(held.checkpoint), 1
    while at < _MOST_STEPS:
        home = Home(tmp_path / f"home-{at}")
        shutil.copytree(held.path, home.path)
        died = _killed(lambda home=home: VERBS[verb](home), at)
        assert position_after(home.checkpoint) == stood, "whichever is current stands where the one before it stood"
        gone = verb == "discard" and load_generations(home.lifecycle).held() is None  # it came past what it is about
        with refused("generation-not-held") if gone else nullcontext():
            VERBS[verb](home)
        record = load_generations(home.lifecycle)
        assert (record.current, {number: one.status for number, one in record.known.items()}) == ENDS[verb]
        if not died:
            break
        at += 1
    assert 2 < at < _MOST_STEPS
    prune(home, 5, _quietly, dry=False)
    left = {number for number in (1, 2, 3) if checkpoint_of(home.lifecycle, number).exists()}
    assert left == {number for number, status in ENDS[verb][1].items() if status not in ("discarded", "pruned")}


def test_what_does_not_pass_the_gate_is_removed_and_the_one_that_runs_goes_on(held: Home) -> None:
    def shut(work: StateOperation, made: Generation) -> None:
        raise FleetError(f"nothing may be built on generation {made.number}")

    discard(held, 3, _quietly)
    made = begun(held)
    shutil.copytree(held.checkpoint, checkpoint_of(held.lifecycle, made.number))
    work = StateOperation(lambda: pytest.fail("no session is needed"), held, _quietly, gate=shut)
    with pytest.raises(FleetError, match="nothing may be built on generation 4"):
        activate_or_hold(work, made, position_after(held.checkpoint))
    record = load_generations(held.lifecycle)
    assert (record.current, record.known[4].status) == (2, "discarded")
    assert not checkpoint_of(held.lifecycle, 4).exists()
