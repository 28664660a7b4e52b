"""Data quality on Spark: the findings equal those of pandas, and the gate checks the stored state."""

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from batch.quality.gate import gate_snapshot_rows, generation_state
from batch.quality.run import Report, gate, refuse, run
from batch.state import snapshot
from batch.state.generation import state_of
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import COVERAGE, JUDGEMENTS, MESSAGES, QUARANTINE
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import folder_of
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import snapshots
from tests.support.histories.histories import START
from tests.support.histories.streams import DEPLOYMENT as STREAM
from tests.support.histories.streams import history, judge, land
from tests.support.homes.quality import eventful_history, judged_home, state_rows, write_state
from tests.support.refusals import refused

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised by Great Expectations
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # likewise
]
DEPLOYMENT = Deployment(30_000, 20_000)
# Suites that find damage, with all kinds of expectations among them.
SUITES = ("transitions", "verdicts", "accounts", "quarantine table", "coverage spans", "state", "pending messages", "snapshot")


def damaged(path: Path) -> Home:
    history = eventful_history(5)
    home = judged_home(path, history, DEPLOYMENT)
    judgements = DeltaTable(str(home.table(JUDGEMENTS.name)))
    judgements.delete("kind = 'transition' AND transition_no = 2")
    judgements.update(predicate="kind = 'transition' AND transition_no = 3", updates={"from_mode": "'asleep'"})
    judgements.delete("kind = 'late'")
    refused = [{"bridge": "b", "place": place, "topic": "fleet/x", "received_at_ms": START} for place in (1, 1, 2)]
    tables.append(home, QUARANTINE, tables.to_table(QUARANTINE, refused), "test", 1)
    DeltaTable(str(home.table(COVERAGE.name))).delete("op = 'open'")
    state = state_rows(history, DEPLOYMENT)
    first = state["device_id"].to_pylist()[0]
    kept = [one["device_id"] != first and one["part"] != "signal" for one in state.to_pylist()]
    write_state(home, state.filter(kept), devices=6)
    return home


def found_in(report: Report) -> dict[tuple[str, str], Any]:
    """Return the findings by suite and expectation: outcome, rows, failed rows and examples."""
    found: dict[tuple[str, str], Any] = {}
    for one in report.findings():
        rows = sorted(str(sorted(key.items(), key=str)) + str(sorted(values.items(), key=str)) for key, values in one.examples)
        found[one.suite, one.expectation] = (one.outcome, one.rows, one.failed, rows)
    return found


@pytest.mark.extended
def test_pandas_and_spark_find_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    home = damaged(tmp_path / "home")
    small = run(home, SUITES, engine="pandas", keep=2)
    large = run(home, SUITES, session=lambda: spark, engine="spark", keep=2)
    assert {one.engine for one in small.suite_runs} == {"pandas"}
    assert {one.engine for one in large.suite_runs} == {"spark"}
    assert found_in(large) == found_in(small)
    failed = {suite for (suite, _), (outcome, *_) in found_in(small).items() if outcome == "failed"}
    assert failed == set(SUITES)
    assert len([one for one in small.findings() if one.outcome == "fault"]) == 0


def test_the_gate_accepts_a_sound_state_and_names_damaged_devices(spark: SparkSession, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(STREAM)
    tables.create(home, MESSAGES)
    land(home, history(11), 1)
    judge(spark, home)
    at = position_after(home.checkpoint)
    taken = snapshot.take(
        spark, home, None, list[str]().append, lambda rows, info: gate_snapshot_rows(spark, home, rows, info, keep=2)
    )
    assert taken.version is not None
    with generation_state(spark, home, 1) as state:
        refuse(gate(home, state, lambda: spark, keep=2), "nothing may be built on it")
    sound = state_of(spark, home, home.generation(), at).each
    ids = sorted(row.device_id for row in sound.filter("part = 'device' AND mode = 'offline'").collect())
    changed = sql.when(sql.col("device_id") == ids[0], sql.lit("online")).otherwise(sql.col("mode"))
    damaged = sound.filter((sql.col("device_id") != ids[1]) | (sql.col("part") != "device")).withColumn("mode", changed)
    before = len(snapshots(home))
    with (
        refused("quality-gate-shut", match=r'^suite "[^;]*; no snapshot is published') as caught,
        gate_snapshot_rows(spark, home, damaged, taken, keep=2),
    ):
        pytest.fail("the gate accepted damaged rows")
    assert f'"is not missing", first: device_id {ids[1]}' in str(caught.value)
    assert f'"mode equals that of its transition", first: device_id {ids[0]}' in str(caught.value)
    assert len(snapshots(home)) == before
    assert list(folder_of(spark).glob("state-*")) == []
