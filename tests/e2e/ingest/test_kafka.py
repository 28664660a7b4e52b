"""Bridge of a real Kafka, in the process that ``fleet up`` starts: kills, stops and errors."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import KAFKA
from fleetpulse.core.tables import COVERAGE, MESSAGES, QUARANTINE, Table
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.ingest.segments import list_segments, read_segment
from fleetpulse.io.kafka.subscriber import BATCH
from fleetpulse.io.mqtt.address import BrokerAddress, save_address
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables import tables
from fleetpulse.paths import ROOT
from streaming.landing.landing import Landing
from tests.support.kafka_node import Node, Producer
from tests.support.wait import await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]
PART = 5_000  # more than a batch of the bridge


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Node]:
    try:
        node = Node(tmp_path / "kafka")
    except FleetError as error:
        pytest.skip(f"Kafka is not available: {error}")
    with node:
        yield node


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.prepare(None)
    home.divide({KAFKA: ()})
    save_address(home.run("broker"), BrokerAddress("127.0.0.1", 1883))
    return home


class Running:
    """The bridge of Kafka, as ``fleet up`` starts it."""

    def __init__(self, home: Home, **kafka: str) -> None:
        self.home = home
        environment = {**os.environ, "FLEET_KAFKA": json.dumps(kafka), "FLEET_CANARY_INTERVAL": "500ms"}
        command = [sys.executable, "-P", "-m", "cli", "job", "bridge", "--home", str(home.path)]
        command += ["--parent", str(os.getpid()), "--name", KAFKA]
        with (home.logs / "kafka.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def status(self) -> dict[str, Any]:
        status = read_status(self.home.run(bridge_job(KAFKA)))
        return status if status.get("pid") == self.process.pid else {}

    def kill(self) -> None:
        """Kill it, and check that its child processes end."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(10)
        assert not psutil.wait_procs(children, 20)[1], "its JVM outlives it"

    def stop(self) -> float:
        """Stop it; return the duration of the stop, in seconds."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        since_s = time.monotonic()
        self.process.terminate()
        assert self.process.wait(20) == 0, (self.home.logs / "kafka.log").read_text()[-2_000:]
        assert not psutil.wait_procs(children, 10)[1], "its JVM outlives it"
        return time.monotonic() - since_s


def heartbeats(first: int, count: int = PART) -> list[tuple[str, str]]:
    return [(f"fleet/s/d{seq % 7}/heartbeat", json.dumps({"seq": seq})) for seq in range(first, first + count)]


def written(home: Home) -> list[dict[str, Any]]:
    return [row for _, path in list_segments(home.segments_of(KAFKA)) for row in read_segment(path).to_pylist()]


def numbers(home: Home) -> list[int]:
    return [json.loads(row["payload"])["seq"] for row in written(home) if row["topic"].endswith("/heartbeat")]


def read(home: Home, table: Table, columns: str, rest: str) -> list[dict[str, Any]]:
    return tables.query(home, f"SELECT {columns} FROM {table.name} {rest}", tables=[table.name])


def land(home: Home) -> None:
    landing = Landing(home)
    while landing.step():
        pass


def test_messages_of_kafka_reach_bronze_despite_kills(home: Home, kafka: Node) -> None:
    options = {"bootstrap.servers": kafka.servers, "topics": "fleet"}
    with Producer(kafka, "fleet") as producer:
        producer.send(heartbeats(0))
        producer.send([("NULL", "{}"), ("dev-7", "{}"), ("fleet/s/d1/death", "NULL")])
    with Running(home, **options) as bridge:
        await_that(lambda: len(numbers(home)) > 10)
        bridge.kill()
    with Producer(kafka, "fleet") as producer, Running(home, **options) as bridge:
        producer.send(heartbeats(PART))
        await_that(lambda: set(numbers(home)) == set(range(2 * PART)) and not bridge.status()["gap_open"])

        kafka.kill()
        await_that(lambda: bridge.status()["gap_open"] and not bridge.status()["connected"])
        await_that(lambda: "no answer from Kafka" in (bridge.status()["problem"] or ""))
        kafka.start()
        producer.send(heartbeats(2 * PART))
        await_that(lambda: set(numbers(home)) == set(range(3 * PART)) and not bridge.status()["gap_open"])
        assert bridge.status()["connected"] and bridge.status()["problem"] is None
        assert bridge.stop() < 10

    stamps = [row["received_at_ms"] for row in written(home)]
    assert stamps == sorted(stamps)
    land(home)
    counts = Counter(row["seq"] for row in read(home, MESSAGES, "seq", " WHERE kind = 'heartbeat'"))
    assert set(counts) == set(range(3 * PART))
    assert sum(counts.values()) <= 3 * PART + 2 * BATCH, "at most one batch is repeated after each end"
    deaths = read(home, MESSAGES, "device_id", " WHERE kind = 'death'")
    assert {row["device_id"] for row in deaths} == {"d1"}
    refused = read(home, QUARANTINE, "topic, reason", "")
    assert {row["reason"] for row in refused} == {"topic"}
    assert {row["topic"].rstrip("01") for row in refused} >= {"kafka/fleet/"}
    assert any(row["topic"].endswith("/dev-7") for row in refused)
    gaps = [row["op"] for row in read(home, COVERAGE, "op", " ORDER BY received_at")]
    assert gaps[-2:] == ["open", "close"]


def test_a_refused_login_is_reported_without_secrets(home: Home, kafka: Node) -> None:
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="hush-hush";'
    login_options = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.jaas.config": login}
    with Running(home, **{"bootstrap.servers": kafka.servers, "topics": "fleet", **login_options}) as bridge:
        await_that(lambda: "authentication failed" in (bridge.status().get("problem") or ""))
        assert not bridge.status()["connected"]
        bridge.stop()
    assert "hush-hush" not in (home.logs / "kafka.log").read_text()


def test_records_deleted_unread_are_reported_and_reading_continues_after_them(home: Home, kafka: Node) -> None:
    options = {"bootstrap.servers": kafka.servers, "topics": "fleet"}
    with Producer(kafka, "fleet") as producer:
        producer.send(heartbeats(0, 10))
    with Running(home, **options) as bridge:
        await_that(lambda: set(numbers(home)) == set(range(10)))
        bridge.stop()
    with Producer(kafka, "fleet") as producer:
        producer.send(heartbeats(10, 10))
    kafka.kill()
    kafka.configure(log_retention_ms=1_000, log_initial_task_delay_ms=500)
    kafka.start()
    await_that(lambda: kafka.first_offset("fleet") == 20)
    kafka.kill()
    kafka.configure(log_retention_ms=3_600_000)
    kafka.start()
    with Producer(kafka, "fleet") as producer:
        producer.send(heartbeats(20, 10))
    with Running(home, **options) as bridge:
        await_that(lambda: set(numbers(home)) >= set(range(20, 30)) and not bridge.status()["gap_open"])
        assert bridge.status()["problem"] is None
        bridge.stop()
    assert not set(numbers(home)) & set(range(10, 20))
    assert "were deleted before the bridge read them" in (home.logs / "kafka.log").read_text()
