"""Query of the stream ``sessions``: its rows equal the definition across batches, restarts, crashes and rebuilds."""

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.io.checkpoints.checkpoint import committed_batches, partitions_of
from fleetpulse.io.checkpoints.generations import Generation, Generations, save_generations
from fleetpulse.io.checkpoints.stream_rebuild import read_rebuild, set_aside
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import changed_settings
from fleetpulse.io.streams.rebuilds import rebuild_stream
from fleetpulse.io.streams.runner import start_stream
from fleetpulse.io.streams.sessions import fixed_key_groups
from tests.support.histories.histories import tick
from tests.support.histories.sessions import connections, defined, written
from tests.support.histories.streams import DEPLOYMENT
from tests.support.homes.homes import empty, land

pytestmark = pytest.mark.spark
OPTIONS = StreamOptions((StreamName.SESSIONS,), every_ms=0, silence_ms=20_000)


def _run(spark: SparkSession, home: Home) -> None:
    query = start_stream(spark, home, StreamName.SESSIONS, OPTIONS)
    assert query.awaitTermination(300)


def _with_key_groups(home: Home, key_groups: int) -> None:
    """Record a generation of the lifecycle job with another number of key groups, as a rescale does."""
    found = replace(home.generation(), number=2, key_groups=key_groups)
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    save_generations(home.lifecycle, Generations(2, {1: replace(Generation.first(8), status="retired"), 2: found}))


def test_the_sessions_equal_the_definition_across_a_crash_a_move_a_repartition_a_rebuild_and_a_time_off(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, home = connections(Random(4)), empty(tmp_path / "home", DEPLOYMENT)
    assert len(rows) > 100 and len({one.device_id for one in rows}) > 1
    rows.append(tick(10_000))
    edges = [len(rows) * part // 5 for part in range(6)]
    parts = [rows[begin:end] for begin, end in pairwise(edges)]
    for number, part in enumerate(parts[:2], 1):
        land(home, part, number)
        _run(spark, home)
    assert written(home) <= defined(rows, OPTIONS.silence_ms)
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    for path in (checkpoint / "commits").glob(f"*{committed_batches(checkpoint)[-1]}*"):
        path.unlink()  # as if the process had ended after the commit of the table
    home = Home(Path(shutil.move(home.path, tmp_path / "restored")))
    checkpoint, key_groups = home.stream_checkpoint(StreamName.SESSIONS), home.key_groups()
    partitions = partitions_of(checkpoint)
    _with_key_groups(home, key_groups + 3)
    with changed_settings(spark, {"spark.sql.shuffle.partitions": "3"}):  # as after a repartition of the lifecycle job
        land(home, parts[2], 3)
        _run(spark, home)
        assert (fixed_key_groups(checkpoint, 99), partitions_of(checkpoint)) == (key_groups, partitions)
        shutil.rmtree(checkpoint / "state")  # damaged: the stream cannot go on
        assert rebuild_stream(home, StreamName.SESSIONS).begin < 4
        land(home, parts[3], 4)
        _run(spark, home)
        assert read_rebuild(checkpoint), "some rows are read twice"
        assert (fixed_key_groups(checkpoint, 99), partitions_of(checkpoint)) == (key_groups + 3, 3)
    assert written(home) <= defined(rows, OPTIONS.silence_ms)
    set_aside(checkpoint)  # the stream is switched off, rows land, and it is switched on again
    land(home, parts[4], 5)
    _run(spark, home)
    assert written(home) == defined(rows, OPTIONS.silence_ms)
