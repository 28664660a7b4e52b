"""Table stream_health: each batch of a query writes one row, also across restarts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.stream_health import StreamHealth
from fleetpulse.reports import judgements
from fleetpulse.reports.present import devices
from tests.support.histories.histories import signal

pytestmark = pytest.mark.spark
DEVICES = 20


def _land(home: Home, rows: list[Row], number: int) -> None:
    arrival = {"origin": "mqtt", "bridge": "b", "segment": number}
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, table), "test", number)


def _run(spark: SparkSession, home: Home) -> None:
    health = StreamHealth(home, 1)
    query = start(spark, home)
    health.follow(query)
    try:
        query.processAllAvailable()
    finally:
        query.stop()
        health.stop(60)


def _rows(home: Home) -> list[dict[str, Any]]:
    return tables.query(home, "SELECT * FROM stream_health ORDER BY batch_id", tables=["stream_health"])


@pytest.mark.timeout(600)  # two cold starts of the query, also on a slow machine
def test_each_batch_writes_one_row_and_a_restart_writes_no_duplicate(spark: SparkSession, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment(2_000, 300_000))
    tables.create(home, MESSAGES)
    _land(home, [signal(at, f"d{at}") for at in range(DEVICES)], 1)
    _run(spark, home)
    before = _rows(home)
    late = signal(1, "d1", received_s=30, seq=9)
    _land(home, [*(signal(at + 30, f"d{at}") for at in range(DEVICES)), late], 2)
    _run(spark, home)
    rows = _rows(home)

    committed = sorted(int(path.name) for path in (home.checkpoint / "commits").glob("*") if path.name.isdecimal())
    assert [row["batch_id"] for row in rows] == committed
    assert rows[: len(before)] == before
    assert len({row["run_id"] for row in rows}) == 2
    assert len({row["query_id"] for row in rows}) == 1
    assert sum(row["input_rows"] for row in rows) == 2 * DEVICES + 1
    assert sum(row["rows_late"] for row in rows) == 1
    assert sum(row["rows_dropped"] for row in rows) == 0
    assert all(row["state_memory_bytes"] > 0 and row["state_bytes"] > 0 and row["partitions"] == 2 for row in rows)
    written = tables.query(home, "SELECT kind, count(*) AS n FROM judgements GROUP BY kind")
    counts: dict[str, int] = {}
    for row in rows:
        for kind, count in json.loads(row["judgements"]).items():
            counts[kind] = counts.get(kind, 0) + count
    assert counts == {row["kind"]: row["n"] for row in written}
    assert json.loads(rows[-1]["devices"]) == devices.counts(home, None)["devices"]
    assert rows[-1]["watermark_delay_ms"] == 30_001, "the watermark lags one batch"
    health = judgements.health(home)
    assert health is not None
    assert {one["rating"] for one in health["rated"]} <= {"good", "warning", "critical"}
