"""Backtest: replay a history under another policy, in this process or on Spark.

Rule 1: a backtest reads the home and writes nothing into it, so it may run while the job runs.
On a cluster, it writes temporary files to a folder in the home.
Rule 2: both sides are replayed. The emitted judgements cannot serve as one side. They end at the
job's position, and a verdict jitter delays some. Amendments change them. A generation can come from a
list of devices.
Rule 3: the engine changes the duration only, not the result.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from batch.common.progress import Paced, ReportProgress, Steps, silent, watched
from fleetpulse.columnar.backtest.replay import BacktestRequest, BacktestResult, DualReplay, merge_results
from fleetpulse.columnar.codec.arrow import NO_SIGNALS, batch_to_rows, from_bytes
from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.policy import Policy
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms, require_kept
from fleetpulse.io.spark.python_worker import freeze_gc
from fleetpulse.io.system.process import unblock_imports
from fleetpulse.io.tables.bronze_slices import BronzePiece, Slice, blocks_of, pieces_of, slices_of
from fleetpulse.reports.backtests.backtest import Backtest, figures

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_FROM_ROWS: Final = 30_000_000  # rows from which Spark is faster than one process, including its start
_RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BLOCKS_A_BATCH: Final = 4  # a block may have megabytes; the default of 10,000 could be the whole history
_SHUFFLED: Final = "key_group int, slice int, newest_ms long, signals binary, others binary"
_BLOCK: Final = pa.schema(
    [
        ("key_group", pa.int32()),
        ("slice", pa.int32()),
        ("newest_ms", pa.int64()),
        ("signals", pa.binary()),
        ("others", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class BacktestReport:
    """Result of a backtest.

    Attributes:
        found: differences, one per row.
        figures: summary of the differences.
    """

    found: BacktestResult
    figures: Backtest


@dataclass(frozen=True, slots=True)
class Planned:
    """Plan of a backtest.

    Attributes:
        question: parameters of the backtest.
        pieces: pieces of bronze.
        rows: number of rows in the pieces.
        on_spark: whether Spark replays the rows, or this process.
    """

    question: BacktestRequest
    pieces: Sequence[BronzePiece]
    rows: int
    on_spark: bool

    @property
    def begin_ms(self) -> int:
        """First instant of the comparison, epoch milliseconds."""
        return self.question.started_ms if self.question.from_ms is None else self.question.from_ms

    def end_ms(self, home: Home, frontier_ms: int | None) -> int:
        """Return the last instant of the comparison, epoch milliseconds.

        Args:
            home: the home.
            frontier_ms: frontier of the landed rows, epoch milliseconds; None if there is none yet.

        Raises:
            FleetError: the frontier has not reached the range yet.
        """
        if frontier_ms is None or frontier_ms < self.begin_ms:
            reached = "nothing" if frontier_ms is None else f"only messages up to {format_instant(frontier_ms)}"
            raise FleetError(
                f'the frontier has not reached --from {format_instant(self.begin_ms)}; "{home.path}" has {reached} to judge '
                f"so far; name an earlier instant, or try again after the allowed lateness",
                code="interval-not-judged",
            )
        return frontier_ms if self.question.to_ms is None else min(self.question.to_ms, frontier_ms)


def planned(home: Home, policy: Policy, from_ms: int | None, to_ms: int | None, *, spark: bool | None = None) -> Planned:
    """Return the plan of a backtest, see `backtest`.

    The errors are those of `backtest`, except those that only the replay can find.
    """
    pieces = pieces_of(home)
    request = _question(home, policy, pieces, from_ms, to_ms)
    rows = sum(piece.rows for piece in pieces)
    return Planned(request, pieces, rows, rows >= SPARK_FROM_ROWS if spark is None else spark)


def backtest(
    home: Home,
    policy: Policy,
    from_ms: int | None,
    to_ms: int | None,
    *,
    spark: bool | None = None,
    report: ReportProgress = silent,
) -> BacktestReport:
    """Replay a history under the recorded policies and a candidate, and compare.

    Args:
        home: the home.
        policy: candidate policy, which replaces every recorded policy that takes effect in the
            range.
        from_ms: start of the range, epoch milliseconds; None starts at the retention floor of
            bronze, or at the first row.
        to_ms: end of the range, epoch milliseconds; None ends at the frontier of the landed rows.
        spark: whether to use Spark; None uses it if the history is long.
        report: callback for progress lines, every few seconds.

    Raises:
        FleetError: the home has no history, or none of the range, or retention removed rows of the range.
        Misuse: the range ends before its start.
    """
    plan = planned(home, policy, from_ms, to_ms, spark=spark)
    request, slices = plan.question, slices_of(plan.pieces)
    found = _on_spark(request, slices, home, report) if plan.on_spark else replay_here(request, slices, report)
    end_ms = plan.end_ms(home, found.frontier_ms)
    return BacktestReport(found, figures(found, policy.version, plan.begin_ms, end_ms, plan.rows))


def _question(
    home: Home, policy: Policy, pieces: Sequence[BronzePiece], from_ms: int | None, to_ms: int | None
) -> BacktestRequest:
    if from_ms is not None and to_ms is not None and from_ms > to_ms:
        raise Misuse(
            f"--from lies before --to; got {format_instant(from_ms)} and {format_instant(to_ms)}; exchange them",
            code="interval-reversed",
        )
    if not pieces:
        raise FleetError(
            f'the home "{home.path}" has no messages to judge; replay some: ./fleet replay RECORDING --home {home.path}',
            code="messages-missing",
        )
    started_ms, newest_ms = pieces[0].first_ms, max(piece.last_ms for piece in pieces)
    kept_ms = oldest_kept_ms(home, MESSAGES.name)
    oldest_ms = started_ms if kept_ms is None else max(started_ms, kept_ms)
    retained = f'the history of "{home.path}" is kept from {format_instant(oldest_ms)} to {format_instant(newest_ms)}'
    for name, instant_ms in (("--from", from_ms), ("--to", to_ms)):
        if instant_ms is None:
            continue
        require_kept(home, MESSAGES.name, instant_ms, f"a backtest {name} {format_instant(instant_ms)}")
        if not oldest_ms <= instant_ms <= newest_ms:
            advice = f"{format_instant(oldest_ms)} is the oldest instant; omit {name} for the whole history"
            raise FleetError(f"{retained}; got {name} {format_instant(instant_ms)}; {advice}", code="interval-not-retained")
    if from_ms is None:
        from_ms = kept_ms  # older rows that remain (registry, policies) are folded, but not compared
    return BacktestRequest(home.deployment(), policy.normalised(), from_ms, to_ms, started_ms, newest_ms)


def replay_here(request: BacktestRequest, slices: Sequence[Slice], report: ReportProgress = silent) -> BacktestResult:
    """Replay in this process as one key group, slice by slice, in bounded memory."""
    rejudged, progress = DualReplay(request, 0), Paced(report)
    for each in slices:
        for signals, others in unpacked(blocks_of(each, 1, request.started_ms)):
            rejudged.fold(signals, others, each.newest_ms)
        progress(partial(progress_line, each, len(slices)))
    return merge_results([rejudged.finish()])


def progress_line(done: Slice, count: int) -> str:
    """Format the progress of a replay after a slice.

    Args:
        done: slice that was replayed last.
        count: number of slices.
    """
    return f"judging: {done.number + 1:,} of {count:,} slices, received up to {format_instant(done.newest_ms)}"


def unpacked(blocks: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, list[Row]]]:
    """Yield signals and other rows of each block, see `bronze_slices.blocks_of`."""
    for signals, others in zip(blocks["signals"], blocks["others"], strict=True):
        yield (
            from_wire(signals.as_py()) if signals.is_valid else NO_SIGNALS,
            batch_to_rows(from_bytes(others.as_py())) if others.is_valid else [],
        )


def _on_spark(request: BacktestRequest, slices: Sequence[Slice], home: Home, report: ReportProgress) -> BacktestResult:
    unblock_imports("pandas")  # Spark imports it
    from fleetpulse.io.spark.session import SparkResources, spark_session
    from fleetpulse.settings import load_settings

    size = SparkResources.of(home.path, load_settings(home.path))
    if size.cluster is None:
        size = replace(size, cores=max(2, os.cpu_count() or 1))
    steps = Steps(report)
    with _scratch(home, shared=size.cluster is not None) as folder:
        steps("starting Spark")
        session = spark_session("fleetpulse-backtest", local_dir=folder, size=size)
        try:
            steps(f"replaying on Spark, in {len(slices):,} slices")
            with watched(session, steps):
                return on_spark(session, request, slices, home.key_groups())
        finally:
            session.stop()


@contextmanager
def _scratch(home: Home, *, shared: bool) -> Iterator[Path]:
    """Provide a temporary folder, in the home if executors must find it, too."""
    if shared:
        from batch.common.spark_session import session_folder

        with session_folder(home.path / "spark") as folder:
            yield folder
        return
    with TemporaryDirectory(prefix="fleet-backtest-") as place:
        yield Path(place)


def on_spark(session: "SparkSession", request: BacktestRequest, slices: Sequence[Slice], key_groups: int) -> BacktestResult:
    """Replay on Spark: pack slices, shuffle by key group, and fold the key groups.

    Args:
        session: Spark session.
        request: parameters of the backtest.
        slices: slices of bronze, in order.
        key_groups: number of key groups.
    """
    previous = session.conf.get(_RECORDS) or ""
    session.conf.set(_RECORDS, str(_BLOCKS_A_BATCH))
    numbers = session.createDataFrame([(each.number,) for each in slices], "slice int")
    packed = numbers.mapInArrow(_packer(list(slices), key_groups, request.started_ms), _SHUFFLED)
    ordered = packed.repartition("key_group").sortWithinPartitions("key_group", "slice")
    try:
        found = ordered.mapInArrow(_folder(request), "found binary").collect()  # a row per key group
    finally:
        session.conf.set(_RECORDS, previous)
    return merge_results(BacktestResult.from_bytes(bytes(row.found)) for row in found)


Batches = Iterator[pa.RecordBatch]


def _packer(slices: list[Slice], key_groups: int, started_ms: int) -> Callable[[Batches], Batches]:
    def packed(batches: Batches) -> Batches:
        for batch in batches:
            for number in batch["slice"].to_pylist():
                blocks = blocks_of(slices[number], key_groups, started_ms)
                known = {"slice": number, "newest_ms": slices[number].newest_ms}
                columns = [
                    pa.repeat(pa.scalar(known[field.name], field.type), blocks.num_rows)
                    if field.name in known
                    else blocks[field.name]
                    for field in _BLOCK
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=_BLOCK)
                freeze_gc()

    return packed


def _folder(request: BacktestRequest) -> Callable[[Batches], Batches]:
    """Return a function that folds sorted blocks to a row per key group."""

    def written(rejudged: DualReplay) -> pa.RecordBatch:
        return pa.record_batch([pa.array([rejudged.finish().to_bytes()], pa.binary())], ["found"])

    def folded(batches: Batches) -> Batches:
        group, rejudged = None, None
        for batch in batches:
            for place, key_group in enumerate(batch["key_group"].to_pylist()):
                if rejudged is None or key_group != group:
                    if rejudged is not None:
                        yield written(rejudged)
                    group, rejudged = key_group, DualReplay(request, key_group)
                block = batch.slice(place, 1)
                for signals, others in unpacked(block):
                    rejudged.fold(signals, others, block["newest_ms"][0].as_py())
        if rejudged is not None:
            yield written(rejudged)
        freeze_gc()

    return folded
