"""Generations that no longer run, and are no longer needed."""

import shutil
from collections.abc import Callable
from dataclasses import replace

from fleetpulse.io.checkpoints.generations import (
    PRUNED,
    RETIRED,
    Generations,
    checkpoint_of,
    load_generations,
    save_generations,
    sweep,
)
from fleetpulse.io.home.home import Home


def going(record: Generations, keep: int, before_ms: int | None = None) -> list[int]:
    """Return the numbers of the generations that are to be pruned: never one that runs or is held.

    Args:
        record: of the generations.
        keep: how many of those that no longer run stay, the newest ones.
        before_ms: of the others those go that another took over from before this instant (epoch milliseconds); None: all.
    """
    retired = sorted(one.number for one in record.known.values() if one.status == RETIRED)
    old = retired[: max(0, len(retired) - keep)]
    if before_ms is None:
        return old
    return [number for number in old if (at_ms := record.retired_at_ms(number)) is not None and at_ms < before_ms]


def prune(home: Home, keep: int, say: Callable[[str], None], *, dry: bool, before_ms: int | None = None) -> list[int]:
    """Remove the checkpoints of generations that no longer run, see `going`; return their numbers.

    Args:
        home: the home; the caller sees to it that nobody makes a generation meanwhile. The job may run.
        keep: how many of them stay.
        say: told each.
        dry: only say which.
        before_ms: see `going`.

    Raises:
        FleetError: the record cannot be read or written.
    """
    record = load_generations(home.lifecycle)
    if record.known and not dry:
        record = sweep(home.lifecycle, record)
        save_generations(home.lifecycle, record)
    numbers = going(record, keep, before_ms)
    for number in numbers:
        say(f"generation {number} is {'to be ' if dry else ''}removed")
        if not dry:
            record = record.with_one(replace(record.known[number], status=PRUNED))
            save_generations(home.lifecycle, record)  # first: what is written down as removed is never gone back to
            shutil.rmtree(checkpoint_of(home.lifecycle, number), ignore_errors=True)
    return numbers
