"""Access rules of the embedded broker and of Mosquitto: rights follow from grants."""

import getpass
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpulse.io.mqtt.acl import Role, grant, grants, mosquitto_rules, revoke
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker import Broker, await_admission, renew_access
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Receiver
from fleetpulse.io.system.ports import free_port
from tests.support.refusals import refused


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerAddress]:
    running = Broker(tmp_path / "broker", tmp_path / "broker.log", port=0)
    yield running.start()
    running.stop()


def admit(
    address: BrokerAddress, folder: Path, name: str, role: Role = Role.DEVICE, devices: tuple[str, ...] = ()
) -> BrokerAddress:
    password = grant(folder, name, role, devices)
    assert renew_access(folder)
    admitted = replace(address, username=name, password=password)
    assert await_admission(admitted)  # while the broker reloads its rules, it may close a new connection
    return admitted


def receive_until(topic: object, receiver: Receiver, received: list[str]) -> None:
    deadline_s = time.monotonic() + 60
    while topic not in received:
        assert time.monotonic() < deadline_s, f"waited too long for {topic}; received {received}"
        received += [message.topic for message in receiver.poll(0.05)]


def connected(address: BrokerAddress, name: str, *topics: str) -> Receiver:
    receiver, deadline_s = Receiver(address, name, topics, persistent=False), time.monotonic() + 60
    while not receiver.connected and receiver.problem is None:
        assert time.monotonic() < deadline_s, "waited too long"
        receiver.poll(0.05)
    return receiver


def send(address: BrokerAddress, *topics: str) -> None:
    with Publisher(address, "sends", patience_s=10) as publisher:
        for topic in topics:
            publisher.publish(topic, b"{}")


def test_access_granted_while_the_broker_starts_or_reloads_admits_the_client(tmp_path: Path) -> None:
    running = Broker(tmp_path / "broker", tmp_path / "broker.log", port=0)

    def granted(name: str) -> tuple[str, str]:
        password = grant(running.folder, name, Role.DEVICE)
        renew_access(running.folder)
        return name, password

    names = [f"pump-{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        granting = [pool.submit(granted, name) for name in names[:6]]
        address = running.start()  # a signal before the broker listens would end it
        try:
            granting += [pool.submit(granted, name) for name in names[6:]]
            passwords = dict(one.result(30) for one in granting)
            refused = [
                one
                for one, password in passwords.items()
                if not await_admission(replace(address, username=one, password=password))
            ]
            assert len(passwords) == len(names) and not refused
        finally:
            running.stop()


def test_a_device_publishes_and_receives_only_its_own_topics(broker: BrokerAddress, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    device, gateway = admit(broker, folder, "pump.1"), admit(broker, folder, "gate", devices=("a", "b"))
    observer, received = connected(broker, "observer", "#"), list[str]()
    send(device, "fleet/s/pump.2/heartbeat", "fleet/s/pump.1/control", "fleet/_/_/policy", "fleet/s/pump.1/heartbeat")
    receive_until("fleet/s/pump.1/heartbeat", observer, received)
    send(gateway, "fleet/s/gate/heartbeat", "fleet/s/b/error", "fleet/t/a/birth")
    receive_until("fleet/t/a/birth", observer, received)
    assert received == ["fleet/s/pump.1/heartbeat", "fleet/s/b/error", "fleet/t/a/birth"]
    listening, commanded = connected(device, "listens", "fleet/s/pump.1/control"), list[str]()
    send(broker, "fleet/s/pump.2/control", "fleet/s/pump.1/control")
    receive_until("fleet/s/pump.1/control", listening, commanded)
    assert commanded == ["fleet/s/pump.1/control"]
    curious = connected(device, "curious", "fleet/#")
    assert "refused the subscription" in str(curious.problem)
    for one in (observer, listening, curious):
        one.close()


def test_a_watcher_only_receives_and_an_operator_also_publishes(broker: BrokerAddress, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    watcher, operator = admit(broker, folder, "eye", Role.WATCHER), admit(broker, folder, "hand", Role.OPERATOR)
    eye, received = connected(watcher, "eye", "fleet/#"), list[str]()
    send(watcher, "fleet/s/a/heartbeat")
    send(operator, "fleet/s/a/control")
    receive_until("fleet/s/a/control", eye, received)
    assert received == ["fleet/s/a/control"]
    eye.close()


def test_a_revoked_client_is_disconnected_and_stays_out(broker: BrokerAddress, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    device = admit(broker, folder, "pump-1")
    observer, listening = connected(broker, "observer", "fleet/#"), connected(device, "listens", "fleet/s/pump-1/control")
    assert listening.connected
    revoke(folder, "pump-1")
    assert renew_access(folder)
    deadline_s = time.monotonic() + 60
    while listening.connected:
        assert time.monotonic() < deadline_s, "the client is still connected"
        listening.poll(0.05)
    with refused("publisher-timeout", match=r"refused the connection|closed the connection"):
        Publisher(device, "again", patience_s=2).__enter__()
    observer.poll(0.05)
    assert (observer.connected, observer.connections) == (True, 1)
    for one in (observer, listening):
        one.close()


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[BrokerAddress]:
    """Run Mosquitto with the same rules: users pump.1, gate (for a and b) and eye, each with its name as password."""
    if shutil.which("mosquitto") is None or shutil.which("mosquitto_passwd") is None:
        pytest.skip("the system has no Mosquitto: install the package mosquitto")
    for name, role, devices in (("pump.1", Role.DEVICE, ()), ("gate", Role.DEVICE, ("a", "b")), ("eye", Role.WATCHER, ())):
        grant(tmp_path, name, role, devices)
    (tmp_path / "acl").write_text(mosquitto_rules(grants(tmp_path)))
    (tmp_path / "acl").chmod(0o600)
    (tmp_path / "passwords").write_text("".join(f"{name}:{name}\n" for name in ("fleet", "pump.1", "gate", "eye")))
    subprocess.run(["mosquitto_passwd", "-U", str(tmp_path / "passwords")], check=True)
    port = free_port("127.0.0.1", 0, OSError)
    user = getpass.getuser()
    lines = [f"listener {port} 127.0.0.1", f"password_file {tmp_path}/passwords", f"acl_file {tmp_path}/acl", f"user {user}"]
    (tmp_path / "conf").write_text("\n".join(lines) + "\n")
    running = subprocess.Popen(["mosquitto", "-c", str(tmp_path / "conf")], stderr=subprocess.DEVNULL)
    try:
        yield BrokerAddress("127.0.0.1", port, "fleet", "fleet")
    finally:
        running.terminate()
        running.wait(10)


def test_mosquitto_enforces_the_same_rules(mosquitto: BrokerAddress) -> None:
    observer, received = connected_during_start(mosquitto, "observer", "fleet/#"), list[str]()
    for name, topics in {
        "pump.1": ["fleet/s/pump.2/heartbeat", "fleet/s/pump.1/control", "fleet/s/pump.1/heartbeat"],
        "gate": ["fleet/s/gate/heartbeat", "fleet/s/b/error"],
        "eye": ["fleet/s/eye/heartbeat", "fleet/s/pump.1/heartbeat"],
    }.items():
        send(replace(mosquitto, username=name, password=name), *topics)
    send(mosquitto, "fleet/s/last/heartbeat")
    receive_until("fleet/s/last/heartbeat", observer, received)
    assert received == ["fleet/s/pump.1/heartbeat", "fleet/s/b/error", "fleet/s/last/heartbeat"]
    observer.close()


def connected_during_start(address: BrokerAddress, name: str, topic: str) -> Receiver:
    """Connect to a broker that is just starting."""
    receiver, deadline_s = Receiver(address, name, (topic,), persistent=False), time.monotonic() + 60
    while not receiver.connected:
        assert time.monotonic() < deadline_s, f"waited too long: {receiver.problem}"
        receiver.poll(0.05)
    return receiver
