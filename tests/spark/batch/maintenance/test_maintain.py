"""Maintenance between batches: verdicts stay, and both Delta writers read each other's checkpoints."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from batch.maintenance.maintain import maintain
from batch.maintenance.plan import Keep
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Origin, Row, hash64
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables import tables
from fleetpulse.reports.operations.agreement import defined, emitted
from streaming.simulator.scenario import Scenario, scenario_policy, simulate
from tests.support.histories.histories import START, row, tick

pytestmark = [pytest.mark.spark, pytest.mark.extended]
DEPLOYMENT = Deployment(30_000, 300_000)
KEEP = Keep(None, None, None, None, None, None, None, None, replaced_ms=0)
VERSIONS, RUNS = 48, 4
VERSIONS_WHILE_RUNNING = 10  # versions that land while the job runs, one batch each: enough commits of judgements for maintenance


def _history() -> list[Row]:
    scenario = Scenario(11, 16, START, history_ms=150 * 60_000)  # over a midnight
    sent = takewhile(lambda one: one.received_at_ms < START + scenario.history_ms, simulate(scenario))
    decoded = [decode(one.topic, one.payload, one.received_at_ms, Origin.REPLAY) for one in sent]
    policy = parse_policy(scenario_policy()).normalised()
    internal = [row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-3600), tick(9100)]
    return sorted([*(one for one in decoded if isinstance(one, Row)), *internal], key=lambda one: one.received_at_ms)


def _land(home: Home, rows: list[Row], number: int) -> None:
    arrival = {"origin": "replay", "bridge": "b", "segment": number}
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, table), "test", number)


def _judge(
    spark: SparkSession, home: Home, keep: Keep | None = None, appends: Sequence[Callable[[], None]] = ()
) -> Counter[tuple[str, str]]:
    """Run the job on the present rows and on those of each append; return the files that maintenance changed, by table."""
    done: Counter[tuple[str, str]] = Counter()
    query = start(spark, home)
    try:
        query.processAllAvailable()
        for append in appends:
            append()
            query.processAllAvailable()
        if keep is not None:  # the job continues with its earlier view of the table
            done = _maintain(home, keep)
            query.processAllAvailable()
        assert query.isActive, query.exception()
    finally:
        query.stop()
    return done


def _maintain(home: Home, keep: Keep) -> Counter[tuple[str, str]]:
    done: Counter[tuple[str, str]] = Counter()
    for step in maintain(home, keep, dry_run=False):
        done[step.table, step.did] += step.files
    return done


@pytest.mark.timeout(900)  # six starts of the query, also on a slow machine
def test_maintenance_between_any_two_batches_changes_no_verdict(spark: SparkSession, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    rows, random = _history(), Random(3)
    edges = [0, *sorted(random.sample(range(1, len(rows)), VERSIONS - 1)), len(rows)]
    done: Counter[tuple[str, str]] = Counter()
    appends: list[Callable[[], None]] = []
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        append = partial(_land, home, rows[begin:end], number)
        if number > VERSIONS - VERSIONS_WHILE_RUNNING:
            appends.append(append)
        else:
            append()
        if number % (VERSIONS // RUNS) == 0:
            done += _judge(spark, home, KEEP, appends)
            done += _maintain(home, KEEP)
    assert done[MESSAGES.name, "join"] >= VERSIONS // RUNS
    assert done[MESSAGES.name, "delete"] >= 2 * VERSIONS // RUNS
    assert done[JUDGEMENTS.name, "delete"] > 0, "files and old versions of the log"
    want = defined(rows, DEPLOYMENT)
    assert emitted(home) == want

    second = Home(tmp_path / "second")  # a new generation reads bronze from its first version
    shutil.copytree(home.path, second.path)
    shutil.rmtree(second.checkpoint.parent)
    shutil.rmtree(second.table(JUDGEMENTS.name))
    _judge(spark, second)
    assert emitted(second) == want

    _maintain(home, replace(KEEP, messages_ms=0))
    _land(home, [tick(9200)], VERSIONS + 1)
    _judge(spark, home)
    assert emitted(home) == defined([*rows, tick(9200)], DEPLOYMENT)
    for table in (JUDGEMENTS, MESSAGES):  # Spark and deltalake read the same rows, whichever of them wrote
        read = spark.read.format("delta").load(str(home.table(table.name)))
        assert read.count() == tables.query(home, f"SELECT count(*) AS n FROM {table.name}", tables=[table.name])[0]["n"]
