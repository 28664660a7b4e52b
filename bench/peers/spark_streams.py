"""Peers of the streams beside the lifecycle: plain Spark, written as its documentation shows.

Rule 1: vitals are ``groupBy(window, ...)`` with a watermark on event time, commands are a left outer stream-stream
join with a time range, and sessions are ``transformWithState`` with one call and one timer for each device.
Rule 2: the peers read bronze through the same source as the streams, and write with Delta's own sink.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Row as SparkRow
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from fleetpulse.io.spark.session import changed_settings
from fleetpulse.io.streams.bronze import bronze_stream

SESSION: Final = "device_id string, started_ms long, ended_ms long, ended_by string, messages long"
_SPARKS_OWN: Final = {"spark.sql.streaming.stateStore.encodingFormat": "unsaferow"}  # aggregations and joins have no other
_OutputRow = SparkRow("device_id", "started_ms", "ended_ms", "ended_by", "messages")


def sessions(spark: SparkSession, messages: Path, silence_ms: int, lateness_ms: int) -> DataFrame:
    """Return the ended sessions of each device."""
    rows = bronze_stream(spark, messages, 0).where("kind IN ('birth', 'heartbeat', 'telemetry', 'error', 'death', 'ack')")
    timed = rows.withWatermark("received_at", f"{lateness_ms} milliseconds")
    found = (
        timed.select("device_id", "received_at", F.unix_millis("received_at").alias("at_ms"), "kind").groupBy("device_id")
        .transformWithState(SessionOfDevice(silence_ms), SESSION, "append", "eventtime")
    )  # fmt: skip
    instants = (F.timestamp_millis(f"{name}_ms").alias(f"{name}_at") for name in ("started", "ended"))
    return found.select("device_id", *instants, "ended_by", "messages")


def vitals(spark: SparkSession, messages: Path, window_ms: int, lateness_ms: int) -> DataFrame:
    """Return count, least, greatest and mean battery of each device and window."""
    rows = bronze_stream(spark, messages, 0).withWatermark("event_time", f"{lateness_ms} milliseconds")
    battery = F.get_json_object("metrics", "$.battery").cast("double")
    measured = rows.select("device_id", "event_time", battery.alias("value")).where("value IS NOT NULL")
    windows = F.window("event_time", f"{window_ms} milliseconds")
    found = measured.groupBy(windows, "device_id").agg(
        F.count("value").alias("count"), F.min("value").alias("min"), F.max("value").alias("max"), F.avg("value").alias("mean")
    )
    return found.select("device_id", F.col("window.start").alias("window_start"), "count", "min", "max", "mean")


def commands(spark: SparkSession, messages: Path, answer_ms: int, lateness_ms: int) -> DataFrame:
    """Return each command with its answer, or without one once its time is over."""

    def bronze(kind: str, prefix: str) -> DataFrame:
        rows = bronze_stream(spark, messages, 0).where(F.col("kind") == kind)
        timed = rows.withWatermark("received_at", f"{lateness_ms} milliseconds")
        return timed.select(
            F.col("device_id").alias(f"{prefix}_device"), F.get_json_object("body", "$.id").alias(f"{prefix}_id"),
            F.col("received_at").alias(f"{prefix}_at"), F.get_json_object("body", "$.status").alias(f"{prefix}_status"),
        )  # fmt: skip

    sent, answered = bronze("control", "sent"), bronze("ack", "answer")
    matching = F.expr(f"""sent_device = answer_device AND sent_id = answer_id AND answer_at >= sent_at
        AND answer_at <= sent_at + INTERVAL {answer_ms} MILLISECONDS""")
    return sent.join(answered, matching, "leftOuter")


def write(rows: DataFrame, table: Path, checkpoint: Path, every_ms: int) -> StreamingQuery:
    """Write rows with Delta's sink, in batches of an interval."""
    writer = rows.writeStream.format("delta").outputMode("append").option("checkpointLocation", str(checkpoint))
    with changed_settings(rows.sparkSession, _SPARKS_OWN):
        return writer.trigger(processingTime=f"{every_ms} milliseconds").start(str(table))


class SessionOfDevice(StatefulProcessor):
    """Processor of one device's messages: birth, will and silence end its session.

    Args:
        silence_ms: time without a message after which a session ends, milliseconds.
    """

    def __init__(self, silence_ms: int) -> None:
        self.silence_ms = silence_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self.handle = handle
        self.session = handle.getValueState("session", "started_ms long, last_seen_ms long, messages long, timer long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fold a device's messages of a micro-batch."""
        state = self.session.get()
        session, timer = (list(state[:3]), state[3]) if state else (None, None)
        ended: list[Any] = []
        for row in sorted(rows, key=lambda row: row.at_ms):
            at = row.at_ms
            if session and at - session[1] > self.silence_ms:
                ended.append(_OutputRow(key[0], session[0], session[1], "silence", session[2]))
                session = None
            if session and row.kind in ("birth", "death"):
                ended.append(_OutputRow(key[0], session[0], at, "birth" if row.kind == "birth" else "will", session[2]))
                session = None
            if row.kind != "death":
                session = [session[0], at, session[2] + 1] if session else [at, at, 1]
        if timer is not None:
            self.handle.deleteTimer(timer)
        if session is None:
            self.session.clear()
        else:
            due = session[1] + self.silence_ms
            self.handle.registerTimer(due)
            self.session.update((*session, due))
        yield from ended

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """End a silent session."""
        state = self.session.get()
        self.session.clear()
        if state:
            yield _OutputRow(key[0], state[0], state[1], "silence", state[2])

    def close(self) -> None:
        """Do nothing: no resources are open."""
