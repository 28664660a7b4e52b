"""The same history judged under another policy: in this process, or on Spark where it is long.

Rule 1: it reads, and writes nothing into the home: it runs beside a running job as well as on a home that stands still.
Rule 2: both sides are judged anew. What the job has written would spare one of them, but it ends where the job has come, a
jitter holds verdicts back, amendments change them, and a generation may have begun with what no row of bronze says.
Rule 3: Spark changes nothing but the time it takes.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from batch.common.progress import Paced, Say, Steps, silent, watched
from fleetpulse.columnar.backtest.replay import BacktestRequest, BacktestResult, DualReplay, together
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
from fleetpulse.reports.backtest import Backtest, figures

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_FROM_ROWS: Final = 30_000_000  # below it one process is done before Spark has gained what its start costs
_RECORDS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BLOCKS_A_BATCH: Final = 4  # each may be megabytes; Arrow's usual 10,000 rows would be all of the history
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
class Answer:
    """What came of it.

    Attributes:
        found: the differences, one a row.
        figures: what they come to.
    """

    found: BacktestResult
    figures: Backtest


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be judged.

    Attributes:
        question: what is asked of it.
        pieces: what bronze consists of.
        rows: how many are in them.
        on_spark: whether Spark judges them, or this process.
    """

    question: BacktestRequest
    pieces: Sequence[BronzePiece]
    rows: int
    on_spark: bool

    @property
    def begin_ms(self) -> int:
        """From when on verdicts are compared, epoch milliseconds."""
        return self.question.started_ms if self.question.from_ms is None else self.question.from_ms

    def end_ms(self, home: Home, frontier_ms: int | None) -> int:
        """Return up to when verdicts are compared, epoch milliseconds.

        Args:
            home: the home.
            frontier_ms: of what has landed; None where nothing of it can be judged.

        Raises:
            FleetError: nothing of the range can be judged yet.
        """
        if frontier_ms is None or frontier_ms < self.begin_ms:
            reached = "nothing" if frontier_ms is None else f"what happened up to {format_instant(frontier_ms)}"
            raise FleetError(
                f'of what landed in "{home.path}" {reached} can be judged yet; got --from {format_instant(self.begin_ms)}; '
                f"name an earlier instant, or ask again a lateness after it",
                code="interval-not-judged",
            )
        return frontier_ms if self.question.to_ms is None else min(self.question.to_ms, frontier_ms)


def planned(home: Home, policy: Policy, from_ms: int | None, to_ms: int | None, *, spark: bool | None = None) -> Planned:
    """Return what a backtest is to judge, see `backtest`, with its errors but for what is seen when it is judged."""
    pieces = pieces_of(home)
    question = _question(home, policy, pieces, from_ms, to_ms)
    rows = sum(piece.rows for piece in pieces)
    return Planned(question, pieces, rows, rows >= SPARK_FROM_ROWS if spark is None else spark)


def backtest(
    home: Home, policy: Policy, from_ms: int | None, to_ms: int | None, *, spark: bool | None = None, say: Say = silent
) -> Answer:
    """Judge a home's history under the policies in force and under another, and compare.

    Args:
        home: the home.
        policy: that stands in for every recorded one that takes effect in the range.
        from_ms: from when on, epoch milliseconds; None from the start, or from when on bronze has all its rows.
        to_ms: up to when verdicts are compared; None to the frontier of what has landed.
        spark: whether on Spark; None where the history is long.
        say: told every few seconds how far it is.

    Raises:
        FleetError: the home has no history, or none of that time, or retention has removed rows of it.
        Misuse: the range ends before it begins.
    """
    plan = planned(home, policy, from_ms, to_ms, spark=spark)
    question, slices = plan.question, slices_of(plan.pieces)
    found = _on_spark(question, slices, home, say) if plan.on_spark else here(question, slices, say)
    end_ms = plan.end_ms(home, found.frontier_ms)
    return Answer(found, figures(found, policy.version, plan.begin_ms, end_ms, plan.rows))


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
            f'the home "{home.path}" has no messages to judge; play some with: ./fleet replay RECORDING --home {home.path}',
            code="messages-missing",
        )
    started_ms, newest_ms = pieces[0].first_ms, max(piece.last_ms for piece in pieces)
    kept_ms = oldest_kept_ms(home, MESSAGES.name)
    oldest_ms = started_ms if kept_ms is None else max(started_ms, kept_ms)
    kept = f'the history of "{home.path}" is kept from {format_instant(oldest_ms)} to {format_instant(newest_ms)}'
    for name, instant_ms in (("--from", from_ms), ("--to", to_ms)):
        if instant_ms is None:
            continue
        require_kept(home, MESSAGES.name, instant_ms, f"a backtest {name} {format_instant(instant_ms)}")
        if not oldest_ms <= instant_ms <= newest_ms:
            cure = f"{format_instant(oldest_ms)} is the oldest instant, leave {name} out for all that is kept"
            raise FleetError(f"{kept}; got {name} {format_instant(instant_ms)}; {cure}", code="interval-not-retained")
    if from_ms is None:
        from_ms = kept_ms  # what is left of older rows (registry, policies) is folded, and nothing of it compared
    return BacktestRequest(home.deployment(), policy.normalised(), from_ms, to_ms, started_ms, newest_ms)


def here(question: BacktestRequest, slices: Sequence[Slice], say: Say = silent) -> BacktestResult:
    """Judge in this process, as one key group: slice by slice, so that memory stays bounded."""
    rejudged, far = DualReplay(question, 0), Paced(say)
    for each in slices:
        for signals, others in unpacked(blocks_of(each, 1, question.started_ms)):
            rejudged.fold(signals, others, each.newest_ms)
        far(partial(judged_so_far, each, len(slices)))
    return together([rejudged.finish()])


def judged_so_far(done: Slice, count: int) -> str:
    """Say how far a history is judged, when a slice of so many has been."""
    return f"judging: {done.number + 1:,} of {count:,} slices, received up to {format_instant(done.newest_ms)}"


def unpacked(blocks: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, list[Row]]]:
    """Yield the signals and the other rows of each block, see `bronze_slices.blocks_of`."""
    for signals, others in zip(blocks["signals"], blocks["others"], strict=True):
        yield (
            from_wire(signals.as_py()) if signals.is_valid else NO_SIGNALS,
            batch_to_rows(from_bytes(others.as_py())) if others.is_valid else [],
        )


def _on_spark(question: BacktestRequest, slices: Sequence[Slice], home: Home, say: Say) -> BacktestResult:
    unblock_imports("pandas")  # Spark asks for it
    from fleetpulse.io.spark.session import SparkResources, spark_session
    from fleetpulse.settings import load_settings

    size = SparkResources(max(2, os.cpu_count() or 1), load_settings(home.path).heap)
    steps = Steps(say)
    with TemporaryDirectory(prefix="fleet-backtest-") as folder:
        steps("starting Spark")
        session = spark_session("fleetpulse-backtest", local_dir=Path(folder), size=size)
        try:
            steps(f"judging on Spark, in {len(slices):,} slices")
            with watched(session, steps):
                return on_spark(session, question, slices, home.key_groups())
        finally:
            session.stop()


def on_spark(session: "SparkSession", question: BacktestRequest, slices: Sequence[Slice], key_groups: int) -> BacktestResult:
    """Judge with Spark: slices are packed in parallel, sorted to their key groups, and these folded in parallel.

    Args:
        session: the session.
        question: what is asked.
        slices: of bronze, in order.
        key_groups: how many there are.
    """
    usual = session.conf.get(_RECORDS) or ""
    session.conf.set(_RECORDS, str(_BLOCKS_A_BATCH))
    numbers = session.createDataFrame([(each.number,) for each in slices], "slice int")
    packed = numbers.mapInArrow(_packer(list(slices), key_groups, question.started_ms), _SHUFFLED)
    ordered = packed.repartition("key_group").sortWithinPartitions("key_group", "slice")
    try:
        found = ordered.mapInArrow(_folder(question), "found binary").collect()  # a row a key group
    finally:
        session.conf.set(_RECORDS, usual)
    return together(BacktestResult.from_bytes(bytes(row.found)) for row in found)


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


def _folder(question: BacktestRequest) -> Callable[[Batches], Batches]:
    """Return what folds blocks, sorted by key group and slice: one row a group."""

    def written(rejudged: DualReplay) -> pa.RecordBatch:
        return pa.record_batch([pa.array([rejudged.finish().to_bytes()], pa.binary())], ["found"])

    def folded(batches: Batches) -> Batches:
        group, rejudged = None, None
        for batch in batches:
            for place, key_group in enumerate(batch["key_group"].to_pylist()):
                if rejudged is None or key_group != group:
                    if rejudged is not None:
                        yield written(rejudged)
                    group, rejudged = key_group, DualReplay(question, key_group)
                block = batch.slice(place, 1)
                for signals, others in unpacked(block):
                    rejudged.fold(signals, others, block["newest_ms"][0].as_py())
        if rejudged is not None:
            yield written(rejudged)
        freeze_gc()

    return folded
