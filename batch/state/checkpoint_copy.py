"""Copy of a checkpoint, and comparison of the state of two checkpoints.

Rule: all state and all timers are compared, by the number of rows and the sum of their hashes.
"""

import shutil
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from batch.common.progress import Paced, ReportProgress
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, relocate
from fleetpulse.io.lifecycle.state_reader import VARIABLES, state_rows, timers

_TIMERS = "timers"


def copy_checkpoint(checkpoint: Path, copy: Path, report: ReportProgress) -> None:
    """Copy a checkpoint.

    Args:
        checkpoint: folder of the checkpoint.
        copy: folder of the copy, which must not exist yet.
        report: callback for progress lines, every few seconds.
    """
    progress, files, size = Paced(report), 0, 0

    def one(source: str, target: str) -> str:
        nonlocal files, size
        written = shutil.copy2(source, target)
        files, size = files + 1, size + Path(written).stat().st_size
        progress(lambda: f"copying: {files:,} files, {size:,} bytes so far")
        return written

    shutil.copytree(checkpoint, copy, copy_function=one)
    relocate(copy)


def require_same(
    spark: SparkSession, before: tuple[Path, CheckpointPosition], after: tuple[Path, CheckpointPosition], report: ReportProgress
) -> None:
    """Check that two checkpoints hold the same state.

    Args:
        spark: Spark session.
        before: folder of the first checkpoint, and position to read.
        after: folder of the second checkpoint, and position to read.
        report: callback for progress lines, every few seconds.

    Raises:
        FleetError: the checkpoints differ; the text names the state variable.
    """
    progress, compared = Paced(report), (*VARIABLES, _TIMERS)
    for place, name in enumerate(compared):
        was, now = (_all_of(spark, folder, at, name) for folder, at in (before, after))
        if was != now:
            raise FleetError(
                f'the state "{name}" differs after repartitioning: {was[0]} rows before, {now[0]} after',
                code="state-differs-after-repartition",
            )
        same = ", ".join(compared[: place + 1])
        progress(lambda same=same: f"comparing: equal so far are {same}, of {', '.join(compared)}")


def _all_of(spark: SparkSession, checkpoint: Path, at: CheckpointPosition, name: str) -> tuple[int, int]:
    rows = timers(spark, checkpoint, at.batch) if name == _TIMERS else state_rows(spark, checkpoint, at.batch, name)
    columns = [F.to_json(F.struct(column)) for column in rows.columns if column != "partition_id"]
    [found] = rows.agg(F.count("*").alias("n"), F.sum(F.xxhash64(*columns).cast("decimal(38,0)")).alias("hashes")).collect()
    return found.n, int(found.hashes or 0)
