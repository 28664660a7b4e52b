"""Vitals: windows equal a batch computation in DuckDB, however bronze is cut into batches."""

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.streams.names import StreamName, StreamRestart
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.core.streams.tables import VITAL_ALARMS
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.runner import StreamRunner, start_stream
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, positioned, row, tick
from tests.support.histories.streams import land
from tests.support.histories.vital_sql import require_equal_windows, windows_by_sql, windows_of
from tests.support.wait import await_that

pytestmark = pytest.mark.spark
DEPLOYMENT = Deployment(allowed_lateness_ms=60_000, max_clock_lead_ms=30_000, max_backlog_ms=1_200_000)
ONCE = StreamOptions((StreamName.VITALS,), every_ms=0)
FIRST = {"battery": {"window": "2m"}, "load": {"window": "3m", "slide": "1m", "above": -100, "for": "5m"}}
SECOND = {"battery": {"window": "5m"}, "heat": {"window": "2m"}}
CHANGE_S = 2_000  # effective_from of the second policy
END_S = 4_000
VALUES = (3.1, 2.9, 3.3000000000000003, -0.0, 0.1, 1e-9, -17, 12_345_678_901, 1e300, None, "3.2", True, [1], {"mean": 2})


def _policy(received_s: float, vitals: dict[str, Any], effective_from_s: float) -> Row:
    stored = parse_policy({"vitals": vitals}).normalised()
    return row(received_s, "fleet/_/_/policy", policy=stored, effective_from_s=effective_from_s)


def _history(seed: int) -> list[Row]:
    """Messages with late and repeated ones, wrong clocks, two sites, a silent time, and two policies."""
    random = Random(seed)
    rows = [_policy(0, FIRST, -3_600), _policy(CHANGE_S - 400, SECOND, CHANGE_S), _policy(900, FIRST, 901)]
    for at in range(0, END_S, 7):
        if 2_500 < at < 3_100:
            rows.append(tick(at))
            continue
        received = at + random.choice([0, 0, 1, 20, 59.999, 60, 75, 400, -10, -29, -100, 1_300])
        received = max(received, 1)
        metrics = {name: random.choice(VALUES) for name in random.sample(("battery", "load", "heat", "other"), 3)}
        payload: dict[str, Any] = {"ts_s": at, "metrics": metrics}
        payload |= random.choice([{}, {"seq": at}, {"seq": 5, "boot": "b"}])
        if random.random() < 0.1:
            payload = {"ts": "soon", "metrics": metrics}
        topic = f"fleet/{random.choice('nns')}/{random.choice('abc')}/{random.choice(['telemetry', 'birth', 'error'])}"
        rows.append(row(received, topic, **payload))
        if random.random() < 0.3:
            rows.append(row(received + random.choice([0, 3, 200]), topic, **payload))
        if random.random() < 0.05:
            rows.append(row(at, f"{random.choice('abc')}/death"))
    return positioned(rows)


def _home(path: Path) -> Home:
    home = Home(path)
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    return home


def _run(spark: SparkSession, home: Home) -> StreamingQuery:
    """Process the rows of bronze, and start again when a policy asks for it."""
    for _ in range(5):
        query = start_stream(spark, home, StreamName.VITALS, ONCE)
        try:
            assert query.awaitTermination(300)
        except Exception as error:
            if StreamRestart.__name__ not in str(error):
                raise
            continue
        dropped = [one["numRowsDroppedByWatermark"] for each in query.recentProgress for one in each["stateOperators"]]
        assert not any(dropped)
        return query
    raise AssertionError("the query starts again without end")


def _forget_commit(home: Home) -> None:
    checkpoint = home.stream_checkpoint(StreamName.VITALS)
    (checkpoint / "commits" / str(committed_batches(checkpoint)[-1])).unlink()


def test_windows_equal_a_batch_computation_for_any_cuts(spark: SparkSession, tmp_path: Path) -> None:
    rows = _history(3)
    ticks = [tick(END_S + 3_600), tick(END_S + 3_601)]
    cuts = sorted(Random(3).sample(range(40, len(rows) - 40), 2))
    cut, whole = _home(tmp_path / "cut"), _home(tmp_path / "whole")
    edges = [0, *cuts, len(rows)]
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        land(cut, rows[begin:end], number)
        _run(spark, cut)
        if number == 2:
            _forget_commit(cut)  # as if the process had ended between the commit of the table and that of the checkpoint
    land(whole, rows, 1)
    _run(spark, whole)
    for number, last in enumerate(ticks, len(edges)):
        land(cut, [last], number)
        land(whole, [last], number)
        query = _run(spark, cut)
        _run(spark, whole)
    found = windows_of(cut)
    assert found == windows_of(whole)
    alarms = [tables.query(each, "SELECT * FROM vital_alarms ORDER BY ALL", tables=[VITAL_ALARMS.name]) for each in (cut, whole)]
    assert alarms[0] == alarms[1] and {one["device_id"] for one in alarms[0]} == {"a", "b", "c"}
    policies = [
        (START + 1, {"battery": (120_000, 120_000), "load": (180_000, 60_000)}),
        (START + CHANGE_S * 1000, {"battery": (300_000, 300_000), "heat": (120_000, 120_000)}),
    ]
    wanted = windows_by_sql(cut, policies, ticks[0].received_at_ms - DEPLOYMENT.allowed_lateness_ms)
    assert len(found) > 300
    require_equal_windows(found, wanted)
    assert {one["late"] for one in found} == {True, False}
    newest = query.lastProgress
    assert newest is not None
    assert [one["numRowsTotal"] for one in newest["stateOperators"]] == [0, 0], "closed windows leave the state"


def _await_batch(runner: StreamRunner, batch: int) -> None:
    def reached() -> bool:
        runner.check()
        return runner.status()["vitals"]["batch"] == batch

    await_that(reached, what=f"batch {batch}")


def test_a_new_policy_starts_the_query_again_before_the_batch_that_it_counts_for(spark: SparkSession, tmp_path: Path) -> None:
    home = _home(tmp_path / "home")
    land(home, [_policy(0, FIRST, -60), tick(1)], 1)
    runner = StreamRunner(spark, home, StreamOptions((StreamName.VITALS,), every_ms=200))
    later = row(20, "fleet/n/a/telemetry", ts_s=20, metrics={"heat": 7})
    try:
        _await_batch(runner, 0)
        land(home, positioned([_policy(10, SECOND, 10), later, tick(400)]), 2)
        _await_batch(runner, 1)
        land(home, [tick(401)], 3)
        _await_batch(runner, 2)
        assert runner.status()["vitals"]["failures"] == 0
    finally:
        runner.stop()
    assert [(one["metric"], one["last"], one["end_ms"] - one["start_ms"]) for one in windows_of(home)] == [("heat", 7.0, 120_000)]
