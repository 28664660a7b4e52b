"""Backtests on Spark: the results equal those of a single process and of the definition."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from batch import backtest as job
from batch.backtest import on_spark, replay_here
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.io.tables.bronze_slices import pieces_of, slices_of
from tests.support.histories.backtests import by_hand, changes_of, sides
from tests.support.histories.streams import history
from tests.support.homes.homes import landed_home

pytestmark = pytest.mark.spark
DEPLOYMENT = Deployment(30_000, 300_000, 20_000)


@pytest.mark.parametrize("from_s", [None, 3_500])
def test_a_backtest_on_spark_equals_one_in_a_single_process(spark: SparkSession, tmp_path: Path, from_s: int | None) -> None:
    rows = history(7)
    home = landed_home(tmp_path / "home", rows, DEPLOYMENT, (len(rows) // 3, len(rows) // 2))
    policy = parse_policy({"rules": {"timeout": "2m", "degraded": {"errors": 2}}})
    pieces = pieces_of(home)
    from_ms = None if from_s is None else rows[0].received_at_ms + from_s * 1000
    question = job._question(home, policy, pieces, from_ms, None)
    single = replay_here(question, slices_of(pieces))
    parallel = on_spark(spark, question, slices_of(pieces, 200), 5)
    assert parallel.changed.equals(single.changed)
    assert parallel.days == single.days
    assert (parallel.others, parallel.frontier_ms) == (single.others, single.frontier_ms)
    assert changes_of(parallel) == by_hand(*sides(rows, question))
    assert parallel.changed.num_rows > 50
