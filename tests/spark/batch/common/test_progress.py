"""Progress of Spark jobs: completed tasks are reported while a job runs."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from batch.common.progress import Steps, tasks_of, watched

pytestmark = pytest.mark.spark


def test_a_running_job_reports_its_completed_tasks(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch.common.progress._SILENT_S", 0)
    monkeypatch.setattr("batch.common.progress._POLL_S", 0.05)
    reported, messages = tmp_path / "reported", list[str]()

    def report(message: str) -> None:
        messages.append(message)
        if "1 of 3 tasks" in message:
            reported.touch()

    def delayed(partition: int, rows: Iterable[int]) -> Iterable[int]:
        """Delay all tasks but the first until the first is reported, or for at most 60 s."""
        limit = time.monotonic() + 60
        while partition and not reported.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        return rows

    steps = Steps(report)
    with watched(spark, steps) as watcher:
        steps("counting")
        assert spark.sparkContext.parallelize(range(9), 3).mapPartitionsWithIndex(delayed).count() == 9
    assert "counting: 1 of 3 tasks of Spark's present stage done" in messages
    assert not watcher.is_alive() and tasks_of(spark) is None
