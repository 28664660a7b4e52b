"""Limits of the embedded broker: store, connections and log, tried with the real server."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cli.commands.inspect.status import show_status
from cli.supervisor import processes
from cli.supervisor.processes import Run
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.acl import Role, grant
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded import broker_log, connection_cleanup, session_cleanup
from fleetpulse.io.mqtt.embedded.broker import Broker
from fleetpulse.io.mqtt.embedded.broker_api import broker_api
from fleetpulse.io.mqtt.embedded.broker_limits import BrokerLimits
from fleetpulse.io.mqtt.embedded.broker_log import BrokerLog
from fleetpulse.io.mqtt.embedded.retained_cleanup import STREAM
from fleetpulse.io.mqtt.embedded.session_cleanup import OF_DEVICE
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Receiver
from tests.support import wait
from tests.support.refusals import refused

pytestmark = pytest.mark.e2e
await_that = partial(wait.await_that, limit_s=60, pause_s=0.02)
MB = 1_024**2
MOST, SIZE = 40, 100_000  # messages, and bytes of each: more than the store takes
Start = Callable[[BrokerLimits], tuple[Broker, BrokerAddress]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a broker with limits, instead of the one before."""
    started: list[tuple[Broker, BrokerAddress]] = []

    def run(limits: BrokerLimits) -> tuple[Broker, BrokerAddress]:
        port = 0
        if started:
            started[-1][0].stop()
            port = started[-1][1].port
        broker = Broker(tmp_path / "broker", tmp_path / "broker.log", port=port, limits=limits)
        broker.folder.mkdir(exist_ok=True)
        (broker.folder / "bridge.session").write_text("bridge")  # a session of fleetpulse itself, which is never removed
        started.append((broker, broker.start()))
        return started[-1]

    yield run
    for broker, _ in started:
        broker.stop()


def listening(address: BrokerAddress) -> Receiver:
    receiver = Receiver(address, "bridge", ("fleet/#",))
    await_that(lambda: receiver.poll(0.02) or receiver.connected)
    return receiver


def log_in_with_a_wrong_password(address: BrokerAddress) -> None:
    receiver = Receiver(replace(address, password="wrong"), "guesser")
    await_that(lambda: receiver.poll(0.02) or receiver.problem)
    receiver.close()


@pytest.mark.parametrize("limit_bytes", [2 * MB, MB // 4], ids=["same", "restarted with less"])
def test_a_full_store_keeps_what_it_acknowledged_and_lets_the_bridge_in(limit_bytes: int, start: Start) -> None:
    _, address = start(BrokerLimits(store_bytes=2 * MB))
    listening(address).close()  # from now on, the broker keeps messages for the session
    publisher = Publisher(address, "device", patience_s=60).__enter__()
    with refused("publisher-timeout"):
        for number in range(MOST):
            publisher.publish("fleet/s/d/telemetry", bytes([number]) * SIZE)
            publisher.flush(4)
    acknowledged = publisher.acknowledged
    assert publisher.published == acknowledged + 1 <= 2 * MB // SIZE + 1
    if limit_bytes < 2 * MB:
        start(BrokerLimits(store_bytes=limit_bytes))
    bridge, received = Receiver(address, "bridge", ("fleet/#",)), dict[int, None]()

    def is_drained() -> bool:
        arrived = bridge.poll(0.02)
        received.update((message.payload[0], None) for message in arrived)
        bridge.ack([message.token for message in arrived])
        publisher.pump()
        return publisher.acknowledged == publisher.published == len(received)

    await_that(is_drained)
    bridge.close()
    publisher.__exit__(None, None, None)
    assert list(received) == list(range(acknowledged + 1))


def test_a_connected_watcher_that_acknowledges_nothing_does_not_fill_the_store(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker keeps each message until every session has acknowledged it."""
    monkeypatch.setattr(session_cleanup, "PERIOD_S", 0.2)
    password = grant(tmp_path / "broker", "ann", Role.WATCHER)
    _, address = start(BrokerLimits(store_bytes=2 * MB))
    watcher = Receiver(replace(address, username="ann", password=password), "watching", ("fleet/#", "fleet/s/d/control"))
    await_that(partial(_is_subscribed, watcher))
    bridge, received = listening(address), set[int]()
    publisher = Publisher(address, "device", patience_s=60).__enter__()

    def is_acknowledged() -> bool:
        arrived = bridge.poll(0.02)
        received.update(message.payload[0] for message in arrived)
        bridge.ack([message.token for message in arrived])
        publisher.pump()
        return publisher.acknowledged == publisher.published == len(received)

    for number in range(3 * 2 * MB // SIZE):
        publisher.publish("fleet/s/d/telemetry", bytes([number]) * SIZE)
        await_that(is_acknowledged)
    assert bridge.connections == 1
    publisher.__exit__(None, None, None)
    for receiver in (bridge, watcher):
        receiver.close()


def test_abandoned_sessions_are_removed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client must not use up the queues of all by connecting with many client ids."""
    monkeypatch.setattr(session_cleanup, "PERIOD_S", 0.2)
    broker, address = start(BrokerLimits())
    made = [f"c{number}" for number in range(OF_DEVICE + 4)]
    for client_id in (*made, "bridge"):
        receiver = Receiver(address, client_id, ("fleet/s/d/control",))
        await_that(partial(_is_subscribed, receiver))
        receiver.close()
    assert broker.pid is not None
    watching = Receiver(address, "watching", ("+/#",))
    await_that(partial(_is_subscribed, watching))
    with broker_api(broker.folder, broker.pid, address) as ask:

        def queues() -> int:
            return int(ask("$JS.API.STREAM.INFO.$MQTT_msgs", {})["state"]["consumer_count"])

        await_that(lambda: queues() == OF_DEVICE + 3)  # those of the bridge and the watcher, which has two, remain
        await_that(lambda: int(ask("$JS.API.STREAM.INFO.$MQTT_sess", {})["state"]["messages"]) == OF_DEVICE + 2)
    assert not watching.poll(0.5), "answers of the broker are no messages"
    watching.close()


def test_retained_messages_of_one_client_do_not_crowd_out_those_of_fleetpulse(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker acknowledges a retained message that it cannot store, so the publisher does not notice."""
    monkeypatch.setattr(session_cleanup, "PERIOD_S", 0.2)
    passwords = {name: grant(tmp_path / "broker", name, Role.DEVICE) for name in ("pump-1", "pump-2")}
    broker, address = start(BrokerLimits(store_bytes=4 * MB))

    def publish(topic: str, user: str = "", size: int = 2) -> None:
        by = replace(address, username=user, password=passwords[user]) if user else address
        with Publisher(by, f"c-{user}", patience_s=60) as publisher:
            for number in range(MOST if size > 2 else 1):
                publisher.publish(topic.replace("{n}", str(number)), bytes(size), retain=True)
            publisher.flush(60)

    publish("fleetpulse/state/a")
    publish("fleet/s/pump-2/birth", "pump-2")
    publish("fleet/s{n}/pump-1/birth", "pump-1", SIZE)
    assert broker.pid is not None
    with broker_api(broker.folder, broker.pid, address) as api:
        await_that(lambda: not api.use_of(STREAM).is_crowded)
        publish("fleetpulse/state/b")
        with api.headers(STREAM) as found:
            left = [subject.removeprefix("$MQTT.rmsgs.") for subject, _, _ in found]
    assert [one for one in left if ".pump-1." not in one] == ["fleetpulse.state.a", "fleet.s.pump-2.birth", "fleetpulse.state.b"]
    reader = Receiver(address, "reader", ("fleet/+/pump-2/birth", "fleetpulse/state/#"))
    received = list[str]()
    await_that(lambda: received.extend(one.topic for one in reader.poll(0.02)) or len(received) == 3)
    reader.close()


def test_the_number_of_retained_messages_is_limited_but_known_topics_take_new_ones(start: Start, tmp_path: Path) -> None:
    """The broker keeps the topic of each in its memory, and a device can name any site in its topics."""
    password = grant(tmp_path / "broker", "pump-1", Role.DEVICE)
    broker, address = start(BrokerLimits(retained=20))
    with Publisher(replace(address, username="pump-1", password=password), "c", patience_s=60) as publisher:
        for number in (*range(30), 7):
            publisher.publish(f"fleet/s{number}/pump-1/birth", bytes([number]), retain=True)
        publisher.publish("fleet/s7/pump-1/birth", b"new", retain=True)
        publisher.flush(60)
    assert broker.pid is not None
    with broker_api(broker.folder, broker.pid, address) as api:
        assert api.use_of(STREAM)[1::2] == (20, 20)
    reader = Receiver(address, "reader", ("fleet/+/pump-1/birth",))
    received = dict[str, bytes]()
    await_that(lambda: received.update((one.topic, one.payload) for one in reader.poll(0.02)) or len(received) == 20)
    reader.close()
    assert received["fleet/s7/pump-1/birth"] == b"new"


def test_retained_and_waiting_messages_of_a_device_do_not_keep_the_bridge_away(start: Start, tmp_path: Path) -> None:
    """The server closes a connection whose buffer they fill, and sends all of them at once to a new subscription."""
    password = grant(tmp_path / "broker", "pump-1", Role.DEVICE)
    _, address = start(BrokerLimits())
    before = listening(address)  # the session for which messages wait
    before.close()
    with Publisher(replace(address, username="pump-1", password=password), "hoarder", patience_s=60) as publisher:
        for number in range(100):
            publisher.publish(f"fleet/s{number}/pump-1/birth", bytes(MB - 100), retain=True)
        publisher.flush(60)
    bridge, received = Receiver(address, "bridge", ("fleet/#",)), list[str]()
    await_that(lambda: received.extend(one.topic for one in bridge.poll(0.02) if not one.retained) or len(received) >= 100)
    assert (bridge.connections, len({*received})) == (1, 100)
    bridge.close()


def _is_subscribed(receiver: Receiver) -> bool:
    receiver.poll(0.02)
    return receiver.connected


def test_connections_beyond_the_limit_are_refused(start: Start) -> None:
    _, address = start(BrokerLimits(connections=3))

    def admitted(number: int) -> bool:
        connection = socket.create_connection((address.host, address.port), timeout=10)
        opened.append(connection)
        connection.sendall(codec.encode_connect(f"c{number}", address.username, address.password, keep_session=False))
        try:
            return connection.recv(4) == b"\x20\x02\x00\x00"
        except ConnectionError:
            return False

    opened = list[socket.socket]()
    try:
        assert [admitted(number) for number in range(5)] == [True, True, True, False, False]
    finally:
        for connection in opened:
            connection.close()


def test_one_user_cannot_take_all_connections(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_cleanup, "PERIOD_S", 0.2)
    password = grant(tmp_path / "broker", "pump-1", Role.DEVICE)
    _, address = start(BrokerLimits(connections=12))
    hoarding = replace(address, username="pump-1", password=password)
    opened = [Receiver(hoarding, f"c{number}") for number in range(12)]

    def are_taken() -> bool:
        for receiver in opened:
            receiver.poll(0.02)
        return all(receiver.connections for receiver in opened)

    await_that(are_taken)
    own = Receiver(address, "bridge", ("fleet/#",))
    await_that(lambda: own.poll(0.02) or own.connected)
    for receiver in (*opened, own):
        receiver.close()


def test_the_oldest_connections_of_a_device_are_closed_beyond_its_limit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not limit the memory of a connection: client id, will and filters."""
    monkeypatch.setattr(connection_cleanup, "PERIOD_S", 0.2)
    password = grant(tmp_path / "broker", "pump-1", Role.DEVICE)
    _, address = start(BrokerLimits())
    opened = list[socket.socket]()
    try:
        for number in range(connection_cleanup.OF_DEVICE + 2):
            client = socket.create_connection((address.host, address.port), timeout=10)
            opened.append(client)
            client.sendall(codec.encode_connect(f"c{number}", "pump-1", password, keep_session=False))
            assert client.recv(4) == b"\x20\x02\x00\x00"
        assert [client.recv(4) for client in opened[:2]] == [b"", b""]
        opened[2].sendall(b"\xc0\x00")
        assert opened[2].recv(2) == b"\xd0\x00", "the others remain"
    finally:
        for client in opened:
            client.close()


def test_refused_messages_and_logins_are_counted_and_cannot_grow_the_log(start: Start, tmp_path: Path) -> None:
    log = BrokerLog(tmp_path / "broker.log", 0)
    password = grant(tmp_path / "broker", "pump-1", Role.DEVICE)
    broker, address = start(BrokerLimits(log_bytes=20_000, log_files=3))
    for _ in range(3):
        log_in_with_a_wrong_password(replace(address, username="pump-1"))
    await_that(lambda: log.read(1) or log.failed_logins == 3)
    with socket.create_connection((address.host, address.port), timeout=10) as client:  # the broker cannot name its user
        client.sendall(codec.encode_connect("c", "pump-1", password, keep_session=False))
        assert client.recv(4) == b"\x20\x02\x00\x00"
        client.sendall(b"\x34" + codec.encode_publish(1, "fleet/s/pump-2/heartbeat", b"{}")[1:])
        assert client.recv(4) == b"", "a message of QoS 2"
    await_that(lambda: log.read(1) or log.qos2 == 1)
    with Publisher(replace(address, username="pump-1", password=password), "pump-1", patience_s=60) as publisher:
        for _ in range(5_000):
            publisher.publish("fleet/s/pump-2/heartbeat", b"{}")
    broker.stop()
    log.read(2)
    log.close()
    assert (log.failed_logins, log.status()["users"]) == (3, {'"pump-1"': 3})
    assert log.refused > 0
    files = list(tmp_path.glob("broker.log*"))
    assert len(files) == 3 and sum(path.stat().st_size for path in files) < 80_000


def test_status_shows_failed_logins_while_the_broker_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "_LOG_S", 0.0)
    home = Home(tmp_path / "home")
    home.prepare(None)
    with home.locked("a test"):
        with Run(home) as run:
            address = run.use_broker(None)
            log_in_with_a_wrong_password(replace(address, username="[red]ann"))
            await_that(lambda: run.watch() or run.status(broker_log.STATUS))
            show_status(home, json_lines=False)
            assert '1 as "[red]ann"' in capsys.readouterr().out
        show_status(home, json_lines=False)
        assert "refused" not in capsys.readouterr().out
