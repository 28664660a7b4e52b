"""Vitals: metrics of devices over windows of presence time, by Spark's window aggregation with a watermark.

Rule 1: the rows of the table are a function of bronze alone. Batches, restarts and replays do not change them.
Rule 2: a value is late if its presence time lies at or before its ``received_at`` less the allowed lateness. The
watermark is the newest ``received_at`` less the allowed lateness, so Spark drops no other value.
Rule 3: the plan of the state does not depend on the policy. Windows are computed from the policy, and are keys of
one aggregation, so that a checkpoint survives any change of the policy.
Rule 4: no column that the windows read differs between two rows with the same key of `_IDENTITY`, so it does not
matter which of two copies Spark keeps.

Source: ADR 47.
"""

from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import DoubleType, StructField, StructType

from fleetpulse.core.presence.presence_time import presence_sql
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import SIGNALS
from fleetpulse.core.streams.names import StreamName, StreamRestart
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.core.streams.tables import VITAL_ALARMS, VITALS
from fleetpulse.core.streams.vitals import Vitals, VitalsSpan
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.stream_rebuild import write_span
from fleetpulse.io.checkpoints.streams import versions_after
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import changed_settings
from fleetpulse.io.streams.bronze import behind_watermark, bronze_stream, of_kinds
from fleetpulse.io.streams.sink import TableSink
from fleetpulse.io.streams.vital_alarms import alarms_in
from fleetpulse.io.streams.vitals_policies import VitalsPolicies

GREATEST: Final = 2.0**53  # of a value: greater ones have no digit behind the point, and are skipped
_PARTS: Final = 1e12  # a sum counts whole numbers, and trillionths
_WATERMARK: Final = "spark.watermarkDelayMs"  # metadata with which Spark marks columns that its watermark removes from the state
_NO_WATERMARK: Final = {"comment": "time of receipt"}  # metadata that replace the mark
_IDENTITY: Final = ("device_id", "site", "kind", "at", "state_until", "boot", "seq", "digest", "content")
_STATE: Final = {"spark.sql.streaming.stateStore.encodingFormat": "unsaferow"}  # Spark has no other for aggregations
_KEYS: Final = ("device_id", "metric", "window_start", "window_end", "site", "late", "closed_at")


def start_query(spark: SparkSession, home: Home, options: StreamOptions, begin: int) -> StreamingQuery:
    """Start the query from its checkpoint, or at a version of bronze without one.

    Args:
        spark: Spark session.
        home: home of the tables and the checkpoint.
        options: interval of the batches.
        begin: version of bronze at which a new checkpoint begins.
    """
    checkpoint = home.stream_checkpoint(StreamName.VITALS)
    policies = VitalsPolicies(home, checkpoint)
    widths = [vital.window_ms for span in policies.spans for vital in span.vitals.values()]
    write_span(checkpoint, max(widths, default=0) + 2 * home.deployment().allowed_lateness_ms)  # late values wait as long again
    rows = vitals_rows(bronze_stream(spark, home.table(MESSAGES.name), begin), home.deployment(), policies.spans)
    writer = rows.writeStream.queryName(StreamName.VITALS).outputMode("append").option("checkpointLocation", str(checkpoint))
    writer = writer.foreachBatch(VitalsSink(home, checkpoint, policies))
    writer = writer.trigger(**options.trigger)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with changed_settings(spark, _STATE):
        return writer.start()


class VitalsSink(TableSink):
    """Sink of the windows and their alarms, which ends the query before a batch that has another policy.

    Args:
        home: home of the table.
        checkpoint: checkpoint of the query.
        policies: policies with which the query was started.
    """

    def __init__(self, home: Home, checkpoint: Path, policies: VitalsPolicies) -> None:
        super().__init__(home.table(VITALS.name), VITALS, checkpoint)
        self._home, self._policies, self._of_query = home, policies, checkpoint
        self._alarms = TableSink(home.table(VITAL_ALARMS.name), VITAL_ALARMS, checkpoint)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Append the windows that a batch closes, and then their alarms.

        Raises:
            StreamRestart: a policy with other vitals has landed, which may count for rows of the batch.
        """
        version = max(versions_after(self._of_query, batch_id))
        if self._policies.read_through(version) != self._policies.spans:
            raise StreamRestart(f"a policy with other vitals has landed up to version {version} of bronze")
        windows = self.rows_of(batch)
        self.append(windows, batch_id)
        self._alarms.append(alarms_in(self._home, windows, self._policies.spans), batch_id)


def vitals_rows(bronze: DataFrame, deployment: Deployment, spans: tuple[VitalsSpan, ...]) -> DataFrame:
    """Return the windows of metrics, with the columns of the table.

    Args:
        bronze: rows of bronze, as a streaming or a static DataFrame.
        deployment: allowed lateness, clock lead and backlog.
        spans: vitals of the policies, in order.
    """
    lateness_ms = deployment.allowed_lateness_ms
    at = F.expr(presence_sql(str(deployment.max_clock_lead_ms), str(deployment.max_backlog_ms)))
    timed = bronze.withColumn("at", at).withWatermark("received_at", f"{lateness_ms} milliseconds")
    columns = ("device_id", "site", "kind", "at", "boot", "seq", "digest", "received_at", "metrics")
    late = F.unix_millis("at") <= F.unix_millis("received_at") - lateness_ms
    signals = (
        of_kinds(timed, SIGNALS, columns, also=F.col("metrics").isNotNull())
        .withColumn("late", late)
        .withColumn("content", F.xxhash64("metrics"))
        .withColumn("values", F.from_json("metrics", _metrics(spans)))
        .withColumn("measured", _measured(spans))
    )
    until = F.when(F.col("late"), F.col("received_at")).otherwise(F.col("at"))
    received = F.col("received_at").alias("received_at", metadata=_NO_WATERMARK)  # Spark accepts one such column
    kept = [*(name for name in _IDENTITY if name != "state_until"), received, "late", "measured"]
    measured = behind_watermark(signals, F.col("measured").isNotNull())
    distinct = measured.select(*kept, _expiring(until, "state_until", lateness_ms)).dropDuplicates([*_IDENTITY])
    return _aggregated(_in_windows(distinct, lateness_ms))


def _expiring(instant: Column, name: str, lateness_ms: int) -> Column:
    """Name an instant, and mark it such that Spark removes it from its state when the watermark reaches it.

    Spark marks the column of ``withWatermark`` itself. It cannot follow an expression, and has only windows of one
    fixed width.
    """
    return instant.alias(name, metadata={_WATERMARK: lateness_ms})


def _metrics(spans: tuple[VitalsSpan, ...]) -> StructType:
    """Return the type of the metrics of a message; Spark reads a value that is no number as null."""
    return StructType([StructField(name, DoubleType()) for name in sorted({name for span in spans for name in span.vitals})])


def _measured(spans: tuple[VitalsSpan, ...]) -> Column:
    """Return the values of a message with their windows, by the policy in force at ``at``; null without vitals."""
    measured = F.lit(None).cast("array<struct<metric: string, width: bigint, slide: bigint, value: double>>")
    for span in spans:
        in_force = F.unix_millis("at") >= span.from_ms
        measured = F.when(in_force, _listed(span.vitals) if span.vitals else F.lit(None)).otherwise(measured)
    return measured


def _listed(vitals: Vitals) -> Column:
    return F.array(
        *(
            F.struct(
                F.lit(metric).alias("metric"),
                F.lit(vital.window_ms).cast("bigint").alias("width"),
                F.lit(vital.slide_ms).cast("bigint").alias("slide"),
                F.col("values")[metric].alias("value"),
            )
            for metric, vital in sorted(vitals.items())
        )
    )


def _in_windows(messages: DataFrame, lateness_ms: int) -> DataFrame:
    """Return each value once for each window that contains it."""
    kept = ("device_id", "site", "at", "seq", "received_at", "late")
    at_ms, received_ms = F.unix_millis("at"), F.unix_millis("received_at")
    valued = messages.select(*kept, F.inline("measured")).where(F.abs("value") <= GREATEST)  # NaN is greater
    overlapping = valued.select("*", F.explode(F.sequence(F.lit(0).cast("bigint"), F.expr("width div slide - 1"))).alias("nth"))
    start_ms = at_ms - F.pmod(at_ms, F.col("slide")) - F.col("nth") * F.col("slide")
    closed_ms = F.when(F.col("late"), received_ms - F.pmod(received_ms, F.col("slide")) + F.col("slide"))
    return (
        overlapping.withColumn("start_ms", start_ms)
        .withColumn("end_ms", F.expr("start_ms + width"))
        .select(
            "device_id",
            "metric",
            F.timestamp_millis("start_ms").alias("window_start"),
            F.timestamp_millis("end_ms").alias("window_end"),
            "site",
            "late",
            _expiring(F.timestamp_millis(F.coalesce(closed_ms, F.col("end_ms"))), "closed_at", lateness_ms),
            "at",
            F.coalesce("seq", F.lit(-1)).alias("seq"),
            (F.col("value") + 0.0).alias("value"),  # makes -0.0 to 0.0, of which min and max would return either
        )
    )


def _aggregated(values: DataFrame) -> DataFrame:
    """Return the figures of each window. Sums are those of whole numbers, so their order does not matter."""
    whole = F.col("value").cast("bigint")
    newest = F.max(F.struct("at", "seq", "value")).alias("newest")
    figures = values.groupBy(*_KEYS).agg(
        F.count(F.lit(1)).alias("count"),
        F.min("value").alias("min"),
        F.max("value").alias("max"),
        F.try_sum(whole).alias("wholes"),
        F.try_sum(F.rint((F.col("value") - whole) * _PARTS).cast("bigint")).alias("parts"),
        newest,
    )
    total = F.col("wholes").cast("double") + F.col("parts").cast("double") / _PARTS
    return figures.select(
        *_KEYS,
        "count",
        "min",
        "max",
        (total / F.col("count")).alias("mean"),
        F.col("newest.value").alias("last"),
        F.col("newest.at").alias("last_at"),
    )
