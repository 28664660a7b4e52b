"""Held generations: built and checked, but not activated yet.

Rule: a held generation is activated only if the current one is still at the position at which the
held one was made. Otherwise verdicts would be emitted twice, or never.
"""

from dataclasses import asdict, replace

from batch.common.progress import ReportProgress
from batch.state.generation import activate
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, is_settled, position_after
from fleetpulse.io.checkpoints.generations import (
    CURRENT,
    HELD,
    Generation,
    discard_generation,
    load_generations,
    save_generations,
    sync_checkpoint,
)
from fleetpulse.io.home.home import Home


def hold(home: Home, generation: Generation, at: CheckpointPosition, report: ReportProgress) -> None:
    """Record a new generation as held, with the position of the current one."""
    sync_checkpoint(home.lifecycle, generation.number)
    record = load_generations(home.lifecycle)
    held = replace(generation, status=HELD, position={**asdict(at), "beside": record.current})
    save_generations(home.lifecycle, record.with_one(held))
    report(
        f"generation {generation.number} is made, and held; activate it: ./fleet state switch {generation.number}, or remove it: "
        f"./fleet state discard {generation.number}"
    )


def switch(home: Home, number: int, report: ReportProgress, *, dry: bool = False) -> None:
    """Activate a held generation; no effect if it is the current one.

    Args:
        home: the home; the caller holds the lock of its state.
        number: number of the generation.
        report: callback for progress lines.
        dry: whether to report only.

    Raises:
        FleetError: the generation is not held, or the current one has judged more rows meanwhile.
    """
    record = load_generations(home.lifecycle)
    if number == record.current:
        report(f"generation {number} is already current")
        return
    generation = _held(home, number)
    at = {name: value for name, value in generation.position.items() if name != "beside"}
    now = position_after(home.checkpoint)
    if generation.position["beside"] != record.current or asdict(now) != at or not is_settled(home.checkpoint):
        raise FleetError(
            f"generation {number} was made beside generation {generation.position['beside']} after batch {at['batch']}; "
            f"generation {record.current} is at batch {now.batch} now; remove it: ./fleet state discard {number}, "
            f"and make it again",
            code="generation-outdated",
        )
    report(f"generation {record.current} stopped after batch {now.batch}; generation {number} continues from there")
    if not dry:
        activate(home, generation, now, report)


def discard(home: Home, number: int, report: ReportProgress, *, dry: bool = False) -> None:
    """Remove a held generation; the running one is unchanged.

    Args:
        home: the home.
        number: number of the generation.
        report: callback for progress lines.
        dry: whether to report only.

    Raises:
        FleetError: the generation is not held.
    """
    held = _held(home, number)
    if dry:
        report(f"generation {number}, made by {held.made_by}, would be removed; the running one is unchanged")
        return
    discard_generation(home.lifecycle, held)
    report(f"generation {number} is removed; generation {load_generations(home.lifecycle).current} is still current")


def _held(home: Home, number: int) -> Generation:
    record = load_generations(home.lifecycle)
    found = record.of(number)
    if found is None or found.status != HELD:
        held = record.held()
        known = "it does not exist" if found is None else f"it is {found.status}"
        if found is not None and found.status == CURRENT:
            known = "it is already current"
        raise FleetError(
            f"generation {number} is not held: {known}; " + (f"generation {held.number} is held" if held else "none is held"),
            code="generation-not-held",
        )
    return found
