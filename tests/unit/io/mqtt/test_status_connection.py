"""Connection of the publisher: its status is correct, and a lost connection is not opened again."""

from types import SimpleNamespace
from typing import Any

import paho.mqtt.client as paho
import pytest

from fleetpulse.core.messages.verdicts import MARKER, OFFLINE, ONLINE, STATUS
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import Connection
from fleetpulse.io.mqtt.status_connection import StatusConnection
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
ACCEPTED: Any = SimpleNamespace(is_failure=False)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> StatusConnection:
    """Return an accepted connection that publishes nowhere."""
    opened = StatusConnection(BrokerAddress("127.0.0.1", 1), "a client")
    monkeypatch.setattr(opened.client, "subscribe", lambda topics: None)
    opened._on_connect(opened.client, None, None, ACCEPTED, None)
    return opened


@pytest.fixture
def published(connection: StatusConnection, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes, int, bool]]:
    """Return the messages that the connection publishes."""
    sent: list[tuple[str, bytes, int, bool]] = []
    monkeypatch.setattr(connection.client, "publish", lambda *message, **named: sent.append((*message, *named.values())))
    return sent


def deliver(connection: StatusConnection, topic: str, payload: bytes, *, retain: bool) -> None:
    message = paho.MQTTMessage(1, topic.encode())
    message.payload, message.retain = payload, retain
    connection._on_message(connection.client, None, message)


def test_an_overwritten_status_is_published_again(connection: StatusConnection, published: list[Any]) -> None:
    deliver(connection, STATUS, OFFLINE, retain=True)
    assert published == [], "it is not online yet"
    connection.publish_online()
    deliver(connection, STATUS, ONLINE, retain=False)
    deliver(connection, STATUS, OFFLINE, retain=False)
    assert published == [(STATUS, ONLINE, 1, True)] * 2
    connection.close()
    assert published[2:] == [(STATUS, OFFLINE, 1, True)]


def test_the_marker_is_the_retained_one(connection: StatusConnection) -> None:
    deliver(connection, MARKER, b"of another client", retain=False)
    assert connection.marker is None
    deliver(connection, MARKER, b"{}", retain=True)
    assert connection.await_marker() == b"{}"


def test_a_refused_subscription_is_an_error(connection: StatusConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "run_once", lambda *_: None)
    connection._on_subscribe(connection.client, None, 1, [ACCEPTED, SimpleNamespace(is_failure=True)], None)
    with refused("subscription-refused"):
        connection.await_marker()


def test_a_lost_connection_is_an_error(connection: StatusConnection) -> None:
    connection._on_disconnect(connection.client, None, None, ACCEPTED, None)
    with refused("broker-lost"):
        connection.run_once(0.0)
    with refused("publisher-stopped"):
        connection.await_marker(lambda: True)
