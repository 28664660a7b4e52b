"""Read-only report on the current checkpoint, and on the next start of the job.

Rule: ``batches``, ``unfinished`` and ``next`` describe the newest batch, whichever batch is
inspected.
"""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import (
    CheckpointPosition,
    committed_batches,
    position_after,
    unfinished,
    watermark_after,
)
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.desired_state import get_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.snapshots import snapshots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def inspect(spark: "SparkSession", home: Home, batch: int | None) -> dict[str, Any]:
    """Return the contents of the current checkpoint after a batch, ready for JSON.

    Args:
        spark: Spark session.
        home: the home.
        batch: batch to inspect; None takes the newest.

    Returns:
        The entries of `checkpoint_facts`, and ``groups``: an overview of each key group.

    Raises:
        FleetError: the checkpoint has no such batch, or is not of the lifecycle job.
    """
    from fleetpulse.io.lifecycle.state_reader import overview  # imports pyspark, which `checkpoint_facts` does not need

    at = position_after(home.checkpoint, batch)
    groups = overview(spark, home.checkpoint, at.batch)
    return {**checkpoint_facts(home, at, wall_clock_ms()), "groups": [asdict(group) for group in groups]}


def checkpoint_facts(home: Home, at: CheckpointPosition, now_ms: int) -> dict[str, Any]:
    """Return facts about the current checkpoint that its files show, ready for JSON.

    Args:
        home: the home.
        at: position after the inspected batch, see `checkpoint.position_after`.
        now_ms: present instant, from which ages are counted, epoch milliseconds.

    Raises:
        FleetError: the checkpoint is not of the lifecycle job.
    """
    checkpoint = home.checkpoint
    batches = committed_batches(checkpoint)
    newest = [{**asdict(one), "age_ms": now_ms - (one.at_ms or now_ms)} for one in snapshots(home)[:1]]
    return {
        "generation": asdict(home.generation()),
        "position": asdict(at),
        "watermark_ms": watermark_after(checkpoint, at.batch),
        "batches": {"oldest": batches[0], "newest": batches[-1]},
        "unfinished": unfinished(checkpoint),
        "files": _files(checkpoint / "state"),
        "snapshots": newest,
        "next": _next(home),
    }


def _next(home: Home) -> dict[str, Any]:
    """Return the versions that the next start reads, and any obstacle to a start."""
    version = position_after(home.checkpoint).version
    latest = DeltaLog(home.table(MESSAGES.name)).latest()
    held = load_generations(home.lifecycle).held()
    return {
        "version": version,
        "versions": max(0, latest + 1 - version),
        "held": None if held is None else {"generation": held.number, "made_by": held.made_by},
        "desired": asdict(get_desired(home)),
    }


def _files(state: Path) -> dict[str, Any]:
    """Count the RocksDB files, their bytes and kinds; a running job may remove some."""
    sizes: dict[Path, int] = {}
    for path in state.rglob("*"):
        try:
            if path.is_file() and not path.name.startswith("."):
                sizes[path] = path.stat().st_size
        except FileNotFoundError:
            continue
    kinds = Counter(path.suffix.removeprefix(".") or path.name.split("-")[0] for path in sizes)
    return {"count": len(sizes), "bytes": sum(sizes.values()), "kinds": dict(kinds.most_common())}
