"""MQTT by paho, driven by its caller's thread: a `Publisher` that waits for acknowledgements, a `Receiver` that gives them.

Rule 1: every wait is bounded; a lost connection is come back to with growing pauses, and counted.
Rule 2: a `Receiver` acknowledges nothing by itself, and never a message of an earlier connection: the broker sends it again.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.reasoncodes import ReasonCode

from fleetpulse.core.errors import FleetError
from fleetpulse.io.broker import MAX_PAYLOAD_BYTES, BrokerAddress

CONNECT_S: Final = 3.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
POLL_MESSAGES: Final = 1_000
POLL_BYTES: Final = 8 * 1024 * 1024
AT_LEAST_ONCE: Final = 1
KEEPALIVE_S: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a dead line is known after 25 s
Token = tuple[int, int]  # connection and packet number


class Connection:
    """One client's connection, which comes back when it is lost.

    Args:
        address: the broker.
        client_id: under which the broker knows the client.
        keep_session: whether the broker keeps its subscriptions and messages while it is away.
    """

    def __init__(self, address: BrokerAddress, client_id: str, *, keep_session: bool) -> None:
        self.address = address
        self.count = 0  # connections that were let in
        self.problem: str | None = None
        self.up = False  # the broker has let us in
        self.on_let_in: Callable[[], None] = lambda: None
        self._since_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._not_before_s = 0.0
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, clean_session=not keep_session, protocol=paho.MQTTv311, manual_ack=True
        )
        self.client.connect_timeout = CONNECT_S
        self.client.max_inflight_messages_set(0)
        self.client.on_connect = self._on_connect
        self.client.on_disconnect = self._on_disconnect
        self.client.on_socket_open = _tune
        if address.username:
            self.client.username_pw_set(address.username, address.password)

    def _on_connect(self, client: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        if reason.is_failure:
            self.problem = f"the broker at {self.address} refuses us: {reason}"
            return
        self.up, self.count, self.problem = True, self.count + 1, None
        self._pause_s = FIRST_PAUSE_S
        self.on_let_in()

    def _on_disconnect(self, client: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        self.up = False
        self.problem = self.problem or f"the broker at {self.address} closed the connection"

    def drive(self, timeout_s: float, *, read: bool = True, enough: Callable[[], bool] = lambda: False) -> None:
        """Connect if it is time to, then send and receive what is there; wait for it at most ``timeout_s``.

        Args:
            timeout_s: how long to wait for the first byte.
            read: False leaves what the broker sends where it is, so that it must wait.
            enough: asked after each packet whether to stop reading.
        """
        if self.client.socket() is None and not self._connect(timeout_s):
            return
        sock: Any = self.client.socket()
        writing = [sock] if self.client.want_write() else []
        readable, writable, _ = select.select([sock] if read else [], writing, [], timeout_s)
        if writable:
            self.client.loop_write()
        if readable:
            self._read(enough)
        if not self.up and self.client.socket() is not None and time.monotonic() - self._since_s > CONNECT_S:
            self.drop(f"the broker at {self.address} does not answer")

    def _read(self, enough: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 0.2
        while (sock := self.client.socket()) is not None and time.monotonic() < deadline_s and not enough():
            if self.client.loop_read() != MQTTErrorCode.MQTT_ERR_SUCCESS:
                return
            if not select.select([sock], [], [], 0)[0]:
                return

    def _connect(self, timeout_s: float) -> bool:
        rest_s = self._not_before_s - time.monotonic()
        if rest_s > 0:
            time.sleep(min(rest_s, timeout_s))
            if rest_s > timeout_s:
                return False
        self.up, self._since_s = False, time.monotonic()
        try:
            self.client.connect(self.address.host, self.address.port, keepalive=0)
        except OSError as error:
            self.problem = f"no connection to the broker at {self.address}: {error.strerror or error}"
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
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


def _tune(client: paho.Client, userdata: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # acknowledgements are small and must not wait
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_S.items():
        if hasattr(socket, name):  # they are named otherwise elsewhere, and the system's own two hours hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
        self._connection = Connection(address, client_id, keep_session=False)

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
            raise FleetError(f'a topic to publish on has neither spaces nor + nor #; got "{topic}"')
        if len(payload) > MAX_PAYLOAD_BYTES:  # the broker would close the connection, each time anew, and not say why
            raise FleetError(
                f'a payload has at most {MAX_PAYLOAD_BYTES:,} bytes; got {len(payload):,} on "{topic}"; send it in parts'
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
                raise FleetError(f"stopped while {len(self._waiting)} messages were not acknowledged")
            if time.monotonic() > deadline_s:
                why = self._connection.problem or f"the broker at {self._connection.address} acknowledges nothing"
                raise FleetError(f"{why} ({patience_s:.0f} s, {len(self._waiting)} messages wait); see whether it runs")
            if self._drive(0.1):
                deadline_s = time.monotonic() + patience_s


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message as the broker delivered it.

    Attributes:
        topic: where it was published.
        payload: its bytes.
        retained: it is an old one, kept by the broker and sent because we subscribed.
        token: to be given to `Receiver.ack`; None where it needs none (QoS 0) and would not be sent again.
    """

    topic: str
    payload: bytes
    retained: bool
    token: Token | None


class Receiver:
    """Receives in a session that the broker keeps; nothing is acknowledged before `ack`.

    Args:
        address: the broker.
        client_id: the session's name.
        topics: what to subscribe to, see `subscribe`.
        persistent: whether the broker keeps the session while we are away.
    """

    def __init__(self, address: BrokerAddress, client_id: str, topics: Iterable[str] = (), *, persistent: bool = True) -> None:
        self.topics = tuple(topics)
        self._connection = Connection(address, client_id, keep_session=persistent)
        self._connection.on_let_in = self._subscribe
        self._connection.client.on_message = self._on_message
        self._connection.client.on_subscribe = self._on_subscribe
        self._arrived: list[Arrived] = []
        self._arrived_bytes = 0
        self._unacknowledged: set[int] = set()
        self._subscribed = False

    @property
    def connected(self) -> bool:
        """Whether the broker has let us in and taken our subscriptions."""
        return self._connection.up and self._subscribed

    @property
    def connections(self) -> int:
        """How many connections there have been; when it grows, all that was not acknowledged is sent again."""
        return self._connection.count

    @property
    def problem(self) -> str | None:
        """Why there is no connection; None where there is one."""
        return self._connection.problem

    def subscribe(self, topics: Iterable[str]) -> None:
        """Receive these topics, now and after every return, and others no longer."""
        gone, self.topics = set(self.topics) - set(topics), tuple(topics)
        if self._connection.up:
            if gone:
                self._connection.client.unsubscribe(sorted(gone))
            self._ask()

    def _subscribe(self) -> None:
        self._unacknowledged.clear()
        self._arrived.clear()
        self._ask()

    def _ask(self) -> None:
        self._subscribed = not self.topics
        if self.topics:
            self._connection.client.subscribe([(topic, AT_LEAST_ONCE) for topic in self.topics])

    def _on_subscribe(self, client: paho.Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any) -> None:
        refused = [topic for topic, reason in zip(self.topics, reasons, strict=False) if reason.is_failure]
        self._subscribed = not refused
        if refused:
            self._connection.problem = f"the broker refuses the subscription to {', '.join(refused)}"

    def _on_message(self, client: paho.Client, userdata: Any, message: paho.MQTTMessage) -> None:
        token = None
        if message.qos:
            if message.mid in self._unacknowledged:
                return  # sent again within the connection, since it waited long: we have it
            self._unacknowledged.add(message.mid)
            token = (self._connection.count, message.mid)
        try:
            topic = message.topic
        except UnicodeDecodeError:
            topic = "not-utf-8"
        self._arrived.append(Arrived(topic, bytes(message.payload), bool(message.retain), token))
        self._arrived_bytes += len(message.payload)

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return what arrived; wait for it at most ``timeout_s``. About `POLL_MESSAGES` or `POLL_BYTES` at a time.

        What came just before its connection was lost is left out, since the broker sends it again.
        """
        self._connection.drive(timeout_s, enough=self._enough)
        arrived, self._arrived, self._arrived_bytes = self._arrived, [], 0
        return arrived if self._connection.up else [message for message in arrived if message.token is None]

    def _enough(self) -> bool:
        return len(self._arrived) >= POLL_MESSAGES or self._arrived_bytes >= POLL_BYTES

    def idle(self, timeout_s: float) -> None:
        """Send what is to be sent but take nothing in, so that the broker waits; takes ``timeout_s``."""
        if self._connection.up:
            self._connection.drive(0.0, read=False)
        time.sleep(timeout_s)

    def ack(self, tokens: Iterable[Token | None]) -> None:
        """Acknowledge messages; those of an earlier connection are left out, since the broker sends them again."""
        for token in tokens:
            if token is None:
                continue
            connection, mid = token
            if connection == self._connection.count and self._connection.up:
                self._unacknowledged.discard(mid)
                self._connection.client.ack(mid, AT_LEAST_ONCE)

    def publish(self, topic: str, payload: bytes) -> bool:
        """Publish with QoS 1 if there is a connection; return whether it was sent."""
        if not self.connected:
            return False
        return self._connection.client.publish(topic, payload, AT_LEAST_ONCE).rc == MQTTErrorCode.MQTT_ERR_SUCCESS

    def reconnect(self, why: str) -> None:
        """Give the connection up for a new one, so that the broker sends again what was not acknowledged."""
        self._connection.drop(why)

    def close(self, *, forget: bool = False) -> None:
        """Take leave.

        Args:
            forget: end the subscriptions too, so that the broker keeps nothing for this session.
        """
        if forget and self.connected:
            self._connection.client.unsubscribe(list(self.topics))
            self._connection.drive(0.2)
        self._connection.close()
