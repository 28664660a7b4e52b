"""No batch leaves a socket behind: a job that runs for days would run out of them, and each makes a start of a process dearer."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables import tables
from tests.support.histories.histories import signal

pytestmark = pytest.mark.spark
DEVICES, BATCHES = 20, 10


def _land(home: Home, number: int) -> None:
    arrival = {"origin": "mqtt", "bridge": "b", "segment": number}
    rows = [signal(30 * number, f"d{at}") for at in range(DEVICES)]
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, table), "test", number)


def _left_open(spark: SparkSession) -> int:
    """Return how many sockets of the JVM are open whose other end is gone."""
    java: Any = spark._jvm
    jvm = psutil.Process(java.java.lang.ProcessHandle.current().pid())
    return sum(one.status == psutil.CONN_CLOSE_WAIT for one in jvm.net_connections("tcp"))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_task_leaves_no_socket_behind(spark: SparkSession, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment(2_000, 300_000))
    tables.create(home, MESSAGES)
    _land(home, 1)
    query = start(spark, home)
    try:
        query.processAllAvailable()
        before = _left_open(spark)
        for number in range(2, BATCHES + 2):
            _land(home, number)
            query.processAllAvailable()
        assert _left_open(spark) <= before + 1, "the last one's may be closing"
    finally:
        query.stop()
