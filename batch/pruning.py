"""Generations that no longer run, and are no longer needed."""

import shutil
from dataclasses import replace

from batch.generation import Say
from fleetpulse.io.generations import PRUNED, RETIRED, checkpoint_of, load_generations, save_generations, sweep
from fleetpulse.io.home import Home


def prune(home: Home, keep: int, say: Say, *, dry: bool) -> list[int]:
    """Remove generations that no longer run, but for the newest ``keep`` of them; return their numbers."""
    record = load_generations(home.lifecycle)
    if record.known and not dry:
        record = sweep(home.lifecycle, record)
        save_generations(home.lifecycle, record)
    retired = sorted(one.number for one in record.known.values() if one.status == RETIRED)
    going = retired[: max(0, len(retired) - keep)]
    for number in going:
        say(f"generation {number} is {'to be ' if dry else ''}removed")
        if not dry:
            record = record.with_one(replace(record.known[number], status=PRUNED))
            save_generations(home.lifecycle, record)  # first: what is written down as removed is never gone back to
            shutil.rmtree(checkpoint_of(home.lifecycle, number), ignore_errors=True)
    return going
