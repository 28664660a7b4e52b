"""Streaming query of the lifecycle job: bronze blocks to judgements."""

import time
from collections.abc import Callable, Mapping
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
from fleetpulse.io.spark.scratch import remove_temporary_files
from fleetpulse.io.spark.session import changed_settings, folder_of
from fleetpulse.io.tables.adaptive_batching import BATCH_ROWS
from fleetpulse.io.tables.outbox import flush_outbox

PAUSE: Final = "200 milliseconds"  # trigger interval: time between two polls for new rows
_LOG: Final = structlog.get_logger("lifecycle")
_STARTS: Final = 5  # attempts if a Python process of the query connects too late
_FIRST_BATCH_S: Final = 3600.0  # timeout for the first batch of a bounded query
_INITIALIZING: Final = "Initializing"
_NOT_CONNECTED: Final = "Python worker failed to connect back"
OF_A_BLOCK_QUERY: Final = {  # session settings that a query reads when it starts
    # A batch judges all key groups at its newest row, so a batch without rows has no work.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # The JVM sees few rows, one per block: generating a projection's code takes longer than
    # interpreting the projection.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
}


@dataclass(frozen=True, slots=True)
class InitialState:
    """Initial state of a new checkpoint.

    Attributes:
        groups: initial key groups, one row each, columns of `BOOTSTRAP_SCHEMA`.
        version: first version of bronze to read after the initial state.
        alone: whether the first batch loads the initial state and reads no rows. Otherwise the
            initial state waits for the first row of bronze.
    """

    groups: DataFrame
    version: int = 0
    alone: bool = False


def judgement_stream(
    spark: SparkSession,
    messages: Path,
    deployment: Deployment,
    generation: Generation,
    *,
    initial: InitialState | None = None,
    through: int | None = None,
    max_rows: int = BATCH_ROWS,
    silent: bool = False,
    held_ms: int = 0,
    table: Path | None = None,
    whole: bool = False,
) -> DataFrame:
    """Return the judgements on a table of messages as a streaming DataFrame.

    Each call for a key group yields one row, see `stateful_processor.OUTPUT`.

    Args:
        spark: Spark session.
        messages: path of the table of messages.
        deployment: allowed lateness, clock lead and jitter.
        generation: generation that fixes the number of key groups and the stored form.
        initial: initial state of a new checkpoint, required until its first batch is committed and
            ignored afterwards.
        through: version of bronze at which to stop; None never stops.
        max_rows: target number of rows a batch; 1 makes each version a batch.
        silent: whether the judgements are discarded, so that summaries remain to be emitted.
        held_ms: hold time, see `start`.
        table: folder of the table to which a task writes the judgements of one call if they are
            many; None returns all judgements in the rows.
        whole: whether each judgement has a row of its own, see `GroupProcessor`.
    """
    options: dict[str, str | int] = {"max_rows": max_rows}
    if initial is not None:
        options |= {"begin": initial.version, "begin_alone": int(initial.alone)}
    if through is not None:
        options["through"] = through
    if held_ms:
        options["hold_ms"] = held_ms
    blocks = block_stream(spark, messages, generation.key_groups, options)
    initial_groups = None if initial is None else initial.groups.groupBy("key_group")
    folder = None if table is None else str(table)
    processor = GroupProcessor(
        deployment, generation.form, silent=silent, table=folder, generation=generation.number, whole=whole
    )
    return blocks.groupBy("key_group").transformWithState(processor, OUTPUT, "append", "eventtime", initial_groups)


def block_stream(spark: SparkSession, messages: Path, key_groups: int, options: Mapping[str, str | int]) -> DataFrame:
    """Return the blocks of a table of messages as a streaming DataFrame, with ``received_at`` as watermark.

    Args:
        spark: Spark session.
        messages: folder of the table of messages.
        key_groups: number of key groups.
        options: further options of `BlockReader`.
    """
    spark.dataSource.register(BlockSource)
    given: dict[str, str | int] = {
        "path": str(messages),
        "key_groups": key_groups,
        "parallelism": spark.sparkContext.defaultParallelism,
        **options,
    }
    if str(spark.conf.get("spark.master")).startswith("local["):  # all tasks share the local disk
        given["handover"] = mkdtemp(prefix="blocks-", dir=folder_of(spark))
    blocks = spark.readStream.format(FORMAT).options(**given).load()
    return blocks.withWatermark("received_at", f"{WATERMARK_DELAY_MS} milliseconds")


def judgement_writer(rows: DataFrame, table: Path, checkpoint: Path, generation: int) -> DataStreamWriter:
    """Return the stream writer of judgements to a table.

    Args:
        rows: rows returned by `judgement_stream` for the same table.
        table: folder of the judgements table; a missing table is created.
        checkpoint: checkpoint of the query.
        generation: generation of the job.
    """
    writer = rows.writeStream.outputMode("append").option("checkpointLocation", str(checkpoint))
    return writer.foreachBatch(JudgementSink(table, checkpoint, generation))


def start(
    spark: SparkSession,
    home: Home,
    pause: str | None = PAUSE,
    *,
    initial: InitialState | None = None,
    generation: Generation | None = None,
    through: int | None = None,
    judgements_table: Path | None = None,
    silent: bool = False,
    held_ms: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> StreamingQuery:
    """Start the query of a home from its checkpoint, or from ``initial`` without one.

    Args:
        spark: Spark session.
        home: home of the job.
        pause: trigger interval; None processes the available rows and stops.
        initial: initial state of a new checkpoint.
        generation: generation to run; None takes the current one.
        through: version of bronze at which to stop, see `judgement_stream`.
        judgements_table: scratch table for the judgements, one row each; None takes the table of the
            home.
        silent: whether to judge without emitting, because another generation emits the judgements.
            If ``judgements_table`` is given, its table still receives the judgements except summaries, which
            remain to be emitted.
        held_ms: time for which rows of a live fleet wait for their batch, milliseconds, see
            `adaptive_batching`.
        stopped: callback that returns whether the caller has cancelled the query; if so, the query
            is not restarted.

    Raises:
        FleetError: the checkpoint belongs to another home, or is ahead of bronze.
    """
    generation = generation or home.generation()
    checkpoint = checkpoint_of(home.lifecycle, generation.number)
    require_own(home, generation.number)
    mark_own(home, generation.number)
    relocate(checkpoint)
    remove_temporary_files(checkpoint)
    table = judgements_table or home.table(JUDGEMENTS.name)
    if not silent:
        if judgements_table is None:
            flush_outbox(home, generation.number)
        finish_sink_committed_batch(checkpoint, table, home.table(MESSAGES.name), initial.version if initial else 0)
    rows = judgement_stream(
        spark,
        home.table(MESSAGES.name),
        home.deployment(),
        generation,
        initial=initial,
        through=through,
        silent=silent,
        held_ms=held_ms,
        table=None if silent and judgements_table is None else table,
        whole=judgements_table is not None,
    )
    with changed_settings(spark, OF_A_BLOCK_QUERY):
        if silent and judgements_table is None:
            writer = rows.writeStream.outputMode("append").option("checkpointLocation", str(checkpoint)).format("noop")
        else:
            writer = judgement_writer(rows, table, checkpoint, generation.number)
        writer = writer.queryName("lifecycle")
        writer = writer.trigger(availableNow=True) if pause is None else writer.trigger(processingTime=pause)
        return start_with_retries(writer.start, stopped, bounded=pause is None)


def start_with_retries(
    start_query: Callable[[], StreamingQuery],
    stopped: Callable[[], bool] = lambda: False,
    poll_s: float = 0.05,
    *,
    bounded: bool = False,
) -> StreamingQuery:
    """Start a query; restart it if one of its Python processes connects too late.

    Spark fails the query if the process of its source, or the one that checks the processor before
    the first batch, does not connect within ten seconds; no setting changes this timeout. A busy
    machine needs longer. The query has committed no batch by then, and repeats it after a restart.

    Args:
        start_query: function that starts the query.
        stopped: callback that returns whether the caller has cancelled the query; if so, the query
            is returned in its current state.
        poll_s: interval in seconds between two checks of the query.
        bounded: whether the query ends by itself. Its first batch is then awaited too; the first
            batch of a live query may come hours later, and the supervisor restarts its job.

    Returns:
        The query with initialized sources, and if ``bounded``, with its first batch. A query that was
        cancelled, failed for another reason, failed `_STARTS` times, or finished no batch within
        `_FIRST_BATCH_S` is returned in its current state.
    """
    for attempt in range(1, _STARTS + 1):
        query = start_query()
        limit = time.monotonic() + _FIRST_BATCH_S
        while query.isActive and not _is_started(query, bounded=bounded) and not stopped() and time.monotonic() < limit:
            time.sleep(poll_s)
        if query.isActive or stopped() or _NOT_CONNECTED not in str(query.exception()):
            break
        _LOG.warning("a Python process of the query did not connect within Spark's 10 s", start=attempt, of=_STARTS)
    return query


def _is_started(query: StreamingQuery, *, bounded: bool) -> bool:
    """Return whether a query has initialized its sources, and if bounded, finished a batch."""
    if bounded:
        return query.lastProgress is not None
    return not query.status["message"].startswith(_INITIALIZING)
