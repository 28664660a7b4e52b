"""Appends without deltalake: Spark reads the rows, statistics, checkpoints and transaction versions."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import QUARANTINE
from fleetpulse.io.delta.appender import CHECKPOINT_EVERY, Appender
from fleetpulse.io.tables import tables
from tests.support.homes.homes import empty

pytestmark = pytest.mark.spark
_AT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
_TOPICS = ("plain", "of\u2028two\x85lines", "\U00020000", "x" * 10_000, None)


def test_spark_reads_appended_rows(spark: SparkSession, tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    tables.create(home, QUARANTINE)
    appender, schema = Appender(home.table(QUARANTINE.name)), tables.arrow_schema(QUARANTINE)
    instants = [_AT + timedelta(microseconds=number) for number in range(CHECKPOINT_EVERY + 5)]
    for number, at in enumerate(instants):
        row = {"received_at": at, "topic": _TOPICS[number % len(_TOPICS)], "payload": b"\xff\x00"}
        appender.append(pa.Table.from_pylist([row], schema), {"landing": number + 1})
    table = spark.read.format("delta").load(str(home.table(QUARANTINE.name)))
    read = table.select(fn.unix_micros("received_at").alias("at"), "topic", "payload").orderBy("at").collect()
    assert [row.at for row in read] == [int((at - _AT).microseconds) + read[0].at for at in instants]
    assert [row.topic for row in read] == [_TOPICS[number % len(_TOPICS)] for number in range(len(instants))]
    assert {bytes(row.payload) for row in read} == {b"\xff\x00"}
    for at in (instants[0], instants[7], instants[-1]):
        assert table.where(fn.col("received_at") == fn.lit(at)).count() == 1, "its file is not skipped"
    for topic in _TOPICS[:-1]:
        assert table.where(fn.col("topic") == fn.lit(topic)).count() == len(instants) // len(_TOPICS)
    spark.createDataFrame([], table.schema).write.format("delta").mode("append").save(str(home.table(QUARANTINE.name)))
    appender.append(pa.Table.from_pylist([{"topic": "behind Spark's"}], schema), {"landing": 1_000})
    assert table.count() == len(instants) + 1
    assert tables.landed(home, QUARANTINE, "landing") == 1_000
