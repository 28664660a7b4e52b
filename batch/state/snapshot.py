"""Snapshot of the lifecycle job's state, while the job is stopped or running.

Rule: no snapshot is written if the newest one is equal. Rows are compared, not only metadata: a
damaged snapshot may still have its metadata.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from batch.common.progress import ReportProgress
from batch.state.transfer import with_checksum
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, position_after
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.state_reader import SnapshotRows, frontier_of, overview, read_snapshot, rows_as_given, state_as_rows
from fleetpulse.io.tables.snapshots import SnapshotInfo, shown_snapshot, snapshots, write_snapshot
from fleetpulse.reports.history.replay_origin import applicable_amend_progress


def snapshot_metadata(spark: SparkSession, home: Home, generation: Generation, at: CheckpointPosition) -> SnapshotInfo:
    """Return the metadata of a snapshot of a generation at a position."""
    groups = overview(spark, checkpoint_of(home.lifecycle, generation.number), at.batch)
    frontier_ms = frontier_of(groups, at.newest_ms, home.deployment())
    devices = sum(group.devices for group in groups)
    amended_ms, unmet = applicable_amend_progress(home, at.newest_ms)
    return SnapshotInfo(
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


Gate = Callable[[DataFrame, SnapshotInfo], AbstractContextManager[DataFrame]]


def take(
    spark: SparkSession, home: Home, batch: int | None, report: ReportProgress, gate: Gate | None = None, *, dry: bool = False
) -> SnapshotInfo:
    """Write a snapshot of the current generation, unless the newest one is equal.

    Args:
        spark: Spark session.
        home: the home.
        batch: batch after which the state is read; None takes the newest.
        report: callback for progress lines.
        gate: check of the rows before they are written, a context manager that yields the rows to
            write; None makes no check.
        dry: whether to report only; the gate is not called.

    Returns:
        Metadata of the snapshot, with its version in the table; the version is None if a dry run
        would write it.

    Raises:
        FleetError: the batch is no longer kept, the checkpoint cannot be read, or the gate rejects
            the rows.
    """
    generation = home.generation()
    at = position_after(home.checkpoint, batch)
    report(f"reading generation {generation.number} after batch {at.batch}")
    info = snapshot_metadata(spark, home, generation, at)
    rows = state_as_rows(spark, home.checkpoint, at, home.deployment())
    if dry:
        return _equal_snapshot(spark, home, info, rows, report) or info
    if gate is not None:
        report("checking the rows before they are published")
    with gate(rows.each, info) if gate is not None else nullcontext(rows.each) as checked:
        checked_rows = rows if gate is None else rows_as_given(checked)
        if (held := _equal_snapshot(spark, home, info, checked_rows, report)) is not None:
            return held
        report(f"writing {info.devices:,} devices")
        write_snapshot(home, checked, info)
    written = next(one for one in snapshots(home) if _unwritten(one) == info)
    report(f"snapshot version {written.version} is written")
    return written


def _equal_snapshot(
    spark: SparkSession, home: Home, info: SnapshotInfo, rows: SnapshotRows, report: ReportProgress
) -> SnapshotInfo | None:
    """Return the newest snapshot if its metadata and rows are the same, and report it.

    Older snapshots do not count: a bootstrap takes the newest, which must be the one requested
    last.
    """
    newest = shown_snapshot(home)
    if newest is None or newest.version is None or _unwritten(newest) != info:
        return None
    report(f"comparing with snapshot version {newest.version}, which has the same position")
    expected = _comparable(rows)
    try:
        held = _comparable(rows_as_given(read_snapshot(spark, home, newest.version).each))  # Spark verifies the files' checksums
    except (FleetError, PySparkException, Py4JError):
        held = None
    if held != expected:
        why = "cannot be read" if held is None else "has other rows"
        report(f"snapshot version {newest.version} is damaged: it {why}; taking it again")
        return None
    report(
        f"snapshot version {newest.version} is already that of generation {info.generation} after batch {info.batch}, "
        f"{info.devices:,} devices; nothing to do"
    )
    return newest


def _comparable(rows: SnapshotRows) -> tuple[object, ...]:
    account = with_checksum(rows).account
    return account.sums, account.context, account.waiting, sorted(account.pending)


def _unwritten(info: SnapshotInfo) -> SnapshotInfo:
    return replace(info, version=None, at_ms=None)
