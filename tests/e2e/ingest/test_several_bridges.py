"""Several bridges at one broker: one order, no loss, and only a short wait for a dead bridge."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.tables import COVERAGE, MESSAGES
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.ingest.segments import bridge_position
from fleetpulse.io.mqtt.address import BrokerAddress, save_address
from fleetpulse.io.mqtt.embedded.broker import Broker
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables import tables
from fleetpulse.paths import ROOT
from fleetpulse.reports.frontiers import shards
from streaming.landing.landing import Landing
from tests.support import wait

await_that = partial(wait.await_that, limit_s=40)
SITES = ("oslo", "rome", "paris")  # the last belongs to no bridge, so the first bridge takes it
LEASE_MS = 3_000


class Installation:
    """A home with a broker, three bridges as processes, and landing as a thread; all end with the test."""

    def __init__(self, path: Path) -> None:
        self.home = Home(path)
        (path / "settings.toml").write_text(
            'canary_interval = "500ms"\nreconnect_grace = "1s"\n[bridges]\nnorth = ["oslo"]\nsouth = ["rome"]\n'
        )
        self.home.prepare(None)
        self.home.divide({"north": ["oslo"], "south": ["rome"]})
        self.broker = Broker(self.home.broker, path / "broker.log", port=0)
        self.address = self.broker.start()
        save_address(self.home.run("broker"), self.address)
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self._end = threading.Event()
        self._landing = threading.Thread(target=self._land)
        self.failure: Exception | None = None

    def start(self, bridge: str) -> None:
        command = [sys.executable, "-m", "cli", "job", "bridge", "--home", str(self.home.path), "--name", bridge]
        with (self.home.path / "bridges.log").open("ab") as log:
            self.jobs[bridge] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def land(self) -> None:
        self._landing.start()

    def _land(self) -> None:
        try:
            landing = Landing(self.home, lease_ms=LEASE_MS)
            while not self._end.wait(0.05):
                landing.step()
        except Exception as error:
            self.failure = error
            raise

    def state(self, bridge: str) -> dict[str, Any]:
        return read_status(self.home.run(bridge_job(bridge)))

    def rows(self) -> list[dict[str, Any]]:
        return tables.query(self.home, "SELECT * FROM messages ORDER BY received_at", tables=[MESSAGES.name])

    def counts(self) -> Counter[int]:
        return Counter(row["seq"] for row in self.rows() if row["seq"] is not None)

    def gaps(self, bridge: str) -> list[str]:
        rows = tables.query(self.home, "SELECT op, bridge FROM coverage ORDER BY received_at", tables=[COVERAGE.name])
        return [row["op"] for row in rows if row["bridge"] == bridge]

    def close(self) -> None:
        for job in self.jobs.values():
            job.send_signal(signal.SIGCONT)
            job.kill()
            job.wait(10)
        self._end.set()
        if self._landing.is_alive():
            self._landing.join(20)
        self.broker.stop()


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    running = Installation(tmp_path)
    try:
        for bridge in running.home.bridges():
            running.start(bridge)
        await_that(lambda: all(running.state(bridge).get("subscribed") for bridge in running.home.bridges()))
        await_that(lambda: {"oslo", "rome"} <= sites_shared_by_the_first(running))
        running.land()
        yield running
    finally:
        running.close()
    assert running.failure is None


def sites_shared_by_the_first(running: Installation) -> set[str]:
    position = bridge_position(running.home.segments)
    return set(position.shared) if position else set()


def publish(address: BrokerAddress, first: int, count: int) -> None:
    with Publisher(address, f"device-{first}") as publisher:
        for seq in range(first, first + count):
            content = {"seq": seq, "ts": time.time_ns() // 1_000_000}
            publisher.publish(f"fleet/{SITES[seq % 3]}/d{seq % 7}/heartbeat", json.dumps(content).encode())


def require_order(running: Installation) -> None:
    """Check that the rows of each version of bronze were received after those of all earlier versions."""
    table = running.home.table(MESSAGES.name)
    newest = 0
    for log in sorted((table / "_delta_log").glob("*.json")):
        for line in log.read_text().splitlines():
            stats = json.loads(json.loads(line).get("add", {}).get("stats") or "null")
            if stats and stats["numRecords"]:
                instants = [stats[bound]["received_at"] for bound in ("minValues", "maxValues")]
                assert not newest or instants[0] > newest, "an instant is out of order"
                newest = instants[1]


def test_each_bridge_takes_its_sites_and_each_message_is_taken_once(installation: Installation) -> None:
    publish(installation.address, 0, 600)
    await_that(lambda: set(installation.counts()) == set(range(600)))
    assert set(installation.counts().values()) == {1}
    taken = {(row["site"], row["bridge"]) for row in installation.rows() if row["seq"] is not None}
    assert taken == {("oslo", "north"), ("rome", "south"), ("paris", "bridge-1")}
    require_order(installation)


@pytest.mark.parametrize("fate", ["killed", "suspended"])
def test_a_silent_bridge_is_skipped_and_its_messages_come_later(installation: Installation, fate: str) -> None:
    publish(installation.address, 0, 60)
    await_that(lambda: set(installation.counts()) == set(range(60)))
    await_that(lambda: installation.gaps("north")[-1:] != ["open"])
    before = installation.gaps("north")  # a slow start may have caused one
    installation.jobs["north"].send_signal(signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    publish(installation.address, 60, 60)
    others = {seq for seq in range(120) if SITES[seq % 3] != "oslo" or seq < 60}
    await_that(lambda: set(installation.counts()) >= others)
    assert installation.gaps("north") == [*before, "open"], "the other bridges first report that it is deaf"
    known = shards(installation.home, None)
    assert known is not None
    assert {site: known.of(site).coverage.deaf for site in SITES} == {"oslo": ("north",), "rome": (), "paris": ()}
    if fate == "killed":
        installation.jobs["north"].wait(10)
        installation.start("north")
    else:
        installation.jobs["north"].send_signal(signal.SIGCONT)
    publish(installation.address, 120, 60)
    await_that(lambda: set(installation.counts()) == set(range(180)))
    await_that(lambda: installation.gaps("north") == [*before, "open", "close"])
    require_order(installation)
    if fate != "killed":
        assert "fenced by landing" in (installation.home.path / "bridges.log").read_text(), "it learned that it was skipped"
