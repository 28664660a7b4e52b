"""What the current checkpoint holds, and what the next start would do: all of it is read, and nothing is changed.

Rule: what holds and what comes next are told of the newest batch, whichever batch is looked at.
"""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, committed, position_after, unfinished, watermark_after
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.desired_state import get_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.snapshots import snapshots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def inspect(spark: "SparkSession", home: Home, batch: int | None) -> dict[str, Any]:
    """Return what the current checkpoint holds after a batch, as JSON has it: key groups, and what `of_files` says.

    Raises:
        FleetError: the checkpoint has no such batch, or is not one of ours.
    """
    from fleetpulse.io.lifecycle.state_reader import overview  # and with it pyspark, which who asks for files alone does without

    at = position_after(home.checkpoint, batch)
    groups = overview(spark, home.checkpoint, at.batch)
    return {**of_files(home, at, wall_clock_ms()), "groups": [asdict(group) for group in groups]}


def of_files(home: Home, at: CheckpointPosition, now_ms: int) -> dict[str, Any]:
    """Return what is known of the current checkpoint without opening its state, as JSON has it.

    Args:
        home: the home.
        at: the batch that is looked at, see `checkpoint.position_after`.
        now_ms: from which ages are counted, epoch milliseconds.

    Raises:
        FleetError: the checkpoint is not one of ours.
    """
    checkpoint = home.checkpoint
    kept = committed(checkpoint)
    newest = [{**asdict(one), "age_ms": now_ms - (one.at_ms or now_ms)} for one in snapshots(home)[:1]]
    return {
        "generation": asdict(home.generation()),
        "stand": asdict(at),
        "watermark_ms": watermark_after(checkpoint, at.batch),
        "batches": {"oldest": kept[0], "newest": kept[-1]},
        "unfinished": unfinished(checkpoint),
        "files": _files(checkpoint / "state"),
        "snapshots": newest,
        "next": _next(home),
    }


def _next(home: Home) -> dict[str, Any]:
    """Return what the next start reads, and what stands in its way."""
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
    """Return how many files RocksDB has, their bytes, and how many there are of each kind; a job that runs may remove some."""
    sizes: dict[Path, int] = {}
    for path in state.rglob("*"):
        try:
            if path.is_file() and not path.name.startswith("."):
                sizes[path] = path.stat().st_size
        except FileNotFoundError:
            continue
    kinds = Counter(path.suffix.removeprefix(".") or path.name.split("-")[0] for path in sizes)
    return {"count": len(sizes), "bytes": sum(sizes.values()), "kinds": dict(kinds.most_common())}
