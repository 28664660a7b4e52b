"""Whoever waits for Spark is told how many tasks it has done, while it works."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from batch.common.progress import Steps, tasks_of, watched

pytestmark = pytest.mark.spark


def test_while_a_job_runs_it_is_said_how_many_of_its_tasks_are_done(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch.common.progress._SILENT_S", 0)
    monkeypatch.setattr("batch.common.progress._LOOK_S", 0.05)
    heard, said = tmp_path / "heard", list[str]()

    def say(words: str) -> None:
        said.append(words)
        if "1 of 3 tasks" in words:
            heard.touch()

    def kept_back(place: int, rows: Iterable[int]) -> Iterable[int]:
        """End all tasks but the first only when the first has been told of, or nobody tells."""
        limit = time.monotonic() + 60
        while place and not heard.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        return rows

    steps = Steps(say)
    with watched(spark, steps) as watcher:
        steps("counting")
        assert spark.sparkContext.parallelize(range(9), 3).mapPartitionsWithIndex(kept_back).count() == 9
    assert "counting: 1 of 3 tasks of Spark's present stage done" in said
    assert not watcher.is_alive() and tasks_of(spark) is None
