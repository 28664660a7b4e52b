"""TLS and client certificates of the embedded broker, and replaced client ids, with the real nats-server."""

import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.acl import Role, grant, grant_certificate, revoke
from fleetpulse.io.mqtt.address import BrokerAddress, Tls
from fleetpulse.io.mqtt.embedded.broker import Broker, ListenerTls, await_admission, renew_access
from fleetpulse.io.mqtt.embedded.takeovers import read_takeovers
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Receiver
from tests.support import wait
from tests.support.refusals import refused

await_that = partial(wait.await_that, limit_s=60, pause_s=0.02)
HEARTBEAT = "fleet/s/{}/heartbeat"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> ListenerTls:
    """Files of a listener that requires certificates."""
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = issued(tmp_path, authority, "fleet")
    ca = str(tmp_path / "ca.pem")
    return ListenerTls(*served(tmp_path, authority), authority=ca, client_authority=ca, own_certificate=own)


def served(folder: Path, authority: trustme.CA) -> tuple[str, str]:
    """Write a new certificate of the broker and its key; return both paths."""
    certificate = authority.issue_cert("127.0.0.1")
    for name, blob in (("cert", certificate.cert_chain_pems[0]), ("key", certificate.private_key_pem)):
        blob.write_to_path(folder / f"{name}.pem")
    return str(folder / "cert.pem"), str(folder / "key.pem")


def issued(folder: Path, authority: trustme.CA, *names: str, common_name: str | None = None) -> str:
    """Write a client certificate with its key; return the path."""
    path = folder / f"client-{len(list(folder.iterdir()))}.pem"
    authority.issue_cert(*names, common_name=common_name).private_key_and_cert_chain_pem.write_to_path(path)
    return str(path)


def subject(path: str) -> str:
    return x509.load_pem_x509_certificate(Path(path).read_bytes()).subject.rfc4514_string()


@contextmanager
def running(folder: Path, tls: ListenerTls | None) -> Iterator[BrokerAddress]:
    broker = Broker(folder / "bröker", folder / "broker.log", port=0, tls=tls)
    try:
        yield broker.start()
    finally:
        broker.stop()


def await_connection(receiver: Receiver) -> None:
    await_that(lambda: receiver.poll(0.05) or receiver.connected)


def send(address: BrokerAddress, *devices: str) -> None:
    with Publisher(address, "sends", patience_s=10) as publisher:
        for device in devices:
            publisher.publish(HEARTBEAT.format(device), b"{}")


@contextmanager
def connection(address: BrokerAddress) -> Iterator[ssl.SSLSocket]:
    secured = address.context()
    assert secured is not None
    with (
        socket.create_connection((address.host, address.port), timeout=10) as plain,
        secured.wrap_socket(plain, server_hostname=address.host) as wrapped,
    ):
        yield wrapped


def serial_number(address: BrokerAddress) -> int:
    """Return the serial number of the certificate that the broker shows."""
    with connection(address) as shown:
        certificate = shown.getpeercert(binary_form=True)
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


def connack(address: BrokerAddress, client_id: str) -> int | None:
    """Return the broker's answer to CONNECT; None if it closed the connection."""
    try:
        with connection(address) as client:
            client.sendall(codec.encode_connect(client_id, address.username, address.password, keep_session=False))
            answer = client.recv(4)
    except (ssl.SSLError, ConnectionError):
        return None
    return answer[3] if len(answer) == 4 else None


def answer_on_nats_port(log: Path, username: str, password: str) -> bytes:
    """Return the answer to a login with the NATS protocol."""
    port = re.findall(r"Listening for client connections on 127.0.0.1:(\d+)", log.read_text())[-1]
    with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as client, client.makefile("rb") as lines:
        lines.readline()
        login = json.dumps({"user": username, "pass": password, "verbose": True})
        client.sendall(f"CONNECT {login}\r\n".encode())
        return lines.readline()


def test_a_certificate_admits_its_user_and_no_other(files: ListenerTls, authority: trustme.CA, tmp_path: Path) -> None:
    folder = tmp_path / "bröker"
    by_subject = issued(tmp_path, authority, "pump.acme.example", common_name="pump-1")
    by_name = issued(tmp_path, authority, "pump-2@acme.example")
    unknown, foreign = issued(tmp_path, authority, "pump-3"), issued(tmp_path, trustme.CA(), "pump-2@acme.example")
    grant_certificate(folder, "pump-1", Role.DEVICE, subject(by_subject))
    with running(tmp_path, files) as own:
        observer, received = Receiver(own, "observer", ("fleet/#",), persistent=False), list[str]()
        await_connection(observer)
        grant_certificate(folder, "pump-2", Role.DEVICE, "pump-2@acme.example")
        password = grant(folder, "pump-3", Role.DEVICE)
        assert renew_access(folder)

        def device(certificate: str | None, username: str | None = None, password: str | None = None) -> BrokerAddress:
            return replace(own, username=username, password=password, tls=Tls(files.authority, certificate))

        def listen() -> list[str]:
            received.extend(message.topic for message in observer.poll(0.05))
            return received

        assert await_admission(device(by_name))
        send(device(by_subject), "pump-2", "pump-1")
        send(device(by_name), "pump-1", "pump-2")
        await_that(lambda: HEARTBEAT.format("pump-2") in listen())
        assert received == [HEARTBEAT.format("pump-1"), HEARTBEAT.format("pump-2")]
        assert connack(device(unknown, "pump-3", password), "a") == 0, "a name and a password"
        assert connack(device(unknown), "a") == 5, "a name without the password"
        assert connack(device(unknown, "fleet", own.password), "a") == 5, "the certificate names the user"
        assert connack(device(foreign), "a") is None
        assert connack(device(None, "pump-3", password), "a") is None
        revoke(folder, "pump-1")
        assert renew_access(folder)
        await_that(lambda: not await_admission(device(by_subject), 0), what="the revoked user is still admitted")
        assert (observer.connected, observer.connections) == (True, 1)
        observer.close()


def test_a_reload_serves_the_new_certificate_and_keeps_connections(
    files: ListenerTls, authority: trustme.CA, tmp_path: Path
) -> None:
    folder = tmp_path / "bröker"
    with running(tmp_path, files) as own:
        receiver = Receiver(own, "keeps", ("fleet/#",))
        await_connection(receiver)
        before = serial_number(own)
        served(tmp_path, authority)
        assert renew_access(folder)
        await_that(lambda: serial_number(own) != before, what="the broker still shows the old certificate")
        send(own, "pump-1")
        await_that(lambda: receiver.poll(0.05))
        assert receiver.connections == 1
        (tmp_path / "key.pem").write_text("")
        with refused("access-not-reloaded"):
            renew_access(folder)
        receiver.close()


def test_passwords_work_over_tls_without_certificates_of_clients(
    files: ListenerTls, authority: trustme.CA, tmp_path: Path
) -> None:
    folder, certificate = tmp_path / "bröker", issued(tmp_path, authority, "pump.acme.example", common_name="pump-2")
    with_passwords = replace(files, client_authority="", own_certificate="")
    password = grant(folder, "pump-1", Role.DEVICE)
    grant_certificate(folder, "pump-2", Role.DEVICE, subject(certificate))
    with running(tmp_path, with_passwords) as own:
        assert connack(replace(own, username="pump-1", password=password), "a") == 0
        assert connack(replace(own, username=subject(certificate), password=None), "a") in (4, 5)
        for user, secret in (("fleet", password), ("pump-1", password), (subject(certificate), "")):
            assert answer_on_nats_port(tmp_path / "broker.log", user, secret).startswith(b"-ERR 'Authorization Violation'")
        with refused("publisher-timeout", match=r"closed the connection|no connection|does not answer"):
            Publisher(replace(own, tls=None), "plain", patience_s=1).__enter__()


def test_a_certificate_for_another_host_is_reported_at_once(files: ListenerTls, authority: trustme.CA, tmp_path: Path) -> None:
    authority.issue_cert("broker.example").private_key_and_cert_chain_pem.write_to_path(tmp_path / "other.pem")
    other = str(tmp_path / "other.pem")
    with (
        refused("broker-certificate-refused", match="127.0.0.1"),
        running(tmp_path, replace(files, certificate=other, key=other)),
    ):
        pass


def test_a_replaced_client_id_is_reported_and_its_messages_stay_with_their_user(tmp_path: Path) -> None:
    folder, control = tmp_path / "bröker", "fleet/s/pump-2/control"
    passwords = {name: grant(folder, name, Role.DEVICE) for name in ("pump-1", "pump-2")}
    with running(tmp_path, None) as own:
        thief, owner = (replace(own, username=name, password=password) for name, password in passwords.items())
        victim = Receiver(owner, "pump-2", (control,))
        await_connection(victim)
        intruder = Receiver(thief, "pump-2")
        await_connection(intruder)
        await_that(lambda: victim.poll(0.05) or not victim.connected)
        victim.close()
        with Publisher(own, "sends", patience_s=10) as publisher:
            publisher.publish(control, b"{}")
        limit_s = time.monotonic() + 0.5
        while time.monotonic() < limit_s:
            assert intruder.poll(0.05) == []
        intruder.close()
    (found,) = read_takeovers(tmp_path / "broker.log")
    assert (found.client_id, found.times, found.address) == ("pump-2", 1, "127.0.0.1")
