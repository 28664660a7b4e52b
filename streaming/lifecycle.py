"""The lifecycle job: bronze in, judgements out. The JVM plans, shuffles blocks, keeps state and commits."""

import json
import os
import time
from pathlib import Path
from typing import Any, Final

import structlog
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io import delta
from fleetpulse.io.block_source import FORMAT, BlockSource
from fleetpulse.io.group_processor import OUTPUT, WATERMARK_DELAY_MS, GroupProcessor
from fleetpulse.io.home import Home
from fleetpulse.io.process import Stop, write_status
from fleetpulse.io.spark import spark_session
from fleetpulse.io.stream_health import StreamHealth

_LOG: Final = structlog.get_logger("lifecycle")
GENERATION: Final = 1


def judged(spark: SparkSession, messages: Path, deployment: Deployment, key_groups: int) -> DataFrame:
    """Return the streaming table of judgements over a table of messages."""
    spark.dataSource.register(BlockSource)
    blocks = (
        spark.readStream.format(FORMAT)
        .option("path", str(messages))
        .option("key_groups", str(key_groups))
        .load()
        .withWatermark("received_at", f"{WATERMARK_DELAY_MS} milliseconds")
    )
    folded = blocks.groupBy("key_group").transformWithState(GroupProcessor(deployment), OUTPUT, "append", "eventtime")
    return folded.select(*(_stored(column.name, column.type) for column in JUDGEMENTS.columns))


def _stored(name: str, kind: str) -> Column:
    if name == "judged_at":
        return F.current_timestamp().alias(name)
    if name == "generation":
        return F.lit(GENERATION).alias(name)
    return F.timestamp_millis(f"{name}_ms").alias(name) if kind == "timestamp" else F.col(name)


def start(spark: SparkSession, home: Home, pause: str = "200 milliseconds") -> StreamingQuery:
    """Start the query of a home; it goes on where its checkpoint stands."""
    delta.create(home, JUDGEMENTS)
    rows = judged(spark, home.table(MESSAGES.name), home.deployment(), home.key_groups())
    return (
        rows.writeStream.format("delta")
        .queryName("lifecycle")
        .option("checkpointLocation", str(home.checkpoint))
        .partitionBy(*JUDGEMENTS.partitioned_by)
        .outputMode("append")
        .trigger(processingTime=pause)
        .start(str(home.table(JUDGEMENTS.name)))
    )


def judged_up_to(checkpoint: Path) -> tuple[int, int] | None:
    """Return the newest committed batch and the ``received_at`` up to which it judged, in epoch milliseconds.

    Read from the checkpoint itself, so that it is true whether the job runs, stopped or was killed. None before
    the first batch.
    """
    committed = [int(path.name) for path in (checkpoint / "commits").glob("*") if path.name.isdecimal()]
    for batch in sorted(committed, reverse=True):
        try:
            metadata = json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[1])
        except (OSError, ValueError, IndexError):
            continue
        return batch, int(metadata["batchWatermarkMs"]) + WATERMARK_DELAY_MS
    return None


def run_lifecycle(home: Home, stop: Stop) -> None:
    """Run the job of a home until stopped.

    Raises:
        FleetError: the query failed; its own words are in the log.
    """
    write_status(home.run("lifecycle"), {"pid": os.getpid(), "state": "starting"})
    while not (home.table(MESSAGES.name) / "_delta_log").exists():
        if stop.wait(0.1):
            return
    spark = spark_session("fleetpulse-lifecycle", local_dir=home.path / "spark")
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
