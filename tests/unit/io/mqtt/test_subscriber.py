"""A receiver against a broker of a few lines, which does what a real one does only now and then."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt.address import MAX_PAYLOAD_BYTES, BrokerAddress
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.sockets import cause
from fleetpulse.io.mqtt.subscriber import Arrived, Receiver

CONNACK, SUBACK = b"\x20\x02\x00\x00", b"\x90\x03\x00\x01\x01"


def packet(number: int, again: bool = False) -> bytes:
    """Return a PUBLISH of QoS 1 on the topic "t"."""
    return bytes([0x3A if again else 0x32, 6]) + b"\x00\x01t" + number.to_bytes(2, "big") + b"x"


class Door:
    """Lets one client in and sends it what it is told; ``closing`` closes the connection behind it, once `let_go` is called."""

    def __init__(self, sent: bytes, closing: bool) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(10)
        self.address = BrokerAddress("127.0.0.1", self.listening.getsockname()[1])
        self.asked = threading.Event()  # the client has subscribed
        self.done = threading.Event()
        self._sent, self._closing = sent, closing
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self.listening.accept()
        with client:
            client.settimeout(10)
            client.recv(1024)
            client.sendall(CONNACK)
            client.recv(1024)
            self.asked.set()
            if self._closing:
                self.done.wait(10)
            client.sendall(SUBACK + self._sent)
            if not self._closing:
                self.done.wait(10)

    def let_go(self) -> None:
        """Send and close while nobody reads, so that the reader finds both at once."""
        self.done.set()
        self._thread.join(10)

    def close(self) -> None:
        self.let_go()
        self.listening.close()


def received(door: Door, enough: Callable[[Receiver, list[Arrived]], bool]) -> list[Arrived]:
    receiver, arrived, deadline_s = Receiver(door.address, "b", ("t",)), list[Arrived](), time.monotonic() + 60
    while not enough(receiver, arrived):
        assert time.monotonic() < deadline_s, "waited too long"
        arrived += receiver.poll(0.05)
    receiver.close()
    return arrived


@pytest.fixture
def doors() -> Iterator[list[Door]]:
    opened: list[Door] = []
    yield opened
    for door in opened:
        door.close()


def test_what_came_before_the_connection_was_lost_is_left_to_come_again(doors: list[Door]) -> None:
    doors.append(Door(packet(1) + packet(2), closing=True))

    def lost(receiver: Receiver, _: list[Arrived]) -> bool:
        if doors[0].asked.is_set():
            doors[0].let_go()
        return receiver.connections == 1 and receiver.problem is not None

    assert received(doors[0], lost) == []


def test_what_is_sent_again_within_a_connection_is_taken_once(doors: list[Door]) -> None:
    doors.append(Door(packet(1) + packet(1, again=True) + packet(2), closing=False))
    arrived = received(doors[0], lambda _, arrived: len(arrived) == 2)
    assert [message.token for message in arrived] == [(1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("error", "lies_with"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "broker"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "broker"),
        (OSError(errno.EHOSTUNREACH, "no way"), "network"),
        (TimeoutError("timed out"), "network"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), "network"),
    ],
)
def test_a_loss_lies_with_the_broker_or_with_the_way_to_it(error: OSError, lies_with: str) -> None:
    assert cause(error) == lies_with


def test_a_name_that_nobody_knows_lies_with_the_network() -> None:
    receiver = Receiver(BrokerAddress("nowhere.invalid", 1883), "b")
    receiver.poll(0)
    assert (receiver.connected, receiver.cause) == (False, "network")
    assert "no connection to the broker" in str(receiver.problem)


@pytest.mark.parametrize(
    ("topic", "size", "said"),
    [("t", MAX_PAYLOAD_BYTES + 1, "1,048,577"), ("a b", 1, "spaces"), ("a/#", 1, "#"), ("", 1, "topic")],
)
def test_what_a_broker_would_never_acknowledge_is_refused_at_once(topic: str, size: int, said: str) -> None:
    with pytest.raises(FleetError, match=said):
        Publisher(BrokerAddress("127.0.0.1", 1), "p").publish(topic, bytes(size))
