"""Query of the stream ``sessions``: its rows equal the definition across batches, restarts and a crash."""

from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.runner import start_stream
from tests.support.histories.histories import tick
from tests.support.histories.sessions import connections, defined, written
from tests.support.histories.streams import DEPLOYMENT
from tests.support.homes.homes import empty, land

pytestmark = pytest.mark.spark
OPTIONS = StreamOptions((StreamName.SESSIONS,), every_ms=0, silence_ms=20_000)


def _run(spark: SparkSession, home: Home) -> None:
    query = start_stream(spark, home, StreamName.SESSIONS, OPTIONS)
    assert query.awaitTermination(300)


def test_the_sessions_equal_the_definition_across_a_restart_and_a_crash_between_two_commits(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, home = connections(Random(4)), empty(tmp_path / "home", DEPLOYMENT)
    assert len(rows) > 100 and len({one.device_id for one in rows}) > 1
    rows.append(tick(10_000))
    third = len(rows) // 3
    parts = [rows[:third], rows[third : 2 * third], rows[2 * third :]]
    for number, part in enumerate(parts[:2], 1):
        land(home, part, number)
        _run(spark, home)
    assert written(home) <= defined(rows, OPTIONS.silence_ms)
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    for path in (checkpoint / "commits").glob(f"*{committed_batches(checkpoint)[-1]}*"):
        path.unlink()  # as if the process had ended after the commit of the table
    land(home, parts[2], 3)
    _run(spark, home)
    assert written(home) == defined(rows, OPTIONS.silence_ms)
