"""Contenders of the lifecycle benchmark on Spark: all find the same transitions.

PyFlink needs a separate environment, and is not tested here.
"""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bench.lifecycle.compare import difference, triggers
from bench.lifecycle.contenders import ON_SPARK, OURS, start
from bench.lifecycle.generate import Fleet, Input, prepare

pytestmark = [pytest.mark.spark, pytest.mark.extended]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return prepare(Fleet(devices=60, messages=3), tmp_path_factory.mktemp("input"))


def _run(name: str, spark: SparkSession, source: Input, folder: Path) -> Path:
    query = start(ON_SPARK[name], spark, source, folder)
    try:
        query.processAllAvailable()
        dropped = [one["numRowsDroppedByWatermark"] for batch in query.recentProgress for one in batch["stateOperators"]]
        batches = [batch["numInputRows"] for batch in query.recentProgress if batch["numInputRows"]]
    finally:
        query.stop()
    assert sum(dropped) == 0
    assert len(batches) == len(source.counts), "each batch must be one version"
    if name != OURS:
        assert tuple(batches) == source.counts
    return folder / "out"


def test_all_contenders_on_spark_find_the_same_transitions(spark: SparkSession, source: Input, tmp_path: Path) -> None:
    found = {name: _run(name, spark, source, tmp_path / name) for name in ON_SPARK}
    assert difference(found, source.judged_to_ms) is None
    assert triggers(OURS, found[OURS], source.judged_to_ms) >= {"signal", "silence", "errors", "recovered"}
