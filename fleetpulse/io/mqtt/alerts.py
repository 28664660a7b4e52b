"""Alerts over MQTT, for those who are told seldom: one that is sent, and a subscription that outlives who listens.

Rule: what was taken is acknowledged when its taker says so; until then the broker keeps it, and sends it again, every
few seconds and under the same number. What has no room here is left to it, unacknowledged.
"""

from typing import Any, Final

import paho.mqtt.client as paho

from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import AT_LEAST_ONCE, Connection, Publisher

_SENT_S: Final = 5.0
_TEXT: Final = 1_000  # characters of a payload
_MOST: Final = 10_000  # that wait here; the broker has the rest


class AlertLine(Connection):
    """A session that the broker keeps: what is published meanwhile waits for the next one of that name.

    Args:
        address: the broker.
        client_id: the session's name, a secret.
        topic: the subscription.
    """

    def __init__(self, address: BrokerAddress, client_id: str, topic: str) -> None:
        super().__init__(address, client_id, lasting=True)
        self.topic = topic
        self.waiting: list[paho.MQTTMessage] = []
        self._numbers: set[int] = set()  # of those that wait and are to be acknowledged
        self.subscribed = False
        self.client.manual_ack_set(True)
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe

    def _on_connect(self, client: paho.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        super()._on_connect(client, userdata, flags, reason, properties)
        self.waiting.clear()  # their numbers belong to the connection before: they come again
        self._numbers.clear()
        if self.up:
            client.subscribe(self.topic, AT_LEAST_ONCE)

    def _on_subscribe(self, client: paho.Client, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        self.subscribed = True

    def _on_message(self, client: paho.Client, userdata: Any, message: paho.MQTTMessage) -> None:
        if message.retain:
            client.ack(message.mid, message.qos)  # it was said before anybody listened
        elif message.mid not in self._numbers and len(self.waiting) < _MOST:
            self.waiting.append(message)
            if message.qos:  # what nobody acknowledges has no number, and does not come again
                self._numbers.add(message.mid)

    def newest(self, count: int) -> list[tuple[str, str]]:
        """Return the newest few that wait: topic and payload, as text."""
        return [(one.topic, one.payload.decode(errors="replace")[:_TEXT]) for one in self.waiting[-count:]]

    def acknowledge(self, count: int) -> None:
        """Let the broker forget the oldest ``count`` that wait."""
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        for one in taken:
            self._numbers.discard(one.mid)
            self.client.ack(one.mid, one.qos)
        self.drive(0.1)


def send(address: BrokerAddress, client_id: str, topic: str, payload: bytes) -> None:
    """Publish one message, and wait until the broker has it.

    Raises:
        FleetError: it does not take it within five seconds.
    """
    with Publisher(address, client_id, patience_s=_SENT_S) as publisher:
        publisher.publish(topic, payload)
