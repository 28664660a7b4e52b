"""A snapshot of the lifecycle job's state: of a stopped job, or beside a running one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from fleetpulse.io.checkpoint import Stand, stand
from fleetpulse.io.generations import Generation, checkpoint_of
from fleetpulse.io.home import Home
from fleetpulse.io.snapshot_table import Taken, snapshots, write_snapshot
from fleetpulse.io.stored_state import frontier_of, overview, state_as_rows
from fleetpulse.ops.beginnings import done_with

Say = Callable[[str], None]


def about(spark: SparkSession, home: Home, generation: Generation, at: Stand) -> Taken:
    """Return what a snapshot of a generation at a batch would be taken at."""
    groups = overview(spark, checkpoint_of(home.lifecycle, generation.number), at.batch)
    frontier_ms = frontier_of(groups, at.newest_ms, home.deployment())
    devices = sum(group.devices for group in groups)
    amended_ms, unmet = done_with(home, at.newest_ms)
    return Taken(
        generation.number,
        at.batch,
        at.version,
        at.newest_ms,
        frontier_ms,
        devices,
        generation.key_groups,
        amended_ms,
        unmet=unmet,
    )


Gate = Callable[[DataFrame, Taken], AbstractContextManager[DataFrame]]


def take(spark: SparkSession, home: Home, batch: int | None, say: Say, gate: Gate | None = None) -> Taken:
    """Write a snapshot of the current generation.

    Args:
        spark: the session.
        home: the home.
        batch: after which batch; None takes the newest.
        say: told each step.
        gate: looks at the rows before they are written, and gives them back; None writes them as they are.

    Raises:
        FleetError: the batch is not kept, the checkpoint cannot be read, or the gate stays shut.
    """
    generation = home.generation()
    at = stand(home.checkpoint, batch)
    say(f"reading generation {generation.number} after batch {at.batch}")
    what = about(spark, home, generation, at)
    rows = state_as_rows(spark, home.checkpoint, at, home.deployment()).each
    if gate is not None:
        say("looking at them before they are published")
    with gate(rows, what) if gate is not None else nullcontext(rows) as checked:
        say(f"writing {what.devices:,} devices")
        write_snapshot(home, checked, what)
    written = next(one for one in snapshots(home) if replace(one, version=None, at_ms=None) == what)
    say(f"snapshot version {written.version} is written")
    return written
