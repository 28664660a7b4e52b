"""Subscription to alerts: a message is buffered once, and acknowledged only on request."""

from types import SimpleNamespace
from typing import Any

import paho.mqtt.client as paho
import pytest

from fleetpulse.io.mqtt import alerts
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.alerts import AlertSubscription

pytestmark = pytest.mark.unit


def message(packet_id: int, payload: bytes, *, qos: int = 1, retain: bool = False) -> paho.MQTTMessage:
    created = paho.MQTTMessage(packet_id, b"fleetpulse/alert/oslo")
    created.payload, created.qos, created.retain = payload, qos, retain
    return created


@pytest.fixture
def subscribed(monkeypatch: pytest.MonkeyPatch) -> tuple[AlertSubscription, list[int]]:
    """Return a subscription without a connection, and the packet ids that it acknowledges."""
    subscription = AlertSubscription(BrokerAddress("127.0.0.1", 1), "a session", "fleetpulse/alert/#")
    acknowledged: list[int] = []
    monkeypatch.setattr(subscription.client, "ack", lambda packet_id, _: acknowledged.append(packet_id))
    monkeypatch.setattr(subscription, "run_once", lambda _: None)
    return subscription, acknowledged


def deliver(subscription: AlertSubscription, *messages: paho.MQTTMessage) -> list[str]:
    for one in messages:
        subscription._on_message(subscription.client, None, one)
    return [payload for _, payload in subscription.newest(99)]


def test_redelivered_message_is_buffered_once_until_it_is_acknowledged(subscribed: tuple[AlertSubscription, list[int]]) -> None:
    subscription, acknowledged = subscribed
    assert deliver(subscription, message(1, b"smoke"), message(2, b"water"), message(1, b"smoke")) == ["smoke", "water"]
    subscription.acknowledge(1)
    assert acknowledged == [1]
    assert deliver(subscription, message(2, b"water"), message(1, b"fire")) == ["water", "fire"], "a packet id is reused"


def test_packet_ids_are_forgotten_at_a_new_connection(subscribed: tuple[AlertSubscription, list[int]]) -> None:
    subscription, _ = subscribed
    deliver(subscription, message(1, b"smoke"))
    reason: Any = SimpleNamespace(is_failure=False)
    subscription._on_connect(SimpleNamespace(subscribe=lambda *_: None), None, None, reason, None)  # pyright: ignore[reportArgumentType]
    assert deliver(subscription, message(1, b"water")) == ["water"]


def test_messages_without_packet_ids_are_all_buffered(subscribed: tuple[AlertSubscription, list[int]]) -> None:
    assert deliver(subscribed[0], message(0, b"smoke", qos=0), message(0, b"water", qos=0)) == ["smoke", "water"]


def test_messages_beyond_the_buffer_limit_stay_with_the_broker(
    subscribed: tuple[AlertSubscription, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_MOST", 2)
    subscription, acknowledged = subscribed
    deliver(subscription, message(1, b"a"), message(2, b"b"))
    assert deliver(subscription, message(3, b"c")) == ["a", "b"]
    assert acknowledged == [], "the caller has not seen them"
    deliver(subscription, message(4, b"old", retain=True))
    assert acknowledged == [4]
    subscription.acknowledge(2)
    assert deliver(subscription, message(3, b"c")) == ["c"]


def test_only_the_beginning_of_a_large_message_is_kept_in_memory(subscribed: tuple[AlertSubscription, list[int]]) -> None:
    subscription, acknowledged = subscribed
    text = "\U0001f525" * 1_000  # 4 bytes each
    for packet_id in range(1, 201):
        large = message(packet_id, text.encode() + bytes(100_000))
        large.topic = b"fleetpulse/alert/" + b"x" * 60_000
        deliver(subscription, large)
    assert sum(len(one.payload) + len(one.topic) for one in subscription.waiting) <= 200 * 5_000
    assert subscription.newest(1) == [(f"fleetpulse/alert/{'x' * 983}", text)]
    subscription.acknowledge(len(subscription.waiting))
    assert acknowledged == [*range(1, 201)]
