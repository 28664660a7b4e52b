"""State operations between batches: the verdicts are those of one run over all rows."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from batch.common.progress import ReportProgress
from batch.state import snapshot
from batch.state.handoff import discard, switch
from batch.state.inspect import inspect
from batch.state.operations import StateOperation, bootstrap, migrate, repartition, repartition_anew, rescale, rollback
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import checkpoint_of
from fleetpulse.io.home.checkpoint_ownership import marked_with
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import find_snapshot
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.form import IS_DEFAULT
from tests.support.histories.streams import DEPLOYMENT, history, judge, land
from tests.support.refusals import refused

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # eight generations, one after another
# A batch takes ten times as long on the small executors of tests/e2e/cluster: there, and in the default suite, few
# operations follow one batch.
IS_SHORT = IS_DEFAULT or "FLEET_SPARK_MASTER" in os.environ


@pytest.fixture
def lines() -> list[str]:
    """Return the lines that the operations of a test report."""
    return []


def _operations(report: ReportProgress) -> list[list[Callable[[StateOperation], object]]]:
    """Return the operations after each part of the history; a later one starts from the snapshot of an earlier one."""
    moves: list[Callable[[StateOperation], object]] = [
        lambda work: snapshot.take(work.spark, work.home, None, report),
        lambda work: repartition(work, 3),
        lambda work: migrate(work, 4),
        lambda work: bootstrap(work, find_snapshot(work.home)),
    ]
    if IS_SHORT:
        return [moves[1:3] if IS_DEFAULT else moves]
    further = [lambda work: repartition_anew(work, 4), rollback, lambda work: rollback(work, 1)]
    return [[lambda work: rescale(work, 5)], *([one] for one in (*moves, *further))]


def test_state_operations_between_batches_keep_the_verdicts_of_one_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr("batch.common.progress.EVERY_S", 0)
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    rows, random, after = history(11), Random(11), _operations(lines.append)
    edges = [0, *sorted(random.sample(range(1, len(rows)), len(after))), len(rows)]
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        land(home, rows[begin:end], number)
        judge(spark, home)
        for operation in after[number - 1] if number <= len(after) else ():
            operation(StateOperation(spark, home, lines.append))
    assert emitted(home) == defined(rows, DEPLOYMENT)
    assert home.generation().number == (3 if IS_DEFAULT else 4 if IS_SHORT else 8)
    if not IS_SHORT:
        assert (home.key_groups(), home.generation().form, position_after(home.checkpoint).partitions) == (8, 6, 2)
    assert "comparing: equal so far are group, waiting, of group, waiting, digests, timers" in lines
    ids = tables.query(home, "SELECT device_id, life, transition_no FROM transitions")
    assert len({tuple(one.values()) for one in ids}) == len(ids)


@pytest.mark.extended
def test_a_held_generation_becomes_current_only_if_the_current_one_has_not_advanced(
    spark: SparkSession, tmp_path: Path, lines: list[str]
) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    rows = history(12)
    thirds = [len(rows) * part // 3 for part in range(4)]
    report = lines.append
    work = StateOperation(spark, home, report, holds=True)
    land(home, rows[: thirds[1]], 1)
    judge(spark, home)
    first = migrate(work, 4)
    assert first is not None and home.generation().number == 1
    assert marked_with(home.checkpoint) == marked_with(checkpoint_of(home.lifecycle, 2)) == home.id() is not None
    inspected = inspect(spark, home, None)
    assert inspected["next"]["held"] == {"generation": 2, "made_by": "migrate"} and inspected["next"]["versions"] == 0
    assert inspected["watermark_ms"] == inspected["position"]["newest_ms"] - 1 and inspected["files"]["kinds"]["zip"] > 0
    assert sum(group["devices"] for group in inspected["groups"]) > 0
    with refused("generation-held", match=r"generation 2, made by migrate, is held.*state switch 2"):
        rescale(work, 5)
    land(home, rows[thirds[1] : thirds[2]], 2)
    judge(spark, home)
    with refused("generation-outdated", match=r"generation 1 is at batch \d+ now.*state discard 2"):
        switch(home, 2, report)
    discard(home, 2, report)
    with refused("generation-not-held", match="generation 2 is not held: it is discarded; none is held"):
        switch(home, 2, report)
    held = rescale(work, 5)
    assert held is not None and held.number == 3 and home.key_groups() == 8
    switch(home, 3, report, dry=True)
    assert home.generation().number == 1
    switch(home, 3, report)
    switch(home, 3, report)
    assert lines[-1] == "generation 3 is already current" and home.key_groups() == 5
    land(home, rows[thirds[2] :], 3)
    judge(spark, home)
    assert emitted(home) == defined(rows, DEPLOYMENT)
