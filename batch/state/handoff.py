"""A generation that was made and checked, and waits for the word: so that others may look at it before it gets the work.

Rule: it gets the work only while the one that runs stands where it stood when this one was made; otherwise verdicts would be
said twice, or never.
"""

from dataclasses import asdict, replace

from batch.common.progress import Say
from batch.state.generation import activate
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, is_settled, position_after
from fleetpulse.io.checkpoints.generations import (
    CURRENT,
    HELD,
    Generation,
    discard_generation,
    load_generations,
    made_durable,
    save_generations,
)
from fleetpulse.io.home.home import Home


def hold(home: Home, made: Generation, at: CheckpointPosition, say: Say) -> None:
    """Write down that a generation is made, and where the current one stands."""
    made_durable(home.lifecycle, made.number)
    record = load_generations(home.lifecycle)
    held = replace(made, status=HELD, stands={**asdict(at), "beside": record.current})
    save_generations(home.lifecycle, record.with_one(held))
    say(
        f"generation {made.number} is made, and held; give it the work: ./fleet state switch {made.number}, or remove it: "
        f"./fleet state discard {made.number}"
    )


def switch(home: Home, number: int, say: Say, *, dry: bool = False) -> None:
    """Give the work to a generation that is held; no effect where it has it.

    Args:
        home: the home, its state held by the caller.
        number: of the generation.
        say: told each step.
        dry: only say what would be done.

    Raises:
        FleetError: it is not held, or the current one has gone on meanwhile.
    """
    record = load_generations(home.lifecycle)
    if number == record.current:
        say(f"generation {number} has the work already")
        return
    made = _held(home, number)
    at = {name: value for name, value in made.stands.items() if name != "beside"}
    now = position_after(home.checkpoint)
    if made.stands["beside"] != record.current or asdict(now) != at or not is_settled(home.checkpoint):
        raise FleetError(
            f"generation {number} was made beside generation {made.stands['beside']} after batch {at['batch']}; generation "
            f"{record.current} has come to batch {now.batch} since; remove it: ./fleet state discard {number}, and make it again",
            code="generation-outdated",
        )
    say(f"generation {record.current} stopped after batch {now.batch}; generation {number} goes on from there")
    if not dry:
        activate(home, made, now, say)


def discard(home: Home, number: int, say: Say, *, dry: bool = False) -> None:
    """Remove a generation that is held, and is not to be; the one that runs is untouched.

    Args:
        home: the home.
        number: of the generation.
        say: told what is done.
        dry: only say what would be done.

    Raises:
        FleetError: it is not held.
    """
    held = _held(home, number)
    if dry:
        say(f"generation {number}, made by {held.made_by}, is to be removed; the one that runs is untouched")
        return
    discard_generation(home.lifecycle, held)
    say(f"generation {number} is removed; generation {load_generations(home.lifecycle).current} is current as before")


def _held(home: Home, number: int) -> Generation:
    record = load_generations(home.lifecycle)
    found = record.of(number)
    if found is None or found.status != HELD:
        held = record.held()
        known = "there is none such" if found is None else f"it is {found.status}"
        if found is not None and found.status == CURRENT:
            known = "it has the work"
        raise FleetError(
            f"generation {number} is not held: {known}; " + (f"held is generation {held.number}" if held else "none is held"),
            code="generation-not-held",
        )
    return found
