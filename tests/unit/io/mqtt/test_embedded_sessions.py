"""Sessions of a bridge at the embedded broker: one for each filter, lost together, connected after a pause."""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker import is_embedded
from fleetpulse.io.mqtt.embedded_sessions import EmbeddedSessions
from fleetpulse.io.mqtt.subscriber import Arrived, Receiver

CONNACK, SUBACK, PUBACK = b"\x20\x02\x00\x00", b"\x90\x03", b"\x40\x02"
CLEAN = 2  # flag of a CONNECT: the broker ends the session of the client id
LIMIT_S = 60


def packet(number: int, again: bool = False) -> bytes:
    """Return a PUBLISH of QoS 1 on the topic "t"."""
    return bytes([0x3A if again else 0x32, 6]) + b"\x00\x01t" + number.to_bytes(2, "big") + b"x"


class StubBroker:
    """Broker that the test itself drives, in one thread with its client."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(0)
        self.address = BrokerAddress("127.0.0.1", self.listening.getsockname()[1])
        self.clients: dict[bytes, socket.socket] = {}
        self.lives = Counter[bytes]()  # connections by client id
        self.silent = 0  # connections that were closed without a packet
        self.ended: list[socket.socket] = []  # connections that ended the session of a home made before

    def serve(self) -> None:
        """Accept the waiting connections, and their subscriptions."""
        while True:
            try:
                client, _ = self.listening.accept()
            except BlockingIOError:
                return
            client.settimeout(LIMIT_S)
            if packet := client.recv(1024):
                name = packet[14:]
                if name == b"secret":
                    assert packet[9] & CLEAN
                    client.sendall(CONNACK)
                    self.ended.append(client)
                    continue
                self.lives[name] += 1
                client.sendall(CONNACK + SUBACK + self.lives[name].to_bytes(2, "big") + b"\x01")  # the only packets with numbers
                self.clients[name] = client
            else:
                self.silent += 1
                client.close()

    def close(self) -> None:
        for client in (*self.clients.values(), *self.ended, self.listening):
            client.close()


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    with closing(StubBroker()) as broker:
        yield broker


def drive(broker: StubBroker, receiver: Receiver | EmbeddedSessions, connections: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while receiver.connections < connections or not receiver.connected:
        assert time.monotonic() < deadline_s, receiver.problem
        receiver.poll(0.01)
        broker.serve()


def read(receiver: Receiver | EmbeddedSessions, count: int) -> list[Arrived]:
    arrived, deadline_s = list[Arrived](), time.monotonic() + LIMIT_S
    while len(arrived) < count:
        assert time.monotonic() < deadline_s, arrived
        arrived += receiver.poll(0.01)
    return arrived


def test_a_copy_that_crosses_its_acknowledgement_is_dropped(broker: StubBroker) -> None:
    with closing(Receiver(broker.address, "b", ("t",))) as receiver:
        drive(broker, receiver, 1)
        [client] = broker.clients.values()
        client.sendall(packet(1) + packet(2))
        receiver.ack(message.token for message in read(receiver, 2))
        client.sendall(packet(1, again=True) + packet(2) + packet(3, again=True))
        assert [message.token for message in read(receiver, 2)] == [(1, 2), (1, 3)]


def test_each_filter_has_a_session_and_each_message_is_acknowledged_in_its_own(broker: StubBroker, tmp_path: Path) -> None:
    with closing(EmbeddedSessions(broker.address, "secret", ("a/#", "b/#"), tmp_path / "record")) as sessions:
        drive(broker, sessions, 1)
        assert sorted(json.loads((tmp_path / "record").read_text())) == ["a/#", "b/#"]
        assert len(broker.clients) == 2 and broker.silent == 0, "the broker has no sessions yet, so nothing to redeliver"
        for number, client in enumerate(broker.clients.values(), 1):
            client.recv(1024)  # SUBSCRIBE
            client.sendall(packet(number))
        arrived = read(sessions, 2)
        assert len(broker.ended) == 1
        assert len({message.token for message in arrived}) == 2
        sessions.ack(message.token for message in arrived)
        for number, client in enumerate(broker.clients.values(), 1):
            assert client.recv(1024) == PUBACK + number.to_bytes(2, "big")


def test_sessions_are_lost_together_and_connect_when_the_broker_was_reachable_for_a_while(
    broker: StubBroker, tmp_path: Path
) -> None:
    with closing(EmbeddedSessions(broker.address, "secret", ("a/#", "b/#"), tmp_path / "record", settle_s=0.05)) as sessions:
        drive(broker, sessions, 1)
        lost, other = broker.clients.values()
        other.sendall(packet(1))
        [before] = read(sessions, 1)
        lost.close()
        deadline_s = time.monotonic() + LIMIT_S
        while sessions.connected:
            assert time.monotonic() < deadline_s
            other.sendall(packet(2))
            assert not any(sessions.poll(0.01)) or sessions.connected, "messages of a lost connection are redelivered"
        assert all(one.socket is None for one in sessions._receivers)  # pyright: ignore[reportPrivateUsage]
        drive(broker, sessions, 2)
        assert broker.silent == 2, "each session has found the broker reachable before it connected"
        assert [*broker.lives.values()] == [2, 2], "the client ids are those of before"
        sessions.ack([before.token])
        for client in broker.clients.values():
            assert client.recv(1024)[0] == 0x82, "SUBSCRIBE"
            client.settimeout(0)
            with pytest.raises(BlockingIOError):  # no acknowledgement of a message of the connection before
                client.recv(1024)


def test_a_session_that_the_broker_has_is_served_without_a_rule_for_its_filter(broker: StubBroker, tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text('["a/#", "old/+"]')
    with closing(EmbeddedSessions(broker.address, "secret", ("a/#", "new/+"), record, settle_s=0.01)) as sessions:
        drive(broker, sessions, 1)
    assert json.loads(record.read_text()) == ["a/#", "new/+", "old/+"]
    assert broker.silent == len(broker.clients) == 3


def test_the_embedded_broker_is_recognised_by_its_password(tmp_path: Path) -> None:
    assert not is_embedded(tmp_path, BrokerAddress("h", 1, "u", "p")), "it never started"
    (tmp_path / "credentials.json").write_text('{"username": "u", "password": "p"}')
    assert is_embedded(tmp_path, BrokerAddress("h", 1, "u", "p"))
    assert not is_embedded(tmp_path, BrokerAddress("h", 1, "u", "other"))
