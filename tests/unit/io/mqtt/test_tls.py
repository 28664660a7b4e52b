"""TLS connections to a broker: both sides check certificates, and every message is delivered."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from fleetpulse.core.operations.secret_files import exposed_secret
from fleetpulse.io.mqtt.address import BrokerAddress, Tls, load_address, parse_broker_url, save_address
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Arrived, Receiver
from tests.support.refusals import refused

MESSAGES, SIZE = 300, 900


class TlsBroker:
    """Broker stub with TLS that requires a client certificate.

    It sends messages to a subscriber, and acknowledges published ones.
    """

    def __init__(self, certificate: trustme.LeafCert, client_authority: trustme.CA) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(self._context)
        client_authority.configure_trust(self._context)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.1)
        self.port = self._listening.getsockname()[1]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            try:
                plain, _ = self._listening.accept()
                plain.settimeout(5)
                with self._context.wrap_socket(plain, server_side=True) as client:
                    self._answer(client)
            except OSError:
                continue

    def _answer(self, client: ssl.SSLSocket) -> None:
        client.settimeout(0.1)
        while not self._stopped.is_set():
            try:
                data = client.recv(65_536)
            except TimeoutError:
                continue
            if not data:
                return
            if data[0] == 0x10:
                client.sendall(b"\x20\x02\x00\x00")
            elif data[0] == 0x82:
                packets = [b"\x00\x01t" + number.to_bytes(2, "big") + bytes(SIZE) for number in range(1, MESSAGES + 1)]
                length = bytes([len(packets[0]) & 0x7F | 0x80, len(packets[0]) >> 7])
                client.sendall(b"\x90\x03" + data[2:4] + b"\x01" + b"".join(b"\x32" + length + one for one in packets))
            elif data[0] == 0x32:
                begin = 2 + 2 + int.from_bytes(data[2:4], "big")
                client.sendall(b"\x40\x02" + data[begin : begin + 2])

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(10)
        self._listening.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def broker(authority: trustme.CA) -> Iterator[TlsBroker]:
    started = TlsBroker(authority.issue_cert("127.0.0.1"), authority)
    yield started
    started.close()


@pytest.fixture
def tls_files(authority: trustme.CA, tmp_path: Path) -> Tls:
    certificate = authority.issue_cert("bridge@fleet.example")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    return Tls(str(tmp_path / "ca.pem"), str(tmp_path / "client.pem"))


def receive_all(receiver: Receiver, seconds: float = 60.0) -> list[Arrived]:
    arrived, deadline_s = list[Arrived](), time.monotonic() + seconds
    while len(arrived) < MESSAGES and time.monotonic() < deadline_s:
        arrived += receiver.poll(0.05)
    return arrived


def test_receiver_gets_every_message_over_tls(broker: TlsBroker, tls_files: Tls) -> None:
    receiver = Receiver(BrokerAddress("127.0.0.1", broker.port, tls=tls_files), "b", ("t",))
    arrived = receive_all(receiver)
    receiver.close()
    assert [message.token for message in arrived] == [(1, number) for number in range(1, MESSAGES + 1)]
    assert all(len(message.payload) == SIZE for message in arrived)


def test_messages_published_over_tls_are_acknowledged(broker: TlsBroker, tls_files: Tls) -> None:
    with Publisher(BrokerAddress("127.0.0.1", broker.port, tls=tls_files), "p", patience_s=60) as publisher:
        publisher.publish("t", b"x")
        publisher.flush(60)
        assert publisher.acknowledged == 1


@pytest.mark.parametrize("missing", ["authority", "certificate"])
def test_receiver_without_authority_or_certificate_reports_the_problem(missing: str, broker: TlsBroker, tls_files: Tls) -> None:
    tls = Tls(None, tls_files.cert) if missing == "authority" else Tls(tls_files.ca)
    receiver = Receiver(BrokerAddress("127.0.0.1", broker.port, tls=tls), "b", ("t",))
    deadline_s = time.monotonic() + 60
    while receiver.problem is None and time.monotonic() < deadline_s:
        assert receiver.poll(0.05) == []
    receiver.close()
    assert "mqtts://127.0.0.1" in str(receiver.problem)
    if missing == "authority":
        assert "certificate verify failed" in str(receiver.problem)


def test_tls_address_is_read_from_url_and_environment(tls_files: Tls, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    assert tls_files.ca is not None
    assert tls_files.cert is not None
    environment = {
        "FLEET_MQTT_CA": tls_files.ca,
        "FLEET_MQTT_CERT": tls_files.cert,
        "FLEET_MQTT_PASSWORD_FILE": str(tmp_path / "password"),
    }
    address = parse_broker_url("mqtts://ops@broker.example", environment)
    assert address == BrokerAddress("broker.example", 8883, "ops", "secret", tls_files)
    assert (str(address), "secret" in repr(address)) == ("mqtts://ops:***@broker.example:8883", False)
    save_address(tmp_path / "address", address)
    assert load_address(tmp_path / "address") == address


def test_password_and_client_key_that_other_users_can_read_are_refused(tls_files: Tls, tmp_path: Path) -> None:
    folder = tmp_path / "public"
    folder.mkdir(0o755)
    password, key = folder / "password", folder / "key"
    password.write_text("hush-hush")
    assert tls_files.cert is not None
    key.write_text(Path(tls_files.cert).read_text())
    for file, variable in ((password, "FLEET_MQTT_PASSWORD_FILE"), (key, "FLEET_MQTT_CERT")):
        file.chmod(0o640)
        with refused("secret-exposed", match="mode 640.*chmod 600") as caught:
            parse_broker_url("mqtts://b", {variable: str(file)})
        assert "hush" not in str(caught.value)
        file.chmod(0o600)
        parse_broker_url("mqtts://b", {variable: str(file)})


def test_secret_of_another_user_is_accepted_such_as_one_mounted_into_a_container(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    tmp_path.chmod(0o755)
    (tmp_path / "password").chmod(0o444)
    file, folder = (tmp_path / "password").stat(), tmp_path.stat()
    assert exposed_secret(tmp_path / "password", "a password", file, folder, file.st_uid) is not None
    assert exposed_secret(tmp_path / "password", "a password", file, folder, file.st_uid + 1) is None


@pytest.mark.parametrize(
    ("url", "variable", "code"),
    [
        ("mqtt://b", "FLEET_MQTT_CA", "tls-on-open-url"),
        ("mqtts://b", "FLEET_MQTT_KEY", "tls-certificate-missing"),
        ("mqtts://b", "FLEET_MQTT_CA", "tls-authorities-unreadable"),
        ("mqtts://b", "FLEET_MQTT_CERT", "tls-certificate-unreadable"),
        ("mqtts://b", "FLEET_MQTT_PASSWORD_FILE", "password-unreadable"),
    ],
)
def test_invalid_tls_settings_are_refused_at_once(url: str, variable: str, code: str, tmp_path: Path) -> None:
    with refused(code):
        parse_broker_url(url, {variable: str(tmp_path / "nothing.pem")})
