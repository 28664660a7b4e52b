"""Inputs of the quality gate: the state of a generation, or the rows of a new snapshot.

`batch.quality.run.gate` decides whether they pass.

Rule: the rows under test are written to temporary files once, and the snapshot is made from those
files; the state is not read a second time.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from batch.common.progress import ReportProgress, silent
from batch.quality.derived_tables import State
from batch.quality.facts import is_chosen
from batch.quality.run import gate, refuse
from batch.state.generation import state_of
from batch.state.snapshot import snapshot_metadata
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.io.checkpoints.checkpoint import position_after, relocate
from fleetpulse.io.checkpoints.generations import DISCARDED, PRUNED, Generation, checkpoint_of, load_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import folder_of
from fleetpulse.io.tables.snapshots import SnapshotInfo, snapshots


def generation_of(home: Home, number: int) -> Generation:
    """Return a generation that has a checkpoint.

    Raises:
        FleetError: there is no such generation.
    """
    record = load_generations(home.lifecycle)
    found = record.of(number)
    if found is None and number == record.current:
        return home.generation()
    if found is None or found.status in (DISCARDED, PRUNED):
        existing = sorted(one.number for one in record.known.values() if one.status not in (DISCARDED, PRUNED))
        raise FleetError(
            f"there is no generation {number}; name one of {', '.join(map(str, existing or [record.current]))}",
            code="generation-unknown",
        )
    return found


@contextmanager
def generation_state(spark: SparkSession, home: Home, number: int) -> Iterator[State]:
    """Provide the state of a running or held generation, as input of the gate."""
    generation = generation_of(home, number)
    relocate(checkpoint_of(home.lifecycle, number))  # the home may have been moved
    at = position_after(checkpoint_of(home.lifecycle, number))
    info = snapshot_metadata(spark, home, generation, at)
    with written_aside(state_of(spark, home, generation, at).each) as files:
        yield State(f"generation {number}", files, info, chosen=is_chosen(load_generations(home.lifecycle), number))


def gate_generation(spark: SparkSession, home: Home, generation: Generation, keep: int, report: ReportProgress = silent) -> None:
    """Evaluate the gate for a new generation before it is activated.

    Raises:
        FleetError: the gate fails.
    """
    with generation_state(spark, home, generation.number) as state:
        results = gate(home, state, lambda: spark, keep=keep, report=report)
    refuse(
        results,
        f"generation {generation.number} is removed; generation {load_generations(home.lifecycle).current} is still current",
    )


@contextmanager
def written_aside(rows: DataFrame) -> Iterator[tuple[Path, ...]]:
    """Write rows of a state to temporary files; remove them when the context exits.

    On a cluster, executors write the files, and this process reads them.

    Raises:
        FleetError: this process does not find all rows.
    """
    folder, written = Path(mkdtemp(prefix="state-", dir=folder_of(rows.sparkSession))), Observation()
    try:
        chosen = rows.select(*(column.name for column in DEVICE_SNAPSHOTS.columns))
        chosen.observe(written, F.count(F.lit(1)).alias("rows")).write.mode("overwrite").parquet(str(folder / "rows"))
        files = tuple(sorted((folder / "rows").glob("*.parquet")))
        require_all_rows(files, int(written.get["rows"]))
        yield files
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_all_rows(files: Sequence[Path], written: int) -> None:
    """Require that files have as many rows as were written.

    Raises:
        FleetError: they have fewer or more.
    """
    found = sum(pq.read_metadata(file).num_rows for file in files)
    if found != written:
        raise FleetError(
            f"the executors wrote {written:,} rows of the state, and this process finds {found:,}; expected a home on a file "
            f"system that all hosts share; check its mount on each worker, and try again",
            code="written-rows-missing",
        )


@contextmanager
def gate_snapshot_rows(
    spark: SparkSession, home: Home, rows: DataFrame, info: SnapshotInfo, keep: int, report: ReportProgress = silent
) -> Iterator[DataFrame]:
    """Evaluate the gate for the rows of a new snapshot; yield the rows if it passes.

    Raises:
        FleetError: the gate fails; nothing is published.
    """
    known = [one for one in snapshots(home) if one.is_known]
    before_ms = known[0].frontier_ms if known else None
    chosen = is_chosen(load_generations(home.lifecycle), info.generation)
    with written_aside(rows) as files:
        state = State(f"generation {info.generation}, for a snapshot", files, info, before_ms, chosen)
        refuse(gate(home, state, lambda: spark, keep=keep, report=report), "no snapshot is published")
        yield spark.read.parquet(*map(str, files))
