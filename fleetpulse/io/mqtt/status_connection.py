"""Connection of a publisher of retained messages, with a retained status of its own.

Rule 1: the status is true: the broker publishes the will if the client vanishes, and the client
publishes the status again if another client overwrites it.
Rule 2: a lost connection is not opened again: the broker may have lost its retained messages, so
the caller checks them first, with a new connection.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import paho.mqtt.client as paho

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.verdicts import MARKER, OFFLINE, ONLINE, STATUS
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import AT_LEAST_ONCE, Connection

_MARKER_S: Final = 2.0  # after the subscription: a retained message follows at once; the broker does not report its absence
_SUBSCRIBED_S: Final = 30.0  # limit of the broker's answer to the subscription
_PUMP_S: Final = 0.1  # longest time between two checks whether the wait was cancelled


class StatusConnection(Connection):
    """Connection with a retained status, which reads the retained marker.

    Args:
        address: address of the broker.
        client_id: MQTT client id; the broker disconnects an earlier client with the same id.

    Attributes:
        marker: payload of the retained marker; None if the broker has none, or sent none yet.
    """

    keepalive_s = 30

    def __init__(self, address: BrokerAddress, client_id: str) -> None:
        super().__init__(address, client_id)
        self.marker: bytes | None = None
        self._subscribed_s: float | None = None
        self._is_refused = False  # whether the broker refused the subscription
        self._lost = self._online = False
        self.client.will_set(STATUS, OFFLINE, AT_LEAST_ONCE, retain=True)
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe

    def _on_connect(self, client: paho.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        super()._on_connect(client, userdata, flags, reason, properties)
        if self.up:
            client.subscribe([(MARKER, AT_LEAST_ONCE), (STATUS, AT_LEAST_ONCE)])

    def _on_disconnect(self, client: paho.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self._lost = self._lost or self.up
        super()._on_disconnect(client, userdata, flags, reason, properties)

    def _on_subscribe(self, client: paho.Client, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        self._subscribed_s = time.monotonic()
        self._is_refused = any(reason.is_failure for reason in reasons)

    def _on_message(self, client: paho.Client, userdata: Any, message: paho.MQTTMessage) -> None:
        if message.topic == MARKER and message.retain:
            self.marker = bytes(message.payload)
        elif message.topic == STATUS and message.payload != ONLINE and self._online:
            self.publish_online()  # it is the will of an earlier connection, whose end the broker noticed late

    def await_marker(self, cancelled: Callable[[], bool] = lambda: False) -> bytes | None:
        """Wait for the retained marker; return None if it does not arrive.

        Raises:
            FleetError: the broker refuses the subscription or does not answer it, the connection was
                lost, or the wait was cancelled.
        """
        limit_s = time.monotonic() + _SUBSCRIBED_S
        while self.marker is None and not (self._subscribed_s and time.monotonic() - self._subscribed_s > _MARKER_S):
            if cancelled():
                raise FleetError("the wait for the broker was cancelled", code="publisher-stopped")
            if time.monotonic() > limit_s:
                raise FleetError(
                    f"the broker at {self.address} did not answer a subscription to {MARKER} and {STATUS} within "
                    f"{_SUBSCRIBED_S:.0f} s; check that it runs, and that the user may subscribe",
                    code="broker-silent",
                )
            self.run_once(_PUMP_S)
            if self._is_refused:
                raise FleetError(
                    f"the broker at {self.address} refused the subscription to {MARKER} or {STATUS}; allow both for the user of "
                    f"fleetpulse",
                    code="subscription-refused",
                )
        return self.marker

    def publish_online(self) -> None:
        """Publish the status ``online``."""
        self._online = True
        self.client.publish(STATUS, ONLINE, AT_LEAST_ONCE, retain=True)

    def run_once(self, timeout_s: float) -> None:
        """Connect the first time, then send and receive; wait at most ``timeout_s``.

        Raises:
            FleetError: the connection was lost.
        """
        if self._lost:
            raise FleetError(
                f"{self.problem or f'the broker at {self.address} closed the connection'}; check that it runs", code="broker-lost"
            )
        super().run_once(timeout_s)

    def close(self) -> None:
        """Publish the status ``offline``, if it was ``online``, and disconnect."""
        if self.up and self._online:
            self._online = False
            self.client.publish(STATUS, OFFLINE, AT_LEAST_ONCE, retain=True)  # a clean disconnect sends no will
        super().close()
