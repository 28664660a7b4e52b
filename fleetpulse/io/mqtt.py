"""MQTT, by paho: a publisher that knows what was acknowledged, and a receiver that acknowledges when told to.

Nothing here depends on MQTT 5: the embedded broker speaks 3.1.1.
"""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from fleetpulse.core.errors import FleetError
from fleetpulse.io.broker import BrokerAddress

_CONNECT_S: Final = 20
_KEEPALIVE_S: Final = 30


def _client(address: BrokerAddress, client_id: str, *, persistent: bool, manual_ack: bool) -> paho.Client:
    client = paho.Client(
        CallbackAPIVersion.VERSION2,
        client_id=client_id,
        clean_session=not persistent,
        protocol=paho.MQTTv311,
        manual_ack=manual_ack,
    )
    if address.username:
        client.username_pw_set(address.username, address.password)
    client.connect_timeout = 5
    return client


class Publisher:
    """Publishes with QoS 1, no more than a window ahead of the broker's acknowledgements.

    Args:
        address: the broker.
        client_id: unique at that broker.
        window: messages that may be on the way.
    """

    def __init__(self, address: BrokerAddress, client_id: str, window: int = 500) -> None:
        self.address = address
        self.window = window
        self.published = 0
        self._client = _client(address, client_id, persistent=False, manual_ack=False)
        self._client.max_inflight_messages_set(window)
        self._client.max_queued_messages_set(0)
        self._client.on_publish = self._on_publish
        self._refused: str | None = None
        self._client.on_connect = self._on_connect
        self.acknowledged = 0

    def __enter__(self) -> Self:
        try:
            self._client.connect(self.address.host, self.address.port, _KEEPALIVE_S)
        except OSError as error:
            raise FleetError(_unreachable(self.address, error)) from None
        self._client.loop_start()
        limit = time.monotonic() + _CONNECT_S
        while not self._client.is_connected():
            if self._refused or time.monotonic() > limit:
                self._client.loop_stop()
                raise FleetError(_unreachable(self.address, self._refused or "no answer"))
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        self._refused = str(reason) if reason.is_failure else None

    def _on_publish(self, *_: Any) -> None:
        self.acknowledged += 1

    def publish(self, topic: str, payload: bytes, timeout_s: float = 60) -> None:
        """Publish one message, waiting for room in the window.

        Raises:
            FleetError: the broker has not acknowledged anything for so long.
        """
        self._await(self.window - 1, timeout_s)
        self._client.publish(topic, payload, qos=1)
        self.published += 1

    def flush(self, timeout_s: float = 60) -> None:
        """Wait until everything is acknowledged.

        Raises:
            FleetError: it is not, within the time.
        """
        self._await(0, timeout_s)

    def _await(self, on_the_way: int, timeout_s: float) -> None:
        limit, before = time.monotonic() + timeout_s, self.acknowledged
        while self.published - self.acknowledged > on_the_way:
            if self.acknowledged != before:
                limit, before = time.monotonic() + timeout_s, self.acknowledged
            if time.monotonic() > limit:
                raise FleetError(
                    f"the broker at {self.address.host}:{self.address.port} has acknowledged nothing for {timeout_s:.0f} s; "
                    f"check its log, and give the command again"
                )
            time.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Arrived:
    """One message that the broker delivered.

    Attributes:
        topic: its topic.
        payload: its bytes.
        retained: whether it is a copy that the broker kept, delivered on subscribing.
        token: what `Receiver.ack` needs; it belongs to one connection.
    """

    topic: str
    payload: bytes
    retained: bool
    token: tuple[int, int]


class Receiver:
    """Receives over a persistent session, in the thread that polls it.

    Args:
        address: the broker.
        client_id: names the session; the broker keeps what comes while we are away.
        persistent: False forgets the session at the end.
    """

    def __init__(self, address: BrokerAddress, client_id: str, *, persistent: bool = True) -> None:
        self.address = address
        self.connected = False
        self.connections = 0
        self._topics: set[str] = set()
        self._arrived: list[Arrived] = []
        self._client = _client(address, client_id, persistent=persistent, manual_ack=True)
        self._client.on_message = self._on_message
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_subscribe = self._on_subscribe
        self.subscribed = False
        self._retry_at = 0.0
        self._backoff_s = 0.1
        self.problem: str | None = None

    def subscribe(self, topics: set[str]) -> None:
        """Receive these topics, now and after every reconnection; others no longer."""
        gone, self._topics = self._topics - topics, set(topics)
        if self.connected:
            if gone:
                self._client.unsubscribe(sorted(gone))
            self._ask_for_topics()

    def _ask_for_topics(self) -> None:
        self.subscribed = False
        if self._topics:
            self._client.subscribe([(topic, 1) for topic in sorted(self._topics)])

    def _on_subscribe(self, *_: Any) -> None:
        self.subscribed = True

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.is_failure:
            self.problem = f"the broker refuses us: {reason}"
            return
        self.connected, self.problem, self._backoff_s = True, None, 0.1
        self.connections += 1
        self._ask_for_topics()

    def _on_disconnect(self, *_: Any) -> None:
        self.connected = self.subscribed = False
        self._arrived.clear()  # their tokens died with the connection; the broker delivers them again

    def _on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            topic = "\ufffd"
        token = (message.mid, message.qos)
        self._arrived.append(Arrived(topic, bytes(message.payload), bool(message.retain), token))

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return what arrived, waiting so long at most; reconnects where the connection is lost."""
        if self._client.socket() is None:
            self._connect(timeout_s)
            return []
        self._client.loop(timeout_s)
        for _ in range(2_000):
            before = len(self._arrived)
            if not self.connected or self._client.socket() is None:
                break
            self._client.loop(0)
            if len(self._arrived) == before:
                break
        arrived, self._arrived = self._arrived, []
        return arrived

    def _connect(self, timeout_s: float) -> None:
        if time.monotonic() < self._retry_at:
            time.sleep(min(timeout_s, 0.1))
            return
        try:
            self._client.connect(self.address.host, self.address.port, _KEEPALIVE_S)
        except OSError as error:
            self.problem = _unreachable(self.address, error)
            self._retry_at = time.monotonic() + self._backoff_s
            self._backoff_s = min(self._backoff_s * 2, 5.0)

    def ack(self, tokens: list[tuple[int, int]]) -> None:
        """Acknowledge what is safe."""
        for mid, qos in tokens:
            self._client.ack(mid, qos)

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish one message with QoS 1; whether it arrives is seen when it comes back."""
        self._client.publish(topic, payload, qos=1)

    def close(self) -> None:
        """Leave; a persistent session stays at the broker."""
        self._client.disconnect()
        self._client.loop(0.1)


def _unreachable(address: BrokerAddress, reason: object) -> str:
    return (
        f"cannot reach the broker at {address.host}:{address.port} ({reason}); check that it runs, and the user and "
        f"password in FLEET_MQTT_USERNAME and FLEET_MQTT_PASSWORD"
    )
