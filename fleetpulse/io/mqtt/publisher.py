"""Publishing over MQTT by paho, driven by its caller's thread: a `Publisher` that waits for acknowledgements.

Rule: every wait is bounded; a lost connection is come back to with growing pauses.
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
from fleetpulse.io.mqtt.sockets import CONNECT_S, Backoff, holds_some, tune

AT_LEAST_ONCE: Final = 1


class Connection:
    """One client's connection, which comes back when it is lost.

    Args:
        address: the broker.
        client_id: under which the broker knows the client.
        lasting: whether the broker keeps the session, and what comes for it, while nobody is connected.
    """

    def __init__(self, address: BrokerAddress, client_id: str, *, lasting: bool = False) -> None:
        self.address = address
        self.problem: str | None = None
        self.up = False  # the broker has let us in
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
            self.problem = f"the broker at {self.address} refuses us: {reason}"
            return
        self.up, self.problem = True, None
        self._pauses.held()

    def _on_disconnect(self, client: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        self.up = False
        self.problem = self.problem or f"the broker at {self.address} closed the connection"

    def drive(self, timeout_s: float) -> None:
        """Connect if it is time to, then send and receive what is there; wait for it at most ``timeout_s``."""
        if self.client.socket() is None and not self._connect(timeout_s):
            return
        sock: Any = self.client.socket()
        writing = [sock] if self.client.want_write() else []
        readable, writable, _ = select.select([sock], writing, [], timeout_s)
        if writable:
            self.client.loop_write()
        if readable or holds_some(sock):
            self._read()
        if not self.up and self.client.socket() is not None and time.monotonic() - self._since_s > CONNECT_S:
            self.drop(f"the broker at {self.address} does not answer")

    def _read(self) -> None:
        deadline_s = time.monotonic() + 0.2
        while (sock := self.client.socket()) is not None and time.monotonic() < deadline_s:
            if self.client.loop_read() != MQTTErrorCode.MQTT_ERR_SUCCESS:
                return
            if not holds_some(sock) and not select.select([sock], [], [], 0)[0]:
                return

    def _connect(self, timeout_s: float) -> bool:
        if not self._pauses.over(timeout_s):
            return False
        self.up, self._since_s = False, time.monotonic()
        try:
            self.client.connect(self.address.host, self.address.port, keepalive=0)
        except OSError as error:
            self.problem = f"no connection to the broker at {self.address}: {error.strerror or error}"
        self._pauses.tried()
        return self.client.socket() is not None

    def drop(self, problem: str) -> None:
        """Give the connection up, for a new one."""
        self.close()
        self.problem = problem

    def close(self) -> None:
        """Take leave; what was not acknowledged stays with the broker."""
        self.client.disconnect()
        deadline_s = time.monotonic() + 1.0
        while (sock := self.client.socket()) is not None and time.monotonic() < deadline_s:
            select.select([], [sock], [], 0.1)
            self.client.loop_write()
        self.up = False


def _on_socket_open(client: paho.Client, userdata: Any, sock: Any) -> None:
    tune(sock)


class Publisher:
    """Publishes with QoS 1 from one thread; a context manager.

    Args:
        address: the broker.
        client_id: its name; a second client of that name throws the first one out.
        in_flight: how many messages may wait for their acknowledgement.
        patience_s: how long to wait without any acknowledgement before giving up.
        cancelled: asked while waiting; True ends the wait with `FleetError`.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        in_flight: int = 500,
        *,
        patience_s: float = 30.0,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.published = 0
        self.acknowledged = 0
        self._limit = in_flight
        self._patience_s = patience_s
        self._cancelled = cancelled
        self._waiting: deque[paho.MQTTMessageInfo] = deque()
        self._connection = Connection(address, client_id)

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
        """Whether the broker has let us in."""
        return self._connection.up

    def publish(self, topic: str, payload: bytes) -> None:
        """Hand a message over; it is acknowledged later, see `flush`. Waits while too many are in flight.

        Raises:
            FleetError: the topic cannot be published on, the payload is too large, the broker acknowledges nothing for long, or
                it was cancelled.
        """
        if not topic or any(sign in topic for sign in " +#"):  # NATS never acknowledges a topic with a space
            raise FleetError(f'a topic to publish on has neither spaces nor + nor #; got "{topic}"', code="topic-invalid")
        if len(payload) > MAX_PAYLOAD_BYTES:  # the broker would close the connection, each time anew, and not say why
            raise FleetError(
                f'a payload has at most {MAX_PAYLOAD_BYTES:,} bytes; got {len(payload):,} on "{topic}"; send it in parts',
                code="payload-too-large",
            )
        if len(self._waiting) >= self._limit:
            self._drive_until(lambda: len(self._waiting) <= self._limit // 2, self._patience_s)
        info = self._connection.client.publish(topic, payload, AT_LEAST_ONCE)
        info.rc = MQTTErrorCode.MQTT_ERR_SUCCESS  # without a connection it is kept, and sent when there is one
        self._waiting.append(info)
        self.published += 1
        if self.published % 64 == 0:
            self._drive(0.0)

    def pump(self, timeout_s: float = 0.0) -> None:
        """Take in acknowledgements and stay connected; for those who publish seldom."""
        self._drive(timeout_s)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until everything is acknowledged.

        Raises:
            FleetError: nothing was acknowledged for ``timeout_s``, or it was cancelled.
        """
        self._drive_until(lambda: not self._waiting, timeout_s)

    def _drive(self, timeout_s: float) -> bool:
        self._connection.drive(timeout_s)
        before = len(self._waiting)
        while self._waiting and self._waiting[0].is_published():
            self._waiting.popleft()
            self.acknowledged += 1
        return len(self._waiting) < before

    def _drive_until(self, done: Callable[[], bool], patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while not done():
            if self._cancelled():
                raise FleetError(f"stopped while {len(self._waiting)} messages were not acknowledged", code="publisher-stopped")
            if time.monotonic() > deadline_s:
                why = self._connection.problem or f"the broker at {self._connection.address} acknowledges nothing"
                raise FleetError(
                    f"{why} ({patience_s:.0f} s, {len(self._waiting)} messages wait); see whether it runs",
                    code="publisher-timeout",
                )
            if self._drive(0.1):
                deadline_s = time.monotonic() + patience_s
