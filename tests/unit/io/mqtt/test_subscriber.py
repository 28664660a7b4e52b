"""MQTT receiver and publisher against a stub broker: lost connections, redelivery and refusals."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fleetpulse.io.mqtt.address import MAX_PAYLOAD_BYTES, BrokerAddress
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.sockets import cause
from fleetpulse.io.mqtt.subscriber import AckToken, Arrived, Receiver
from tests.support.refusals import refused

CONNACK, SUBACK = b"\x20\x02\x00\x00", b"\x90\x03\x00\x01\x01"


def packet(number: int, again: bool = False) -> bytes:
    """Return a PUBLISH of QoS 1 on the topic "t"."""
    return bytes([0x3A if again else 0x32, 6]) + b"\x00\x01t" + number.to_bytes(2, "big") + b"x"


class StubBroker:
    """Broker stub that accepts one client and sends it packets.

    With ``closing``, it sends them when `finish` is called, and closes the connection.
    """

    def __init__(self, packets: bytes, closing: bool) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(10)
        self.address = BrokerAddress("127.0.0.1", self.listening.getsockname()[1])
        self.subscribed = threading.Event()
        self.done = threading.Event()
        self._packets, self._closing = packets, closing
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self.listening.accept()
        with client:
            client.settimeout(10)
            client.recv(1024)
            client.sendall(CONNACK)
            client.recv(1024)
            self.subscribed.set()
            if self._closing:
                self.done.wait(10)
            client.sendall(SUBACK + self._packets)
            if not self._closing:
                self.done.wait(10)

    def finish(self) -> None:
        """Finish while the client does not read, so that it finds the packets and the end at once."""
        self.done.set()
        self._thread.join(10)

    def close(self) -> None:
        self.finish()
        self.listening.close()


def receive_until(broker: StubBroker, enough: Callable[[Receiver, list[Arrived]], bool]) -> list[Arrived]:
    receiver, arrived, deadline_s = Receiver(broker.address, "b", ("t",)), list[Arrived](), time.monotonic() + 60
    while not enough(receiver, arrived):
        assert time.monotonic() < deadline_s, "the receiver took too long"
        arrived += receiver.poll(0.05)
    receiver.close()
    return arrived


@pytest.fixture
def brokers() -> Iterator[list[StubBroker]]:
    started: list[StubBroker] = []
    yield started
    for broker in started:
        broker.close()


def test_messages_of_a_lost_connection_are_left_for_redelivery(brokers: list[StubBroker]) -> None:
    brokers.append(StubBroker(packet(1) + packet(2), closing=True))

    def lost(receiver: Receiver, _: list[Arrived]) -> bool:
        if brokers[0].subscribed.is_set():
            brokers[0].finish()
        return receiver.connections == 1 and receiver.problem is not None

    assert receive_until(brokers[0], lost) == []


def test_redelivery_within_a_connection_is_received_once(brokers: list[StubBroker]) -> None:
    brokers.append(StubBroker(packet(1) + packet(1, again=True) + packet(2), closing=False))
    arrived = receive_until(brokers[0], lambda _, arrived: len(arrived) == 2)
    assert [message.token for message in arrived] == [(1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("error", "expected_cause"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "broker"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "broker"),
        (OSError(errno.EHOSTUNREACH, "no route"), "network"),
        (TimeoutError("timed out"), "network"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), "network"),
    ],
)
def test_connection_error_has_the_cause_broker_or_network(error: OSError, expected_cause: str) -> None:
    assert cause(error) == expected_cause


def test_unknown_host_has_the_cause_network() -> None:
    receiver = Receiver(BrokerAddress("nowhere.invalid", 1883), "b")
    receiver.poll(0)
    assert (receiver.connected, receiver.cause) == (False, "network")
    assert "no connection to the broker" in str(receiver.problem)


@pytest.mark.parametrize(
    ("topic", "size", "code"),
    [
        ("t", MAX_PAYLOAD_BYTES + 1, "payload-too-large"),
        ("a b", 1, "topic-invalid"),
        ("a/#", 1, "topic-invalid"),
        ("", 1, "topic-invalid"),
    ],
)
def test_publisher_refuses_invalid_messages_at_once(topic: str, size: int, code: str) -> None:
    with refused(code):
        Publisher(BrokerAddress("127.0.0.1", 1), "p").publish(topic, bytes(size))


class ConfirmingBroker(StubBroker):
    """Broker stub that confirms one message, and another one that was never sent."""

    def _serve(self) -> None:
        client, _ = self.listening.accept()
        with client:
            client.settimeout(10)
            client.recv(1024)
            client.sendall(CONNACK)
            client.recv(1024)
            client.sendall(SUBACK)
            sent = client.recv(1024)  # a header of two bytes, three of the topic, two of the packet id
            client.sendall(b"\x40\x02\x00\x63\x40\x02" + sent[5:7])
            self.done.wait(10)


def test_a_message_is_confirmed_when_the_broker_has_acknowledged_it(brokers: list[StubBroker]) -> None:
    brokers.append(ConfirmingBroker(b"", closing=False))
    receiver, deadline_s = Receiver(brokers[0].address, "b", ("t",)), time.monotonic() + 60
    assert receiver.send("t", b"x") is None, "it is not connected yet"
    token, confirmed = None, list[AckToken]()
    while not confirmed:
        assert time.monotonic() < deadline_s, "the receiver took too long"
        receiver.poll(0.05)
        token = token or receiver.send("t", b"x")
        confirmed += receiver.confirmed()
    assert confirmed == [token] and receiver.confirmed() == []
    receiver.close()
