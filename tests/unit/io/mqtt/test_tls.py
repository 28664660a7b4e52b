"""A secured line to a broker: what is asked for, what is refused, and that every message comes through it."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt.address import BrokerAddress, Tls, load_address, parse_broker_url, save_address
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Arrived, Receiver

MESSAGES, SIZE = 300, 900


class SecuredDoor:
    """A broker of a few lines behind TLS that asks for a client's certificate: it sends messages, and acknowledges what comes."""

    def __init__(self, own: trustme.LeafCert, clients: trustme.CA) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own.configure_cert(self._context)
        clients.configure_trust(self._context)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.1)
        self.port = self._listening.getsockname()[1]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                plain, _ = self._listening.accept()
                plain.settimeout(5)
                with self._context.wrap_socket(plain, server_side=True) as client:
                    self._speak(client)
            except OSError:
                continue

    def _speak(self, client: ssl.SSLSocket) -> None:
        client.settimeout(0.1)
        while not self._over.is_set():
            try:
                data = client.recv(65_536)
            except TimeoutError:
                continue
            if not data:
                return
            if data[0] == 0x10:
                client.sendall(b"\x20\x02\x00\x00")
            elif data[0] == 0x82:
                body = [b"\x00\x01t" + number.to_bytes(2, "big") + bytes(SIZE) for number in range(1, MESSAGES + 1)]
                length = bytes([len(body[0]) & 0x7F | 0x80, len(body[0]) >> 7])
                client.sendall(b"\x90\x03" + data[2:4] + b"\x01" + b"".join(b"\x32" + length + one for one in body))
            elif data[0] == 0x32:
                at = 2 + 2 + int.from_bytes(data[2:4], "big")
                client.sendall(b"\x40\x02" + data[at : at + 2])

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        self._listening.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def door(authority: trustme.CA) -> Iterator[SecuredDoor]:
    opened = SecuredDoor(authority.issue_cert("127.0.0.1"), authority)
    yield opened
    opened.close()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> Tls:
    ours = authority.issue_cert("bridge@fleet.example")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ours.private_key_and_cert_chain_pem.write_to_path(tmp_path / "ours.pem")
    return Tls(str(tmp_path / "ca.pem"), str(tmp_path / "ours.pem"))


def heard(receiver: Receiver, seconds: float = 60.0) -> list[Arrived]:
    arrived, deadline_s = list[Arrived](), time.monotonic() + seconds
    while len(arrived) < MESSAGES and time.monotonic() < deadline_s:
        arrived += receiver.poll(0.05)
    return arrived


def test_every_message_comes_through_a_secured_line(door: SecuredDoor, files: Tls) -> None:
    receiver = Receiver(BrokerAddress("127.0.0.1", door.port, tls=files), "b", ("t",))
    arrived = heard(receiver)
    receiver.close()
    assert [message.token for message in arrived] == [(1, number) for number in range(1, MESSAGES + 1)]
    assert all(len(message.payload) == SIZE for message in arrived)


def test_what_is_published_over_a_secured_line_is_acknowledged(door: SecuredDoor, files: Tls) -> None:
    with Publisher(BrokerAddress("127.0.0.1", door.port, tls=files), "p", patience_s=60) as publisher:
        publisher.publish("t", b"x")
        publisher.flush(60)
        assert publisher.acknowledged == 1


@pytest.mark.parametrize("without", ["authority", "certificate"])
def test_who_cannot_trust_or_is_not_trusted_hears_nothing_and_says_why(without: str, door: SecuredDoor, files: Tls) -> None:
    tls = Tls(None, files.cert) if without == "authority" else Tls(files.ca)
    receiver = Receiver(BrokerAddress("127.0.0.1", door.port, tls=tls), "b", ("t",))
    deadline_s = time.monotonic() + 60
    while receiver.problem is None and time.monotonic() < deadline_s:
        assert receiver.poll(0.05) == []
    receiver.close()
    assert "mqtts://127.0.0.1" in str(receiver.problem)
    if without == "authority":
        assert "certificate verify failed" in str(receiver.problem)


def test_a_secured_address_is_read_from_its_url_and_the_environment(files: Tls, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    assert files.ca is not None
    assert files.cert is not None
    environment = {
        "FLEET_MQTT_CA": files.ca,
        "FLEET_MQTT_CERT": files.cert,
        "FLEET_MQTT_PASSWORD_FILE": str(tmp_path / "password"),
    }
    address = parse_broker_url("mqtts://ops@broker.example", environment)
    assert address == BrokerAddress("broker.example", 8883, "ops", "secret", files)
    assert (str(address), "secret" in repr(address)) == ("mqtts://ops:***@broker.example:8883", False)
    save_address(tmp_path / "address", address)
    assert load_address(tmp_path / "address") == address


@pytest.mark.parametrize(
    ("url", "name", "said"),
    [
        ("mqtt://b", "FLEET_MQTT_CA", "mqtt:// is unencrypted; write mqtts://"),
        ("mqtts://b", "FLEET_MQTT_KEY", "without a certificate"),
        ("mqtts://b", "FLEET_MQTT_CA", "cannot read the certificate authorities in .*nothing.pem"),
        ("mqtts://b", "FLEET_MQTT_CERT", "cannot read the client certificate and key from .*nothing.pem"),
        ("mqtts://b", "FLEET_MQTT_PASSWORD_FILE", "cannot read the password from .*nothing.pem"),
    ],
)
def test_what_secures_a_line_and_cannot_be_had_is_said_at_once(url: str, name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=said):
        parse_broker_url(url, {name: str(tmp_path / "nothing.pem")})
