"""The lifecycle job: bronze in, judgements out. The JVM plans, shuffles blocks, keeps state and commits."""

import os
import threading
import time
from pathlib import Path
from typing import Any, Final

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.columnar.warm import warm
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io import delta
from fleetpulse.io.block_source import FORMAT, MAX_ROWS, BlockSource
from fleetpulse.io.checkpoint import WATERMARK_DELAY_MS, judged_up_to
from fleetpulse.io.group_processor import OUTPUT, TOLD, GroupProcessor, unpacker
from fleetpulse.io.home import Home
from fleetpulse.io.process import Stop, write_status
from fleetpulse.io.spark import spark_session
from fleetpulse.io.stream_health import StreamHealth

_LOG: Final = structlog.get_logger("lifecycle")
GENERATION: Final = 1
_WARM_LIMIT_S: Final = 60.0


def judged(
    spark: SparkSession,
    messages: Path,
    deployment: Deployment,
    key_groups: int,
    *,
    initial: DataFrame | None = None,
    max_rows: int = MAX_ROWS,
) -> DataFrame:
    """Return the streaming table of judgements over a table of messages.

    Args:
        spark: the session.
        messages: path of the table.
        deployment: lateness, clock lead and jitter.
        key_groups: how many there are; fixed for a checkpoint.
        initial: what a new checkpoint begins with, see `io.registry.initial_state`; to be given until its first batch is
            committed, passed over from then on.
        max_rows: what a batch aims at; 1 makes each version a batch.
    """
    spark.dataSource.register(BlockSource)
    blocks = (
        spark.readStream.format(FORMAT)
        .options(path=str(messages), key_groups=key_groups, max_rows=max_rows)
        .load()
        .withWatermark("received_at", f"{WATERMARK_DELAY_MS} milliseconds")
    )
    begun = None if initial is None else initial.groupBy("key_group")
    folded = blocks.groupBy("key_group").transformWithState(GroupProcessor(deployment), OUTPUT, "append", "eventtime", begun)
    return folded.mapInArrow(unpacker(GENERATION), TOLD)


def start(
    spark: SparkSession, home: Home, pause: str = "200 milliseconds", *, initial: DataFrame | None = None
) -> StreamingQuery:
    """Start the query of a home; it goes on where its checkpoint stands, and begins with ``initial`` where there is none."""
    delta.create(home, JUDGEMENTS)
    rows = judged(spark, home.table(MESSAGES.name), home.deployment(), home.key_groups(), initial=initial)
    return (
        rows.writeStream.format("delta")
        .queryName("lifecycle")
        .option("checkpointLocation", str(home.checkpoint))
        .partitionBy(*JUDGEMENTS.partitioned_by)
        .outputMode("append")
        .trigger(processingTime=pause)
        .start(str(home.table(JUDGEMENTS.name)))
    )


def run_lifecycle(home: Home, stop: Stop) -> None:
    """Run the job of a home until stopped.

    Raises:
        FleetError: the query failed; its own words are in the log.
    """
    write_status(home.run("lifecycle"), {"pid": os.getpid(), "state": "starting"})
    while not (home.table(MESSAGES.name) / "_delta_log").exists():
        if stop.wait(0.1):
            return
    warming = threading.Thread(target=warm, name="warm", daemon=True)
    warming.start()  # while the JVM starts; the first batch's workers find it done instead of each doing it
    spark = spark_session("fleetpulse-lifecycle", local_dir=home.path / "spark")
    warming.join(_WARM_LIMIT_S)
    health = StreamHealth(home, GENERATION)
    query = start(spark, home)
    health.follow(spark, query)
    try:
        while not stop.wait(0.3):
            if not query.isActive:
                raise FleetError(f"the lifecycle job stopped by itself: {query.exception() or 'no reason given'}")
            write_status(home.run("lifecycle"), _status(home, query))
    finally:
        _finish(query)
        health.stop()
        spark.stop()


def _status(home: Home, query: StreamingQuery) -> dict[str, Any]:
    progress = query.lastProgress
    reached = judged_up_to(home.checkpoint)
    return {
        "pid": os.getpid(),
        "state": "running",
        "batch": reached[0] if reached else None,
        "received_at_ms": reached[1] if reached else None,
        "batch_ms": progress["durationMs"].get("triggerExecution") if progress else None,
        "at": time.time(),
    }


def _finish(query: StreamingQuery) -> None:
    """Stop between two batches where that comes within ten seconds: less is done twice after the next start."""
    limit = time.monotonic() + 10
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < limit:
        time.sleep(0.05)
    query.stop()
    _LOG.info("lifecycle stopped", query=query.name)
