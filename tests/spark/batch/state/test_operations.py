"""Whatever is done to the state between any two batches, the verdicts are those of one run over everything."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from batch.common.progress import Say
from batch.state import snapshot
from batch.state.handoff import discard, switch
from batch.state.inspect import inspect
from batch.state.operations import StateOperation, bootstrap, migrate, repartition, repartition_anew, rescale, rollback
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import checkpoint_of
from fleetpulse.io.home.checkpoint_ownership import marked_with
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import find_snapshot
from fleetpulse.reports.agreement import defined, emitted
from tests.support.histories.streams import DEPLOYMENT, history, judge, land

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # eight generations, one after another


@pytest.fixture
def said() -> list[str]:
    """Return what the verbs of one test report, line by line."""
    return []


def _verbs(say: Say) -> Iterator[Callable[[StateOperation], object]]:
    """Yield what is done after each part of the history; a snapshot that is gone back to later is among it."""
    yield lambda work: rescale(work, 5)
    yield lambda work: snapshot.take(work.spark, work.home, None, say)
    yield lambda work: repartition(work, 3)
    yield lambda work: migrate(work, 4)
    yield lambda work: bootstrap(work, find_snapshot(work.home))
    yield lambda work: repartition_anew(work, 4)
    yield rollback
    yield lambda work: rollback(work, 1)


def test_the_state_is_moved_about_between_batches_and_the_verdicts_are_those_of_one_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("batch.common.progress.EVERY_S", 0)
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    rows, random, verbs = history(11), Random(11), list(_verbs(said.append))
    edges = [0, *sorted(random.sample(range(1, len(rows)), len(verbs))), len(rows)]
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        land(home, rows[begin:end], number)
        judge(spark, home)
        if number <= len(verbs):
            verbs[number - 1](StateOperation(spark, home, said.append))
    assert emitted(home) == defined(rows, DEPLOYMENT)
    assert home.generation().number == 8
    assert (home.key_groups(), home.generation().form, position_after(home.checkpoint).partitions) == (8, 5, 2)
    assert "comparing: equal so far are group, waiting, of group, waiting, digests, timers" in said
    ids = tables.query(home, "SELECT device_id, life, transition_no FROM transitions")
    assert len({tuple(one.values()) for one in ids}) == len(ids)


def test_a_generation_that_is_held_gets_the_work_only_while_the_one_that_runs_stands_still(
    spark: SparkSession, tmp_path: Path, said: list[str]
) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    rows = history(12)
    thirds = [len(rows) * part // 3 for part in range(4)]
    say = said.append
    work = StateOperation(spark, home, say, holds=True)
    land(home, rows[: thirds[1]], 1)
    judge(spark, home)
    first = migrate(work, 4)
    assert first is not None and home.generation().number == 1
    assert marked_with(home.checkpoint) == marked_with(checkpoint_of(home.lifecycle, 2)) == home.id() is not None
    looked = inspect(spark, home, None)
    assert looked["next"]["held"] == {"generation": 2, "made_by": "migrate"} and looked["next"]["versions"] == 0
    assert looked["watermark_ms"] == looked["stand"]["newest_ms"] - 1 and looked["files"]["kinds"]["zip"] > 0
    assert sum(group["devices"] for group in looked["groups"]) > 0
    with pytest.raises(FleetError, match=r"generation 2, made by migrate, is held.*state switch 2"):
        rescale(work, 5)
    land(home, rows[thirds[1] : thirds[2]], 2)
    judge(spark, home)
    with pytest.raises(FleetError, match=r"generation 1 is at batch \d+ now.*state discard 2"):
        switch(home, 2, say)
    discard(home, 2, say)
    with pytest.raises(FleetError, match="generation 2 is not held: it is discarded; none is held"):
        switch(home, 2, say)
    held = rescale(work, 5)
    assert held is not None and held.number == 3 and home.key_groups() == 8
    switch(home, 3, say, dry=True)
    assert home.generation().number == 1
    switch(home, 3, say)
    switch(home, 3, say)
    assert said[-1] == "generation 3 is already current" and home.key_groups() == 5
    land(home, rows[thirds[2] :], 3)
    judge(spark, home)
    assert emitted(home) == defined(rows, DEPLOYMENT)
