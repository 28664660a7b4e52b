"""Laws on the real job: any history, cut anywhere, whatever is done to the state in between, is judged as the definition says."""

import os
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from batch import snapshot
from batch.verbs import Work, bootstrap, migrate, repartition, repartition_anew, rescale, rollback
from fleetpulse.columnar.forms import WRITTEN_FORMS
from fleetpulse.core.messages import Row
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io import delta
from fleetpulse.io.checkpoint import stand
from fleetpulse.io.home import Home
from fleetpulse.io.snapshot_table import find_snapshot
from fleetpulse.ops.agreement import defined, told
from tests.property.test_laws import DEPLOYMENTS, histories
from tests.spark.test_state_verbs import SAY, judge
from tests.spark.test_stream import land

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
EXAMPLES = 2 if os.environ.get("CI") else 5  # each is a home of its own, with some starts of the job


def _nothing(_: Work) -> None:
    """Stop and start the job alone."""


def _copied(work: Work) -> None:
    snapshot.take(work.spark, work.home, None, SAY)
    bootstrap(work, find_snapshot(work.home))


def _rescaled(work: Work) -> None:
    rescale(work, work.home.key_groups() % 5 + 1)


def _repartitioned(work: Work) -> None:
    repartition(work, stand(work.home.checkpoint).partitions % 4 + 1)


def _repartitioned_anew(work: Work) -> None:
    repartition_anew(work, stand(work.home.checkpoint).partitions % 4 + 1)


def _migrated(work: Work) -> None:
    migrate(work, next(form for form in WRITTEN_FORMS if form != work.home.generation().form))


def _there_and_back(work: Work) -> None:
    _rescaled(work)
    rollback(work)


VERBS: tuple[Callable[[Work], None], ...] = (
    _nothing,
    _copied,
    _rescaled,
    _repartitioned,
    _repartitioned_anew,
    _migrated,
    _there_and_back,
)


@given(
    histories(),
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from(VERBS)), min_size=1, max_size=3, unique_by=lambda one: one[0]),
    DEPLOYMENTS,
)
@settings(
    max_examples=EXAMPLES,
    derandomize=bool(os.environ.get("CI")),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to make one smaller takes as long again for each step
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_history_is_judged_as_the_definition_says_whatever_is_done_between_batches(
    spark: SparkSession, rows: list[Row], done: list[tuple[int, Callable[[Work], None]]], deployment: Deployment
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fleetpulse-any-"))
    try:
        home = Home(folder / "home")
        home.prepare(deployment)
        delta.create(home, MESSAGES)
        verbs = sorted(((min(at, len(rows)), verb) for at, verb in done), key=lambda one: one[0])
        edges = [0, *(at for at, _ in verbs), len(rows)]
        for number, (begin, end) in enumerate(pairwise(edges), 1):
            if end > begin:
                land(home, rows[begin:end], number)
            judge(spark, home, follows=number % 2 == 0 or number > len(verbs))
            if number <= len(verbs):
                verbs[number - 1][1](Work(spark, home, SAY))
        assert told(home) == defined(rows, deployment)
        ids = delta.query(home, "SELECT device_id, life, transition_no FROM transitions")
        assert len({tuple(one.values()) for one in ids}) == len(ids)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
