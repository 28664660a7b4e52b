"""The lifecycle job's query: bronze in blocks, key groups with their state, judgements to Delta."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import WATERMARK_DELAY_MS, relocate
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of
from fleetpulse.io.home.checkpoint_ownership import mark_own, require_own
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.bronze_source import FORMAT, BlockSource
from fleetpulse.io.lifecycle.finish_commit import finish_sink_committed_batch
from fleetpulse.io.lifecycle.judgement_sink import JudgementSink
from fleetpulse.io.lifecycle.stateful_processor import OUTPUT, GroupProcessor
from fleetpulse.io.spark.scratch import remove_aside
from fleetpulse.io.spark.session import folder_of
from fleetpulse.io.tables.adaptive_batching import MAX_ROWS
from fleetpulse.io.tables.outbox import flush_outbox

PAUSE: Final = "200 milliseconds"  # between two looks for new rows
_LOG: Final = structlog.get_logger("lifecycle")
_STARTS: Final = 5  # of a query whose source's process comes too late
_INITIALIZING: Final = "Initializing"
_NOT_CONNECTED: Final = "Python worker failed to connect back"
_OF_THE_QUERY: Final = {  # settings that a query takes from its session when it starts
    # A batch judges all key groups at its newest row: nothing is left for one without rows.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # The JVM sees few rows, a block each: to write code for a projection takes longer than to interpret it.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
}


@dataclass(frozen=True, slots=True)
class Begin:
    """What a new checkpoint begins with.

    Attributes:
        groups: columns of `columnar.seeds.SEED_SCHEMA`, a row a key group.
        version: of bronze, the first that is to be read after it.
        alone: whether the first batch brings it in and reads nothing; otherwise it waits for the first row of bronze.
    """

    groups: DataFrame
    version: int = 0
    alone: bool = False


def judged(
    spark: SparkSession,
    messages: Path,
    deployment: Deployment,
    generation: Generation,
    *,
    begin: Begin | None = None,
    through: int | None = None,
    max_rows: int = MAX_ROWS,
    silent: bool = False,
    held_ms: int = 0,
    table: Path | None = None,
) -> DataFrame:
    """Return the judgements over a table of messages, a row for each key group's call, see `stateful_processor.OUTPUT`.

    Args:
        spark: the session.
        messages: path of the table.
        deployment: lateness, clock lead and jitter.
        generation: whose key groups and stored form; these are fixed for a checkpoint.
        begin: to be given until a new checkpoint's first batch is committed; passed over from then on.
        through: the version of bronze at which to stop; None goes on.
        max_rows: what a batch aims at; 1 makes each version a batch.
        silent: whether nobody hears what is said.
        held_ms: see `start`.
        table: folder of the table for many judgements of one call; None leaves all of them in the rows.
    """
    spark.dataSource.register(BlockSource)
    options: dict[str, str | int] = {"path": str(messages), "key_groups": generation.key_groups, "max_rows": max_rows}
    if begin is not None:
        options |= {"begin": begin.version, "begin_alone": int(begin.alone)}
    if str(spark.conf.get("spark.master")).startswith("local"):  # what one task writes, each other task can read
        options["handover"] = mkdtemp(prefix="blocks-", dir=folder_of(spark))
    if through is not None:
        options["through"] = through
    if held_ms:
        options["hold_ms"] = held_ms
    blocks = (
        spark.readStream.format(FORMAT)
        .options(**options)
        .load()
        .withWatermark("received_at", f"{WATERMARK_DELAY_MS} milliseconds")
    )
    begun = None if begin is None else begin.groups.groupBy("key_group")
    folder = None if table is None else str(table)
    processor = GroupProcessor(deployment, generation.form, silent=silent, table=folder, generation=generation.number)
    return blocks.groupBy("key_group").transformWithState(processor, OUTPUT, "append", "eventtime", begun)


def written(rows: DataFrame, table: Path, checkpoint: Path, generation: int) -> DataStreamWriter:
    """Return the writer of judgements to a table.

    Args:
        rows: see `judged`, of the same table.
        table: its folder; a missing table is created.
        checkpoint: of the query.
        generation: of the job.
    """
    writer = rows.writeStream.outputMode("append").option("checkpointLocation", str(checkpoint))
    return writer.foreachBatch(JudgementSink(table, checkpoint, generation))


def start(
    spark: SparkSession,
    home: Home,
    pause: str | None = PAUSE,
    *,
    begin: Begin | None = None,
    generation: Generation | None = None,
    through: int | None = None,
    told: Path | None = None,
    silent: bool = False,
    held_ms: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> StreamingQuery:
    """Start the query of a home; it goes on where its checkpoint stands, and begins with ``begin`` where there is none.

    Args:
        spark: the session.
        home: the home.
        pause: between two looks for new rows; None takes what is there now, and comes to an end.
        begin: what a new checkpoint begins with.
        generation: None takes the current one.
        through: see `judged`.
        told: the table that judgements go to; None takes the home's.
        silent: judge, and say nothing: what is read has been said by another generation. Where ``told`` is given what is said
            goes there all the same, but for summaries: they are still to be said.
        held_ms: for how long rows of a live fleet wait for their batch, milliseconds, see `adaptive_batching`.
        stopped: whether the caller no longer wants it; then the query is not started again.

    Raises:
        FleetError: the checkpoint is another home's, or ahead of bronze.
    """
    generation = generation or home.generation()
    checkpoint = checkpoint_of(home.lifecycle, generation.number)
    require_own(home, generation.number)
    mark_own(home, generation.number)
    relocate(checkpoint)
    remove_aside(checkpoint)
    table = told or home.table(JUDGEMENTS.name)
    if not silent:
        if told is None:
            flush_outbox(home, generation.number)
        finish_sink_committed_batch(checkpoint, table, home.table(MESSAGES.name), begin.version if begin else 0)
    rows = judged(
        spark,
        home.table(MESSAGES.name),
        home.deployment(),
        generation,
        begin=begin,
        through=through,
        silent=silent,
        held_ms=held_ms,
        table=None if silent and told is None else table,
    )
    with _set(spark, _OF_THE_QUERY):
        if silent and told is None:
            writer = rows.writeStream.outputMode("append").option("checkpointLocation", str(checkpoint)).format("noop")
        else:
            writer = written(rows, table, checkpoint, generation.number)
        writer = writer.queryName("lifecycle")
        writer = writer.trigger(availableNow=True) if pause is None else writer.trigger(processingTime=pause)
        return start_patiently(writer.start, stopped)


@contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session for a while."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def start_patiently(
    begin: Callable[[], StreamingQuery], stopped: Callable[[], bool] = lambda: False, look_s: float = 0.05
) -> StreamingQuery:
    """Start a query, and start it again if the process of its Python source did not connect in time.

    Spark waits ten seconds for that process, by no setting, and fails the query. A busy machine takes longer to start it.
    Nothing has been read by then.

    Args:
        begin: starts the query.
        stopped: whether the caller no longer wants it: then it is returned as it is, and not started again.
        look_s: between two looks whether its sources are initialized, seconds.

    Returns:
        The query, its sources initialized; one that failed otherwise, or `_STARTS` times, is returned as it is.
    """
    for attempt in range(1, _STARTS + 1):
        query = begin()
        while query.isActive and query.status["message"].startswith(_INITIALIZING) and not stopped():
            time.sleep(look_s)
        if query.isActive or stopped() or _NOT_CONNECTED not in str(query.exception()):
            break
        _LOG.warning("the source's Python process did not connect within Spark's 10 s", start=attempt, of=_STARTS)
    return query
