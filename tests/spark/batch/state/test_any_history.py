"""Random histories on Spark: with state operations between batches, verdicts equal the definition."""

import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from batch.state import snapshot
from batch.state.operations import StateOperation, bootstrap, migrate, repartition, repartition_anew, rescale, rollback
from fleetpulse.columnar.codec.versions import WRITTEN_FORMS
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import find_snapshot
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.form import IS_LONG
from tests.support.histories.histories import any_internal_row, any_policy, any_signal, row, stamped_by_bridge
from tests.support.histories.streams import judge, land

pytestmark = [pytest.mark.spark, pytest.mark.extended, pytest.mark.timeout(900)]
EXAMPLES = 5 if IS_LONG else 2  # each has its own home, and several starts of the job
FEW_TRANSITIONS = 30


def _only_restarted(_: StateOperation) -> None:
    """Only stop and start the job."""


def _bootstrapped(work: StateOperation) -> None:
    snapshot.take(work.spark, work.home, None, work.report)
    bootstrap(work, find_snapshot(work.home))


def _rescaled(work: StateOperation) -> None:
    rescale(work, work.home.key_groups() % 5 + 1)


def _repartitioned(work: StateOperation) -> None:
    repartition(work, position_after(work.home.checkpoint).partitions % 4 + 1)


def _repartitioned_anew(work: StateOperation) -> None:
    repartition_anew(work, position_after(work.home.checkpoint).partitions % 4 + 1)


def _migrated(work: StateOperation) -> None:
    migrate(work, next(form for form in WRITTEN_FORMS if form != work.home.generation().form))


def _rescaled_and_rolled_back(work: StateOperation) -> None:
    _rescaled(work)
    rollback(work)


OPERATIONS: tuple[Callable[[StateOperation], None], ...] = (
    _only_restarted,
    _bootstrapped,
    _rescaled,
    _repartitioned,
    _repartitioned_anew,
    _migrated,
    _rescaled_and_rolled_back,
)


def _eventful_history(random: Random) -> tuple[list[Row], Deployment]:
    """Return a history with more than `FEW_TRANSITIONS` transitions, and its deployment."""
    for _ in range(100):
        rows, deployment = _history(random), Deployment(random.choice([1, 5, 20, 60]) * 1_000, 30_000)
        transitions = sum(count for one, count in defined(rows, deployment).items() if one[0] == JudgementKind.TRANSITION)
        if transitions > FEW_TRANSITIONS:
            return rows, deployment
    raise AssertionError("no history has enough transitions")


def _history(random: Random) -> list[Row]:
    """Return about a hundred rows of all kinds, in the order of ``received_at``."""
    internal = [any_internal_row(random.choice, "abc", 60) for _ in range(12)]
    distinct = {one.received_at_ms: one for one in internal}.values()  # each at its own instant, as the bridge stamps them
    rows = [*(any_signal(random.choice, "abc", 60) for _ in range(90)), *distinct]
    rows.append(row(-1, "fleet/_/_/policy", policy=any_policy(random.choice), effective_from_s=-500))
    return stamped_by_bridge(rows)


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_verdicts_of_any_history_equal_the_definition_despite_state_operations(spark: SparkSession, seed: int) -> None:
    random, lines = Random(seed), list[str]()
    rows, deployment = _eventful_history(random)
    chosen = Random(0).sample(OPERATIONS, len(OPERATIONS))[seed::EXAMPLES]  # all examples together run each operation
    operations = list(zip(sorted(random.sample(range(1, len(rows)), len(chosen))), chosen, strict=True))
    folder = Path(tempfile.mkdtemp(prefix="fleetpulse-any-"))
    try:
        home = Home(folder / "home")
        home.prepare(deployment)
        tables.create(home, MESSAGES)
        edges = [0, *(at for at, _ in operations), len(rows)]
        for number, (begin, end) in enumerate(pairwise(edges), 1):
            if end > begin:
                land(home, rows[begin:end], number)
            judge(spark, home)
            if number <= len(operations):
                operations[number - 1][1](StateOperation(spark, home, lines.append))
        assert emitted(home) == defined(rows, deployment)
        ids = tables.query(home, "SELECT device_id, life, transition_no FROM transitions")
        assert len({tuple(one.values()) for one in ids}) == len(ids)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
