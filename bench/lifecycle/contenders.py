"""Contenders on Spark: the streaming table of each over one input, and its query.

Rule 1: a micro-batch is one version of the input table, for every contender.
Rule 2: all contenders share session, state store, checkpoint settings and trigger.
`Contender.build` holds the differences. The peers use Delta's sink, this project's job its own
sink.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from bench.lifecycle.generate import DEGRADED_WINDOW_MS, KINDS, LATENESS_MS, Input
from bench.peers import spark_python
from bench.peers.python_fold import Rules
from fleetpulse.core import policy
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.generations import Generation
from fleetpulse.io.lifecycle.query import judgement_stream, judgement_writer, start_with_retries
from fleetpulse.planning import model

REFERENCE: Final = "scala-flat-map-groups"
OURS: Final = "ours"
_WITH: Final = "@"  # between the name of a contender and its number of cores
_CORES: Final = 2
_AT_ONCE: Final = "0 seconds"
_MAX_CLOCK_LEAD_MS: Final = 300_000


@dataclass(frozen=True, slots=True)
class Contender:
    """Implementation of the job on Spark.

    Attributes:
        name: name in the table and in JSON.
        build: function that builds the streaming table of an input; its last argument is the folder
            of the run.
        encoding: encoding of the state. Spark's older operators do not support avro, the default
            here; unsaferow is cheaper for them than avro would be.
    """

    name: str
    build: Callable[[SparkSession, Input, Path], DataFrame]
    encoding: str = "avro"


def rules(source: Input) -> Rules:
    """Return the rules for the peers, equal to the policy in the input's first row."""
    defaults = policy.Rules()
    return Rules(
        LATENESS_MS,
        source.fleet.timeout_ms,
        DEGRADED_WINDOW_MS,
        defaults.flagged_window_ms,
        defaults.flagged_hold_ms,
    )


def named(contender: str, cores: int) -> str:
    """Return the name of a contender that runs on another number of cores than the usual two."""
    return f"{contender}{_WITH}{cores}"


def split_name(name: str) -> tuple[str, int | None]:
    """Return the name of a contender, and its number of cores if `named` added it."""
    contender, _, cores = name.partition(_WITH)
    return contender, int(cores) if cores else None


def key_groups(devices: int, cores: int = _CORES) -> int:
    """Return the number of key groups that `./fleet plan` advises for a partition per core."""
    return model.key_groups(devices, cores)


def messages(spark: SparkSession, source: Input) -> DataFrame:
    """Return the peers' messages, in the columns of the Scala peers.

    The watermark is at the frontier.
    """
    rows = (
        spark.readStream.format("delta")
        .option("startingVersion", "0")
        .option("maxFilesPerTrigger", str(source.fleet.files))
        .load(str(source.path))
        .withWatermark("received_at", f"{LATENESS_MS} milliseconds")
    )
    return rows.where(F.col("kind").isin(*KINDS)).select(
        F.col("device_id").alias("deviceId"),
        F.unix_millis("event_time").alias("eventMs"),
        F.unix_millis("received_at").alias("receivedMs"),
        "boot",
        "seq",
        F.coalesce("code", F.lit("")).alias("code"),
        "received_at",  # carries the watermark to the operator
    )


def _job(spark: SparkSession, source: Input, place: Path) -> DataFrame:
    deployment = Deployment(LATENESS_MS, _MAX_CLOCK_LEAD_MS)
    generation = Generation.first(key_groups(source.fleet.devices, spark.sparkContext.defaultParallelism))
    return judgement_stream(spark, source.path, deployment, generation, max_rows=1, table=place / "out")


def _scala(entry: str) -> Callable[[SparkSession, Input, Path], DataFrame]:
    def build(spark: SparkSession, source: Input, _: Path) -> DataFrame:
        jvm: Any = spark._jvm  # noqa: SLF001 - pyspark has no public access to the JVM
        jobs = jvm.fleetpulse.bench.Jobs
        found = getattr(jobs, entry)(messages(spark, source)._jdf, jobs.rules(*rules(source)))  # noqa: SLF001
        return DataFrame(found, spark)

    return build


def _python(entry: Callable[[DataFrame, Rules], DataFrame]) -> Callable[[SparkSession, Input, Path], DataFrame]:
    return lambda spark, source, _: entry(messages(spark, source), rules(source))


ON_SPARK: Final = {
    contender.name: contender
    for contender in (
        Contender(OURS, _job),
        Contender(REFERENCE, _scala("flatMapGroups"), encoding="unsaferow"),
        Contender("scala-transform-with-state", _scala("transformWithState")),
        Contender("python-transform-with-state", _python(spark_python.transform_with_state)),
        Contender("python-apply-in-pandas", _python(spark_python.apply_in_pandas), encoding="unsaferow"),
    )
}


def start(contender: Contender, spark: SparkSession, source: Input, place: Path) -> StreamingQuery:
    """Start a contender's query; it writes to ``place/out`` and ``place/checkpoint``."""
    spark.conf.set("spark.sql.streaming.stateStore.encodingFormat", contender.encoding)
    rows = contender.build(spark, source, place)
    if contender.name == OURS:
        return start_ours(rows, place)
    writer = rows.writeStream.format("delta").option("checkpointLocation", str(place / "checkpoint")).outputMode("append")
    return writer.trigger(processingTime=_AT_ONCE).start(str(place / "out"))


def start_ours(rows: DataFrame, place: Path) -> StreamingQuery:
    """Start this project's query, see `start`; batches follow without a pause."""
    writer = judgement_writer(rows, place / "out", place / "checkpoint", 1).trigger(processingTime=_AT_ONCE)
    return start_with_retries(writer.start, bounded=True)  # all input is there: the first batch follows at once
