"""Whatever is done to the state between any two batches, the verdicts are those of one run over everything."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from batch import snapshot
from batch.generation import Say
from batch.verbs import Work, bootstrap, migrate, repartition, repartition_anew, rescale, rollback
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io import delta
from fleetpulse.io.checkpoint import stand
from fleetpulse.io.home import Home
from fleetpulse.io.lifecycle_query import start
from fleetpulse.io.snapshot_table import find_snapshot
from fleetpulse.ops.agreement import defined, told
from tests.spark.test_stream import DEPLOYMENT, history, land

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # eight generations, one after another
SAID: list[str] = []
SAY: Say = SAID.append


def _verbs() -> Iterator[Callable[[Work], object]]:
    """Yield what is done after each part of the history; a snapshot that is gone back to later is among it."""
    yield lambda work: rescale(work, 5)
    yield lambda work: snapshot.take(work.spark, work.home, None, SAY)
    yield lambda work: repartition(work, 3)
    yield lambda work: migrate(work, 3)
    yield lambda work: bootstrap(work, find_snapshot(work.home))
    yield lambda work: repartition_anew(work, 4)
    yield rollback
    yield lambda work: rollback(work, 1)


def judge(spark: SparkSession, home: Home) -> None:
    query = start(spark, home, None)
    try:
        assert query.awaitTermination(300)
        assert sum(one["numRowsDroppedByWatermark"] for batch in query.recentProgress for one in batch["stateOperators"]) == 0
    finally:
        query.stop()


def test_the_state_is_moved_about_between_batches_and_the_verdicts_are_those_of_one_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    delta.create(home, MESSAGES)
    rows, random, verbs = history(11), Random(11), list(_verbs())
    edges = [0, *sorted(random.sample(range(1, len(rows)), len(verbs))), len(rows)]
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        land(home, rows[begin:end], number)
        judge(spark, home)
        if number <= len(verbs):
            verbs[number - 1](Work(spark, home, SAY))
    assert told(home) == defined(rows, DEPLOYMENT)
    assert home.generation().number == 8
    assert (home.key_groups(), home.generation().form, stand(home.checkpoint).partitions) == (8, 4, 2)
    ids = delta.query(home, "SELECT device_id, life, transition_no FROM transitions")
    assert len({tuple(one.values()) for one in ids}) == len(ids)
