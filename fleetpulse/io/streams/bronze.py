"""Bronze as a streaming DataFrame of Delta's own source, for queries that Spark runs without Python.

Rule 1: rows come in the order of ``received_at``, so a watermark `WATERMARK_DELAY_MS` behind it drops no row,
however batches are cut.
Rule 2: rows that every fleet has, such as ticks, must reach the watermark. A filter of rows therefore follows
the watermark, and must not be moved before it: see `of_kinds`.
Rule 3: the source reads appended rows only; maintenance rewrites files without changing rows.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from fleetpulse.io.checkpoints.checkpoint import WATERMARK_DELAY_MS

_BATCH_BYTES: Final = "256m"  # of bronze files in one batch: about two million rows


def bronze_stream(spark: SparkSession, messages: Path, begin: int) -> DataFrame:
    """Return bronze from a version on, as a streaming DataFrame.

    Args:
        spark: Spark session.
        messages: folder of the table of messages.
        begin: first version to read with a new checkpoint; ignored with an existing one.
    """
    return (
        spark.readStream.format("delta")
        .option("startingVersion", begin)
        .option("skipChangeCommits", "true")
        .option("maxBytesPerTrigger", _BATCH_BYTES)
        .load(str(messages))
    )


def by_receipt(rows: DataFrame) -> DataFrame:
    """Set the watermark of rows of bronze to ``received_at``."""
    return rows.withWatermark("received_at", f"{WATERMARK_DELAY_MS} milliseconds")


def of_kinds(rows: DataFrame, kinds: Iterable[str], columns: Iterable[str | Column], also: Column | bool = True) -> DataFrame:
    """Select the rows of some kinds after the watermark on ``received_at``.

    Spark moves each condition before the watermark that does not read the watermark's column, even one of a later
    filter. This filter is a single condition that reads it. A query must not filter the result further. (A generator
    would stay in its place, too, but its result has no watermark.)

    Args:
        rows: rows with a watermark on ``received_at``.
        kinds: kinds to select.
        columns: columns of the result.
        also: a further condition of the rows.
    """
    return behind_watermark(rows, F.col("kind").isin([*kinds]) & also).select(*columns)


def behind_watermark(rows: DataFrame, condition: Column) -> DataFrame:
    """Select rows by a condition that Spark does not move before the watermark, see `of_kinds`.

    Args:
        rows: rows with a watermark on ``received_at``.
        condition: condition of the rows.
    """
    return rows.where(F.when(condition, F.col("received_at")).isNotNull())
