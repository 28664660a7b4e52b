"""Alerts over MQTT: a single publish, and a persistent subscription.

Rule: a message is acknowledged only by `AlertSubscription.acknowledge`. Until then the broker keeps the
message and redelivers it every few seconds with the same packet id. Messages beyond the buffer limit
are left unacknowledged at the broker. Of a buffered message, only the beginning is kept in memory, since
each publisher of alerts could otherwise fill it.
"""

from typing import Any, Final, NamedTuple

import paho.mqtt.client as paho

from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import AT_LEAST_ONCE, Connection, Publisher

_SENT_S: Final = 5.0
_TEXT: Final = 1_000  # characters of a topic and of a payload that are shown
_TEXT_BYTES: Final = 4 * _TEXT  # of UTF-8, in which a character has at most 4 bytes
_MOST: Final = 10_000  # buffered messages; the broker keeps the rest


class Buffered(NamedTuple):
    """Beginning of a message that is not acknowledged yet.

    Attributes:
        topic: topic, at most `_TEXT` characters.
        payload: at most `_TEXT_BYTES` bytes of the payload.
        packet_id: MQTT packet id.
        qos: MQTT quality of service.
    """

    topic: str
    payload: bytes
    packet_id: int
    qos: int


class AlertSubscription(Connection):
    """Subscription with a persistent session.

    The broker keeps messages for the next connection with the same client id.

    Args:
        address: address of the broker.
        client_id: MQTT client id, which names the session; a secret.
        topic: topic filter of the subscription.
    """

    def __init__(self, address: BrokerAddress, client_id: str, topic: str) -> None:
        super().__init__(address, client_id, lasting=True)
        self.topic = topic
        self.waiting: list[Buffered] = []
        self._numbers: set[int] = set()  # packet ids of the buffered messages with QoS > 0
        self.subscribed = False
        self.client.manual_ack_set(True)
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe

    def _on_connect(self, client: paho.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        super()._on_connect(client, userdata, flags, reason, properties)
        self.waiting.clear()  # their packet ids are of the previous connection; the broker redelivers them
        self._numbers.clear()
        if self.up:
            client.subscribe(self.topic, AT_LEAST_ONCE)

    def _on_subscribe(self, client: paho.Client, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        self.subscribed = True

    def _on_message(self, client: paho.Client, userdata: Any, message: paho.MQTTMessage) -> None:
        if message.retain:
            client.ack(message.mid, message.qos)  # published before this subscription existed
        elif message.mid not in self._numbers and len(self.waiting) < _MOST:
            begins = bytes(message.payload[:_TEXT_BYTES])
            self.waiting.append(Buffered(message.topic[:_TEXT], begins, message.mid, message.qos))
            if message.qos:  # QoS 0 has no packet id and no redelivery
                self._numbers.add(message.mid)

    def newest(self, count: int) -> list[tuple[str, str]]:
        """Return topic and payload, as text of at most `_TEXT` characters, of the newest ``count`` buffered messages."""
        return [(one.topic, one.payload.decode(errors="replace")[:_TEXT]) for one in self.waiting[-count:]]

    def acknowledge(self, count: int) -> None:
        """Acknowledge and drop the oldest ``count`` buffered messages."""
        acknowledged, self.waiting = self.waiting[:count], self.waiting[count:]
        for one in acknowledged:
            self._numbers.discard(one.packet_id)
            self.client.ack(one.packet_id, one.qos)
        self.run_once(0.1)


def send(address: BrokerAddress, client_id: str, topic: str, payload: bytes) -> None:
    """Publish one message and wait until the broker acknowledges it.

    Raises:
        FleetError: the broker did not acknowledge the message within five seconds.
    """
    with Publisher(address, client_id, patience_s=_SENT_S) as publisher:
        publisher.publish(topic, payload)
