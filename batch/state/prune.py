"""Removal of the checkpoints of retired generations."""

import shutil
from collections.abc import Callable
from dataclasses import replace

from fleetpulse.io.checkpoints.generations import (
    PRUNED,
    RETIRED,
    Generations,
    checkpoint_of,
    load_generations,
    remove_leftovers,
    save_generations,
)
from fleetpulse.io.home.home import Home


def prunable(record: Generations, keep: int, before_ms: int | None = None) -> list[int]:
    """Return the numbers of the retired generations to prune.

    Args:
        record: record of generations.
        keep: number of retired generations to keep, the newest ones.
        before_ms: instant, epoch milliseconds; a generation is pruned only if it was retired
            before. None prunes all others.
    """
    retired = sorted(one.number for one in record.known.values() if one.status == RETIRED)
    old = retired[: max(0, len(retired) - keep)]
    if before_ms is None:
        return old
    return [number for number in old if (at_ms := record.retired_at_ms(number)) is not None and at_ms < before_ms]


def prune(home: Home, keep: int, report: Callable[[str], None], *, dry: bool, before_ms: int | None = None) -> list[int]:
    """Remove checkpoints of retired generations, see `prunable`; return their numbers.

    Args:
        home: the home; the caller prevents that a generation is made meanwhile. The job may run.
        keep: number of retired generations to keep.
        report: callback for a line about each generation.
        dry: whether to report only.
        before_ms: see `prunable`.

    Raises:
        FleetError: the record cannot be read or written.
    """
    record = load_generations(home.lifecycle)
    if record.known and not dry:
        record = remove_leftovers(home.lifecycle, record)
        save_generations(home.lifecycle, record)
    numbers = prunable(record, keep, before_ms)
    for number in numbers:
        report(f"generation {number} is {'to be ' if dry else ''}removed")
        if not dry:
            record = record.with_one(replace(record.known[number], status=PRUNED))
            save_generations(home.lifecycle, record)  # before the removal: no rollback starts from a pruned one
            shutil.rmtree(checkpoint_of(home.lifecycle, number), ignore_errors=True)
    return numbers
