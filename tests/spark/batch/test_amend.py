"""Amendments beside the running job: no conflicts, and the live device follows its amended history."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batch.amend import AmendRequest, amend_home
from batch.state import snapshot
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.registry.device_patch import same_state
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import EVERYONE, Origin, Row, identity
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables import tables
from fleetpulse.reports import judgements
from fleetpulse.reports.history.replay_origin import DONE, StartingPoint
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.histories.histories import START, positioned, row, signal, tick
from tests.support.homes.homes import empty, land

pytestmark = pytest.mark.spark
DEPLOYMENT = Deployment(1_000, 300_000)
PATIENCE_S = 300
APPENDS = 25


def _await(query: StreamingQuery, home: Home, received_s: float) -> None:
    limit = time.monotonic() + PATIENCE_S
    while (reached := judged_up_to(home.checkpoint)) is None or reached[1] < START + received_s * 1000:
        assert query.isActive, query.exception()
        assert time.monotonic() < limit, "the stream does not reach the end of its input"
        time.sleep(0.1)
    query.processAllAvailable()


def _sent_commands(home: Home, received_s: float) -> list[Row]:
    [path] = home.commands.glob("*.json")
    [one] = json.loads(path.read_text())
    path.unlink()
    decoded = decode(one["topic"], json.dumps(one["payload"]).encode(), START + int(received_s * 1000), Origin.COMMAND)
    assert isinstance(decoded, Row)
    return [decoded]


def test_late_delivery_retracts_an_offline_and_the_running_job_continues_from_it(spark: SparkSession, tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    rules = parse_policy({"rules": {"timeout": "60s", "forget_after": "10h"}}).normalised()
    batches = [
        [row(0, "fleet/_/_/policy", policy=rules, effective_from_s=-1000), signal(10, gateway="g"), tick(100)],
        [*(signal(at_s, received_s=110, gateway="g") for at_s in (40, 90)), tick(120)],
    ]
    query = start(spark, home)
    try:
        for number, batch in enumerate(batches, 1):
            land(home, batch, number)
            _await(query, home, 100 + 20 * (number - 1))
        assert [one["to_mode"] for one in judgements.transitions(home)] == ["online", "offline"]
        [done] = amend_home(home, AmendRequest())
        assert (done.retracted, done.added, done.corrected) == (1, 0, True)
        assert [one["to_mode"] for one in judgements.transitions(home)] == ["online"]
        batches.append([*_sent_commands(home, 121), tick(140)])
        land(home, batches[-1], 3)
        _await(query, home, 140)
        assert [(one["to_mode"], one["trigger"]) for one in judgements.transitions(home)][1:] == [("online", "amended")]
        batches.append([tick(200)])
        land(home, batches[-1], 4)
        _await(query, home, 200)
        [done] = amend_home(home, AmendRequest())
        assert done.left is None
        assert query.isActive
    finally:
        query.stop()
    assert emitted(home) == defined([one for batch in batches for one in batch], DEPLOYMENT)
    shown = [(one["to_mode"], one["trigger"], one["runtime_ms"]) for one in judgements.transitions(home)]
    assert shown == [("online", "signal", 0), ("offline", "silence", 80_000)]
    status = judgements.device_status(home, "d", START + 200_000)
    assert status is not None
    assert status.retracted_offline == [{"since_ms": START + 70_000, "until_ms": START + 129_000}]


@pytest.mark.extended
def test_appends_of_amend_and_of_the_job_do_not_conflict(spark: SparkSession, tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    done = threading.Event()

    def append() -> int:
        number = 0
        while not done.is_set() or number < APPENDS:
            number += 1
            addition = {"kind": "add", "device_id": "z", "amendment_no": number, "event_time_ms": START}
            tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [addition]), DONE, number)
        return number

    query = start(spark, home)
    rows: list[Row] = []
    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(append)
        try:
            for number in range(1, 7):
                batch = [signal(100 * number, device=f"d{number}"), tick(100 * number + 50)]
                rows += batch
                land(home, batch, number)
                _await(query, home, 100 * number + 50)
        finally:
            done.set()
            query.stop()
    assert emitted(home) == defined(rows, DEPLOYMENT)
    [counted] = tables.query(home, "SELECT count(*) AS n, max(amendment_no) AS newest FROM judgements WHERE kind = 'add'")
    assert counted["n"] == counted["newest"] == appending.result() >= APPENDS


@pytest.mark.extended
def test_a_snapshot_equals_the_outcome_of_its_history(spark: SparkSession, tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    rows = positioned(
        [
            row(0, "d/registry", op="add", gateway="g", **{"class": "slow"}),
            *(signal(at, "d", "error", code=code, boot="b", seq=at) for at, code in ((10, "x"), (20, "reconnaissance"))),
            signal(30, "e"),
            row(40, "fleet/_/b/gap", op="open", from_s=35, after_s=30),
            row(50, "fleet/_/b/gap", op="close", until_s=50),
            row(100, "g/death", gateway="g", ts_s=100.5),
            signal(100, "e"),
        ]
    )
    land(home, rows, 1)
    query = start(spark, home)
    try:
        _await(query, home, 100)
    finally:
        query.stop()
    started = StartingPoint(snapshot.take(spark, home, None, lambda message: None)).outcome(home, ["d", "e"])
    want = outcome(rows, DEPLOYMENT)
    assert started.frontier_ms == want.frontier_ms is not None
    assert started.devices.keys() == want.devices.keys()
    assert all(same_state(started.devices[one], want.devices[one]) for one in want.devices)
    assert {identity(one) for one in started.pending} == {identity(one) for one in want.pending if one.device_id != "g"}
    assert {one.device_id for one in started.pending} == {"e", EVERYONE}, "a gateway's death concerns the devices behind it"
