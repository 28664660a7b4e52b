"""What waits for who listens to alerts: each message once, and none acknowledged that nobody has taken."""

from types import SimpleNamespace
from typing import Any

import paho.mqtt.client as paho
import pytest

from fleetpulse.io.mqtt import alerts
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.alerts import AlertSubscription

pytestmark = pytest.mark.unit


def message(number: int, payload: bytes, *, qos: int = 1, retain: bool = False) -> paho.MQTTMessage:
    made = paho.MQTTMessage(number, b"fleetpulse/alert/oslo")
    made.payload, made.qos, made.retain = payload, qos, retain
    return made


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> tuple[AlertSubscription, list[int]]:
    """Return a line that nobody has connected, and the numbers that it acknowledges."""
    made = AlertSubscription(BrokerAddress("127.0.0.1", 1), "a session", "fleetpulse/alert/#")
    acknowledged: list[int] = []
    monkeypatch.setattr(made.client, "ack", lambda number, _: acknowledged.append(number))
    monkeypatch.setattr(made, "run_once", lambda _: None)
    return made, acknowledged


def come(line: AlertSubscription, *messages: paho.MQTTMessage) -> list[str]:
    for one in messages:
        line._on_message(line.client, None, one)
    return [payload for _, payload in line.newest(99)]


def test_a_message_that_comes_again_before_it_is_acknowledged_waits_once(line: tuple[AlertSubscription, list[int]]) -> None:
    listening, acknowledged = line
    assert come(listening, message(1, b"smoke"), message(2, b"water"), message(1, b"smoke")) == ["smoke", "water"]
    listening.acknowledge(1)
    assert acknowledged == [1]
    assert come(listening, message(2, b"water"), message(1, b"fire")) == ["water", "fire"], "a number is given again"


def test_the_numbers_of_a_connection_end_with_it(line: tuple[AlertSubscription, list[int]]) -> None:
    listening, _ = line
    come(listening, message(1, b"smoke"))
    reason: Any = SimpleNamespace(is_failure=False)
    listening._on_connect(SimpleNamespace(subscribe=lambda *_: None), None, None, reason, None)  # pyright: ignore[reportArgumentType]
    assert come(listening, message(1, b"water")) == ["water"]


def test_messages_without_a_number_each_count(line: tuple[AlertSubscription, list[int]]) -> None:
    assert come(line[0], message(0, b"smoke", qos=0), message(0, b"water", qos=0)) == ["smoke", "water"]


def test_what_has_no_room_stays_with_the_broker(
    line: tuple[AlertSubscription, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_MOST", 2)
    listening, acknowledged = line
    come(listening, message(1, b"a"), message(2, b"b"))
    assert come(listening, message(3, b"c")) == ["a", "b"]
    assert acknowledged == [], "nobody has seen it"
    come(listening, message(4, b"old", retain=True))
    assert acknowledged == [4]
    listening.acknowledge(2)
    assert come(listening, message(3, b"c")) == ["c"]
