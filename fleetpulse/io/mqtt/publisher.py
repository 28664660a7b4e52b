"""MQTT publisher on paho with acknowledgements, run by the caller's thread.

Rule: every wait is bounded, and a lost connection is retried with growing pauses.
"""

import select
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.reasoncodes import ReasonCode

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt.address import MAX_PAYLOAD_BYTES, BrokerAddress
from fleetpulse.io.mqtt.sockets import CONNECT_S, Backoff, has_buffered_bytes, tune

AT_LEAST_ONCE: Final = 1


class Connection:
    """Connection of one MQTT client, reconnected when lost.

    Attributes:
        keepalive_s: longest silence of this client, seconds (MQTT keep-alive), after which the broker
            counts it as dead. With 0 there is none, and TCP detects a dead client.

    Args:
        address: address of the broker.
        client_id: MQTT client id.
        lasting: whether the broker keeps the session and its messages while the client is
            disconnected.
    """

    keepalive_s = 0

    def __init__(self, address: BrokerAddress, client_id: str, *, lasting: bool = False) -> None:
        self.address = address
        self.problem: str | None = None
        self.up = False  # the broker has accepted the connection
        self._since_s = 0.0
        self._pauses = Backoff()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id, clean_session=not lasting, protocol=paho.MQTTv311)
        self.client.connect_timeout = CONNECT_S
        self.client.max_inflight_messages_set(0)
        self.client.on_connect = self._on_connect
        self.client.on_disconnect = self._on_disconnect
        self.client.on_socket_open = _on_socket_open
        if secured := address.context():
            self.client.tls_set_context(secured)
        if address.username:
            self.client.username_pw_set(address.username, address.password)

    def _on_connect(self, client: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        if reason.is_failure:
            self.problem = f"the broker at {self.address} refused the connection: {reason}"
            return
        self.up, self.problem = True, None
        self._pauses.reset()

    def _on_disconnect(self, client: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        self.up = False
        self.problem = self.problem or f"the broker at {self.address} closed the connection"

    def run_once(self, timeout_s: float) -> None:
        """Connect if needed, then send and receive; wait at most ``timeout_s``."""
        if self.client.socket() is None and not self._connect(timeout_s):
            return
        sock: Any = self.client.socket()
        writing = [sock] if self.client.want_write() else []
        readable, writable, _ = select.select([sock], writing, [], timeout_s)
        if writable:
            self.client.loop_write()
        if readable or has_buffered_bytes(sock):
            self._read()
        if self.keepalive_s:
            self.client.loop_misc()  # sends a ping when one is due
        if not self.up and self.client.socket() is not None and time.monotonic() - self._since_s > CONNECT_S:
            self.drop(f"the broker at {self.address} does not answer")

    def _read(self) -> None:
        deadline_s = time.monotonic() + 0.2
        while (sock := self.client.socket()) is not None and time.monotonic() < deadline_s:
            if self.client.loop_read() != MQTTErrorCode.MQTT_ERR_SUCCESS:
                return
            if not has_buffered_bytes(sock) and not select.select([sock], [], [], 0)[0]:
                return

    def _connect(self, timeout_s: float) -> bool:
        if not self._pauses.wait(timeout_s):
            return False
        self.up, self._since_s = False, time.monotonic()
        try:
            self.client.connect(self.address.host, self.address.port, keepalive=self.keepalive_s)
        except OSError as error:
            self.problem = f"no connection to the broker at {self.address}: {error.strerror or error}"
        self._pauses.tried()
        return self.client.socket() is not None

    def drop(self, problem: str) -> None:
        """Close the connection and record the reason; `run_once` opens a new one."""
        self.close()
        self.problem = problem

    def close(self) -> None:
        """Disconnect; the broker keeps unacknowledged messages of a lasting session."""
        self.client.disconnect()
        deadline_s = time.monotonic() + 1.0
        while (sock := self.client.socket()) is not None and time.monotonic() < deadline_s:
            select.select([], [sock], [], 0.1)
            self.client.loop_write()
        self.up = False


def _on_socket_open(client: paho.Client, userdata: Any, sock: Any) -> None:
    tune(sock)


class Publisher:
    """Publisher with QoS 1 for use from one thread; a context manager.

    Args:
        address: address of the broker.
        client_id: MQTT client id; the broker disconnects an earlier client with the same id.
        in_flight: maximum number of unacknowledged messages.
        patience_s: longest wait in seconds without any acknowledgement before an error.
        cancelled: callback polled while waiting; True ends the wait with `FleetError`.
        connection: connection to use; None opens one to ``address``.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        in_flight: int = 500,
        *,
        patience_s: float = 30.0,
        cancelled: Callable[[], bool] = lambda: False,
        connection: Connection | None = None,
    ) -> None:
        self.published = 0
        self.acknowledged = 0
        self._limit = in_flight
        self._patience_s = patience_s
        self._cancelled = cancelled
        self._waiting: deque[paho.MQTTMessageInfo] = deque()
        self._connection = connection or Connection(address, client_id)

    def __enter__(self) -> Self:
        try:
            self._drive_until(lambda: self._connection.up, self._patience_s)
        except FleetError:
            self._connection.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.flush(self._patience_s)
        finally:
            self._connection.close()

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection."""
        return self._connection.up

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Send a message without waiting for its acknowledgement; see `flush`.

        Wait while the maximum number of messages is in flight.

        Args:
            topic: topic of the message.
            payload: payload of the message.
            retain: whether the broker keeps the message for later subscribers. An empty payload
                removes the kept message.

        Raises:
            FleetError: the topic is invalid, the payload is too large, the broker acknowledged
                nothing for ``patience_s``, or the wait was cancelled.
        """
        if not topic or any(sign in topic for sign in " +#"):  # NATS never acknowledges a topic with a space
            raise FleetError(
                f'a topic to publish on must not be empty or contain spaces, + or #; got "{topic}"', code="topic-invalid"
            )
        if len(payload) > MAX_PAYLOAD_BYTES:  # the broker would close each connection without a reason
            raise FleetError(
                f'a payload has at most {MAX_PAYLOAD_BYTES:,} bytes; got {len(payload):,} on "{topic}"; split it',
                code="payload-too-large",
            )
        if len(self._waiting) >= self._limit:
            self._drive_until(lambda: len(self._waiting) <= self._limit // 2, self._patience_s)
        info = self._connection.client.publish(topic, payload, AT_LEAST_ONCE, retain)
        info.rc = MQTTErrorCode.MQTT_ERR_SUCCESS  # without a connection, paho queues the message and sends it later
        self._waiting.append(info)
        self.published += 1
        if self.published % 64 == 0:
            self._drive(0.0)

    def pump(self, timeout_s: float = 0.0) -> None:
        """Process acknowledgements and stay connected; call this between infrequent messages."""
        self._drive(timeout_s)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until every message is acknowledged.

        Raises:
            FleetError: no message was acknowledged for ``timeout_s``, or the wait was cancelled.
        """
        self._drive_until(lambda: not self._waiting, timeout_s)

    def _drive(self, timeout_s: float) -> bool:
        self._connection.run_once(timeout_s)
        before = len(self._waiting)
        while self._waiting and self._waiting[0].is_published():
            self._waiting.popleft()
            self.acknowledged += 1
        return len(self._waiting) < before

    def _drive_until(self, done: Callable[[], bool], patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while not done():
            if self._cancelled():
                raise FleetError(f"publishing cancelled: {len(self._waiting)} messages unacknowledged", code="publisher-stopped")
            if time.monotonic() > deadline_s:
                why = self._connection.problem or f"the broker at {self._connection.address} acknowledged no message"
                raise FleetError(
                    f"{why} (waited {patience_s:.0f} s, {len(self._waiting)} messages unacknowledged); check that it runs",
                    code="publisher-timeout",
                )
            if self._drive(0.1):
                deadline_s = time.monotonic() + patience_s
