"""Published verdicts at a broker: a watcher reads them retained, and the will reports a killed publisher."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpulse.core.messages.verdicts import STATES, STATUS
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.acl import Role, grant
from fleetpulse.io.mqtt.address import BrokerAddress, load_address, save_address
from fleetpulse.io.mqtt.embedded.broker import Broker, await_admission, renew_access
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Receiver
from fleetpulse.io.tables import tables
from fleetpulse.paths import ROOT
from tests.support.homes.homes import empty
from tests.support.wait import await_that

CONFIG = "homeassistant/device/fleetpulse_pump__1/config"
LIMIT_S = 60


class Reader:
    """Watcher that keeps the newest payload of each topic.

    Args:
        address: address of the broker, with the watcher's password.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self.receiver = Receiver(address, f"reader-{id(self)}", [f"{STATES}/#", STATUS, CONFIG], persistent=False)
        self.newest: dict[str, bytes] = {}

    def await_payload(self, topic: str, payload: bytes) -> None:
        """Wait until the newest payload of a topic contains ``payload``; if that is empty, until it is empty, too."""

        def arrived() -> bool:
            self.newest |= {message.topic: message.payload for message in self.receiver.poll(0.05)}
            newest = self.newest.get(topic, b"nothing yet")
            return payload in newest if payload else not newest

        await_that(arrived, limit_s=LIMIT_S, what=f"{payload!r} on {topic}", pause_s=0.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return empty(tmp_path / "home", Deployment())


@pytest.fixture
def broker(home: Home) -> Iterator[Broker]:
    running = Broker(home.broker, home.broker_log, port=0)
    save_address(home.run("broker"), running.start())
    yield running
    running.stop()


@pytest.fixture
def address(home: Home, broker: Broker) -> BrokerAddress:
    return load_address(home.run("broker"))


@pytest.fixture
def publishers(home: Home) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return a list with a running publisher; a test may add more."""
    started = [start(home)]
    yield started
    for one in started:
        one.kill()
        one.wait(10)


def start(home: Home) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "cli", "job", "publisher", "--home", str(home.path), "--parent", str(os.getpid())]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)


def commit(home: Home, number: int, from_mode: str, to_mode: str) -> None:
    facts = {"kind": "transition", "device_id": "pump_1", "trigger": "signal", "life_ms": 1, "transition_no": number}
    changed = {**facts, "event_time_ms": number, "from_mode": from_mode, "to_mode": to_mode}
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [changed]), "job", number)


def test_a_watcher_reads_retained_verdicts_that_no_device_can_publish(
    home: Home, address: BrokerAddress, publishers: list[subprocess.Popen[bytes]]
) -> None:
    watcher = replace(address, username="eye", password=grant(home.broker, "eye", Role.WATCHER))
    pump = replace(address, username="pump_1", password=grant(home.broker, "pump_1", Role.DEVICE))
    assert renew_access(home.broker)
    assert await_admission(watcher)
    commit(home, 1, "provisioned", "online")
    reader, topic = Reader(watcher), f"{STATES}/pump_1"
    reader.await_payload(topic, b'"mode":"online"')
    reader.await_payload(STATUS, b"online")
    commit(home, 2, "online", "offline")
    reader.await_payload(topic, b'"mode":"offline"')

    with Publisher(pump, "pump", patience_s=10) as forger:
        forger.publish(topic, b'{"mode":"online"}', retain=True)
        forger.publish(STATUS, b"forged", retain=True)

    publishers[0].send_signal(signal.SIGKILL)
    publishers[0].wait(10)
    reader.await_payload(STATUS, b"offline")
    publishers.append(start(home))
    reader.await_payload(STATUS, b"online")
    later = Reader(watcher)  # reads what the broker kept
    later.await_payload(topic, b'"mode":"offline"')
    later.await_payload(CONFIG, json.dumps({"identifiers": ["fleetpulse_pump__1"]}, separators=(",", ":")).encode()[1:-1])

    commit(home, 3, "offline", "forgotten")
    reader.await_payload(topic, b"")
    reader.await_payload(CONFIG, b"")
    publishers[1].terminate()
    assert publishers[1].wait(20) == 0
    reader.await_payload(STATUS, b"offline")
