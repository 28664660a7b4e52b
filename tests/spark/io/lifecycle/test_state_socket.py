"""Sockets of the state server: no batch leaves one open.

Leaked sockets exhaust a job that runs for days, and make each start of a process slower.
"""

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


def _half_closed(spark: SparkSession) -> int:
    """Return the number of open sockets of the JVM whose other end is closed."""
    java: Any = spark._jvm
    jvm = psutil.Process(java.java.lang.ProcessHandle.current().pid())
    return sum(one.status == psutil.CONN_CLOSE_WAIT for one in jvm.net_connections("tcp"))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_task_leaves_no_open_socket(spark: SparkSession, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment(2_000, 300_000))
    tables.create(home, MESSAGES)
    _land(home, 1)
    query = start(spark, home)
    try:
        query.processAllAvailable()
        before = _half_closed(spark)
        for number in range(2, BATCHES + 2):
            _land(home, number)
            query.processAllAvailable()
        assert _half_closed(spark) <= before + 1, "the socket of the last batch may still be closing"
    finally:
        query.stop()
