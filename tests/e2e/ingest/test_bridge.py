"""Bridge and embedded broker as processes that are killed: no acknowledged message is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.replay_envelope import Envelope, wrap
from fleetpulse.io.ingest.segments import bridge_position, list_segments, read_segment
from fleetpulse.io.mqtt.address import MAX_PAYLOAD_BYTES, BrokerAddress, load_address, save_address
from fleetpulse.io.mqtt.embedded.broker import Broker
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Receiver
from fleetpulse.io.system.process import read_status
from fleetpulse.paths import ROOT
from tests.support import wait
from tests.support.refusals import refused

pytestmark = pytest.mark.e2e
await_that = partial(wait.await_that, limit_s=20, pause_s=0.02)
BRIDGE = """
import json, sys
from pathlib import Path
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.system.process import StopSignal, die_with_parent
from streaming.bridge.bridge import BridgeSettings, run_bridge
home, parent, more = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
stop = StopSignal(parent)
die_with_parent(parent)
folders = home / "segments", home / "commands", home / "run" / "bridge.json"
run_bridge(BridgeSettings(*folders, load_address(home / "address"), "bridge", "replay", canary_key=b"key", **more), stop)
"""

PARENT = """
import sys, time
from pathlib import Path
from fleetpulse.io.mqtt.embedded.broker import Broker
broker = Broker(Path(sys.argv[1]) / "broker", Path(sys.argv[1]) / "broker.log", port=0)
broker.start()
print(broker.pid, flush=True)
time.sleep(60)
"""


class Running:
    """A bridge in its own process."""

    def __init__(self, home: Path, **more: Any) -> None:
        self.home = home
        settings = json.dumps({"canary_interval_s": 0.5, **more})
        with (home / "bridge.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", BRIDGE, str(home), str(os.getpid()), settings],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(10)

    def status(self) -> dict[str, Any]:
        status = read_status(self.home / "run" / "bridge.json")
        return status if status.get("pid") == self.process.pid else {}


@contextmanager
def bridge(home: Path, **more: Any) -> Iterator[Running]:
    running = Running(home, **more)
    try:
        yield running
    finally:
        running.kill()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    running = Broker(tmp_path / "broker", tmp_path / "broker.log", port=0)
    address = running.start()
    running.port = address.port
    save_address(tmp_path / "address", address)
    yield running
    running.stop()


def landed(home: Path) -> list[dict[str, Any]]:
    return [row for _, path in list_segments(home / "segments") for row in read_segment(path).to_pylist()]


def numbers(home: Path) -> list[int]:
    return [json.loads(row["payload"])["seq"] for row in landed(home) if row["origin"] == "mqtt"]


def publish(address: BrokerAddress, count: int, first: int = 0) -> None:
    with Publisher(address, "device") as publisher:
        for seq in range(first, first + count):
            publisher.publish(f"fleet/s/d{seq % 7}/heartbeat", json.dumps({"seq": seq}).encode())


class Load:
    """A device that publishes until ``end`` is set; all its messages are acknowledged when its thread has ended."""

    def __init__(self, address: BrokerAddress, rate_per_s: int) -> None:
        self.count = 0
        self.failure: Exception | None = None
        self._address, self._pause_s = address, 10 / rate_per_s
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._publish)

    def _publish(self) -> None:
        try:
            with Publisher(self._address, "load") as publisher:
                while not self.end.wait(self._pause_s):
                    for _ in range(10):
                        publisher.publish("fleet/s/d/heartbeat", json.dumps({"seq": self.count}).encode())
                        self.count += 1
                    publisher.pump()
        except FleetError as error:
            self.failure = error


@contextmanager
def publishing(address: BrokerAddress, rate_per_s: int) -> Iterator[Load]:
    load = Load(address, rate_per_s)
    load.thread.start()
    try:
        yield load
    finally:
        load.end.set()
        load.thread.join(60)
    assert not load.thread.is_alive()
    assert load.failure is None


def restart(broker: Broker) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)
    broker.stop()
    broker.start()


def test_messages_queued_for_an_absent_bridge_survive_a_killed_broker(broker: Broker, tmp_path: Path) -> None:
    with bridge(tmp_path) as running:
        await_that(lambda: running.status().get("connected"))
        assert running.stop() == 0
    address = load_address(tmp_path / "address")
    publish(address, 5_000)
    restart(broker)
    with bridge(tmp_path) as running:
        await_that(lambda: len(set(numbers(tmp_path))) >= 5_000, limit_s=40)
        # messages that a slow machine does not acknowledge in three seconds are sent again: copies follow
        assert list(dict.fromkeys(numbers(tmp_path))) == list(range(5_000))
        await_that(lambda: running.status().get("gap_open") is False and running.status().get("last_canary_ms"))


def test_a_backlog_of_several_filters_and_redelivered_messages_keep_the_order_of_each_topic(
    broker: Broker, tmp_path: Path
) -> None:
    topics, before, after = ("fleet/s/d/heartbeat", "z/d"), 500, 10_000  # twice the backlog exceeds what a session may get
    address, filters = load_address(tmp_path / "address"), {"embedded": True, "subscriptions": ["fleet/#", "z/+"]}

    def publish_both(first: int, count: int) -> None:
        with Publisher(address, "device") as publisher:
            for seq in range(first, first + count):
                for topic in topics:
                    publisher.publish(topic, json.dumps({"seq": seq}).encode())

    def received(topic: str) -> list[int]:
        return [json.loads(row["payload"])["seq"] for row in landed(tmp_path) if row["topic"] == topic]

    with bridge(tmp_path, flush_interval_s=60, max_rows=1_000_000, **filters) as running:  # acknowledges nothing in time
        await_that(lambda: running.status().get("connected"))
        publish_both(0, before)
        await_that(lambda: running.status().get("received_at_ms"))
    publish_both(before, after)
    with bridge(tmp_path, **filters):
        await_that(lambda: all(len({*received(topic)}) == before + after for topic in topics), limit_s=60, pause_s=1)
        # copies as in the test before
        assert all([*dict.fromkeys(received(topic))] == [*range(before + after)] for topic in topics)


def test_a_bridge_that_is_killed_under_load_loses_nothing(broker: Broker, tmp_path: Path) -> None:
    address, random_pauses = load_address(tmp_path / "address"), random.Random(3)
    with bridge(tmp_path) as running:
        await_that(lambda: running.status().get("connected"))  # from now on the broker queues messages
    with publishing(address, 400) as load:
        for _ in range(5):
            with bridge(tmp_path) as running:
                await_that(lambda running=running: running.status().get("connected"))
                time.sleep(random_pauses.uniform(0, 0.8))  # the kill is before, during or after the write of a segment
    assert load.count > 1_000, "the load was too low"
    with bridge(tmp_path) as running:
        await_that(lambda: set(numbers(tmp_path)) == set(range(load.count)), limit_s=40)
        await_that(lambda: running.status().get("connected"))  # from now on it handles SIGTERM
        assert running.stop() == 0
    stamps = [row["received_at_ms"] for row in landed(tmp_path)]
    assert stamps == sorted(stamps)
    gaps = [json.loads(row["payload"])["op"] for row in landed(tmp_path) if row["topic"].endswith("/gap")]
    assert "openopen" not in "".join(gaps)
    assert "open" in gaps


def test_a_broker_that_is_killed_under_load_loses_no_acknowledged_message(broker: Broker, tmp_path: Path) -> None:
    with bridge(tmp_path) as running:
        await_that(lambda: running.status().get("connected"))
        with publishing(load_address(tmp_path / "address"), 400) as load:
            for _ in range(3):
                before = load.count
                await_that(lambda before=before: load.count > before + 200)
                restart(broker)
        await_that(lambda: set(numbers(tmp_path)) == set(range(load.count)), limit_s=40)
        assert running.stop() == 0


def test_a_broker_killed_under_a_bridge_is_a_gap(broker: Broker, tmp_path: Path) -> None:
    with bridge(tmp_path) as running:
        await_that(lambda: running.status().get("last_canary_ms"))
        restart(broker)
        publish(load_address(tmp_path / "address"), 10)

        def gaps() -> list[dict[str, Any]]:
            return [json.loads(row["payload"]) for row in landed(tmp_path) if row["topic"].endswith("/gap")]

        await_that(lambda: len(gaps()) == 2 and len(numbers(tmp_path)) == 10)
        assert [gap["op"] for gap in gaps()] == ["open", "close"]
        assert gaps()[0]["why"] == "broker"
        assert running.stop() == 0


def test_a_replay_survives_kills_of_the_bridge_and_is_followed_by_live_messages(broker: Broker, tmp_path: Path) -> None:
    address, count, first_ms = load_address(tmp_path / "address"), 3_000, 1_600_000_000_000

    def play(begin: int, end: int) -> None:
        with Publisher(address, "history") as publisher:
            for line in range(begin, end):
                publisher.publish("replay/r", wrap(Envelope("r", line, first_ms + line, "fleet/s/d/heartbeat", b"{}")))

    for part in range(3):
        with bridge(tmp_path, replay=True) as running:
            await_that(lambda running=running: running.status().get("connected"))
            position = bridge_position(tmp_path / "segments")
            play(position.line + 1 if position and position.line is not None else 0, (part + 1) * count // 3)
    with bridge(tmp_path, replay=True) as running:
        await_that(lambda: running.status().get("connected"))
        with Publisher(address, "end") as publisher:
            publisher.publish("replay/r", wrap(Envelope("r", count, None, None, b"", end=True)))
        await_that(lambda: running.status().get("state") == "live" and running.status().get("connected"))
        publish(address, 5)
        await_that(lambda: len(numbers(tmp_path)) == 5)
        (tmp_path / "commands" / "1.json").write_text('{"topic": "fleet/s/d/control", "payload": {"op": "release"}}')
        await_that(lambda: any(row["command"] == "1.json" for row in landed(tmp_path)))
        await_that(lambda: not list((tmp_path / "commands").iterdir()))
    lines = [row["line"] for row in landed(tmp_path) if row["origin"] == "replay"]
    assert lines == list(range(count + 1))
    with bridge(tmp_path, replay=True) as running:
        await_that(lambda: running.status().get("state") == "live" and running.status().get("connected"))


def test_fresh_messages_are_landed_and_retained_copies_are_not(broker: Broker, tmp_path: Path) -> None:
    address = load_address(tmp_path / "address")
    client = paho.Client(CallbackAPIVersion.VERSION2, "retainer")
    client.username_pw_set(address.username, address.password)
    client.connect(address.host, address.port)
    client.loop_start()
    try:
        retained = client.publish("fleet/s/d/heartbeat", json.dumps({"seq": -1}), qos=1, retain=True)
        await_that(retained.is_published)
    finally:
        client.disconnect()
        client.loop_stop()
    with bridge(tmp_path) as running:
        await_that(lambda: running.status().get("retained"))
        publish(address, 3)
        await_that(lambda: len(numbers(tmp_path)) >= 3)
        assert running.stop() == 0
    assert numbers(tmp_path) == [0, 1, 2]


def test_a_host_application_reports_its_start_and_the_broker_its_loss(broker: Broker, tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    watching = Receiver(load_address(tmp_path / "address"), "edge", ["spBv1.0/STATE/us"], persistent=False)

    def received(count: int) -> bool:
        states.extend(json.loads(one.payload) for one in watching.poll(0.05))
        return len(states) >= count

    await_that(lambda: received(0) and watching.connected)
    with bridge(tmp_path, sparkplug_host="us") as running:
        await_that(lambda: received(1))
        running.kill()
        await_that(lambda: received(2))
    with bridge(tmp_path, sparkplug_host="us") as running:
        await_that(lambda: received(3))
        await_that(lambda: running.status().get("connected"))
        assert running.stop() == 0
        await_that(lambda: received(4))
    watching.close()
    assert [one["online"] for one in states] == [True, False, True, False]
    assert states[0]["timestamp"] == states[1]["timestamp"] < states[2]["timestamp"] == states[3]["timestamp"]


def test_the_broker_ends_with_a_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        broker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    await_that(lambda: not broker.is_running() or broker.status() == psutil.STATUS_ZOMBIE)


def test_a_port_in_use_is_refused(broker: Broker, tmp_path: Path) -> None:
    with refused("port-in-use", match=f"port {broker.port} .*--port"):
        Broker(tmp_path / "second", tmp_path / "second.log", port=broker.port).start()


def test_the_broker_of_a_killed_run_is_stopped_by_the_next(broker: Broker, tmp_path: Path) -> None:
    again = Broker(tmp_path / "broker", tmp_path / "broker.log", port=broker.port)
    again.start()
    try:
        await_that(lambda: not broker.alive())
        assert again.alive()
    finally:
        again.stop()


def test_a_wrong_password_is_reported(broker: Broker, tmp_path: Path) -> None:
    address = load_address(tmp_path / "address")
    wrong = BrokerAddress(address.host, address.port, address.username, "wrong")
    with refused("publisher-timeout", match="refused the connection"), Publisher(wrong, "device", patience_s=1):
        pass


def test_the_largest_payload_is_accepted(broker: Broker, tmp_path: Path) -> None:
    with Publisher(load_address(tmp_path / "address"), "large", patience_s=10) as publisher:
        publisher.publish("fleet/s/d/telemetry", bytes(MAX_PAYLOAD_BYTES))
        publisher.flush(10)
        assert publisher.acknowledged == 1
