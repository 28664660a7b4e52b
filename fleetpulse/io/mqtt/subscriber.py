"""MQTT receiver with a persistent session and manual acknowledgement.

The receiver has no thread: the caller's thread runs it.
Rule 1: every wait is bounded. A lost connection is retried with growing pauses, and connections
are counted.
Rule 2: a message of an earlier connection is never acknowledged: the broker redelivers it.
Rule 3: a message that the broker sends again in the same connection is dropped, even if it was sent before
its acknowledgement arrived: it would follow newer messages.
Rule 4: `io.mqtt.codec` parses packets in batches. A message costs microseconds; a general MQTT
client takes thirty times that.
"""

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.address import MAX_PAYLOAD_BYTES, BrokerAddress
from fleetpulse.io.mqtt.sockets import CONNECT_S, Backoff, cause, has_buffered_bytes, tune

POLL_MESSAGES: Final = 1_000
POLL_BYTES: Final = 8 * 1024 * 1024
READ_BYTES: Final = 256 * 1024
MAX_UNSENT_BYTES: Final = 1024 * 1024
REMEMBERED: Final = 8_192  # acknowledged packet identifiers; a broker reuses one after 65,535 less those in flight
READ_S: Final = 0.2  # longest time that one poll reads
CLOSE_S: Final = 1.0
_WOULD_WAIT: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
AckToken = tuple[int, int]  # connection and packet number


class Arrived(NamedTuple):
    """Message as the broker delivered it.

    Attributes:
        topic: topic of the message.
        payload: bytes of the payload.
        retained: whether this is a retained message, sent because of a new subscription.
        token: argument for `Receiver.ack`; None with QoS 0, which has no acknowledgement and no
            redelivery.
    """

    topic: str
    payload: bytes
    retained: bool
    token: AckToken | None


_as_arrived: Final = partial(tuple.__new__, Arrived)  # calling Arrived() costs three times as much


class Presence(NamedTuple):
    """Retained presence of this client: published on connect, on close, by the will.

    Attributes:
        topic: topic of the presence.
        here: payload while the client is connected.
        gone: payload after the client closed or lost the connection.
    """

    topic: str
    here: bytes
    gone: bytes


class Receiver:
    """Receiver of MQTT messages in a session that the broker keeps.

    Args:
        address: address of the broker.
        client_id: MQTT client id, which names the session.
        topics: topic filters to subscribe to, see `subscribe`.
        persistent: whether the broker keeps the session while the client is disconnected.
        presence: callback that returns the presence to publish, called at each connection.
        settle_s: time for which the broker must have been reachable before a connection, so that it has
            the messages to redeliver ready; 0 for a broker that sends them first.
        is_new: whether the broker has no session of this client id yet; the first connection then does not
            wait ``settle_s``.
        channel: number of this receiver among ``channels``, in the tokens of its messages.
        channels: number of receivers that share their tokens.

    Attributes:
        connections: number of connections so far; each new one makes the broker redeliver all
            unacknowledged messages.
        socket: socket of the connection; None without one.
        problem: reason for the missing connection or for a refused subscription; None if there is
            no problem.
        cause: cause of the newest connection failure: ``broker`` or ``network``.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        topics: Iterable[str] = (),
        *,
        persistent: bool = True,
        presence: Callable[[], Presence] | None = None,
        settle_s: float = 0.0,
        is_new: bool = True,
        channel: int = 0,
        channels: int = 1,
    ) -> None:
        self.topics = tuple(topics)
        self.connections = 0
        self.problem: str | None = None
        self.cause = "broker"
        self._address = address
        self._secured = address.context()
        self._client_id = client_id
        self._persistent = persistent
        self._presence = presence
        self._will: Presence | None = None  # presence in the will of this connection
        self._settle_s = settle_s
        self._is_new, self._has_settled = is_new, False
        self._channel, self._channels = channel, channels
        self.socket: socket.socket | None = None
        self._reader = codec.Reader(MAX_PAYLOAD_BYTES)
        self._unsent = bytearray()
        self._up = False  # the broker has accepted the connection
        self._subscribe_id: int | None = None  # number of the unanswered SUBSCRIBE
        self._number = 0
        self._since_s = 0.0
        self._pauses = Backoff()
        self._arrived: list[Arrived] = []
        self._arrived_bytes = 0
        self._unacknowledged: set[int] = set()
        self._unconfirmed: set[int] = set()  # packet ids of messages of this client, see `send`
        self._confirmed: list[AckToken] = []
        self._acknowledged: tuple[set[int], set[int]] = set(), set()  # packet ids of this connection: newest, and earlier
        self._refused = False

    def __str__(self) -> str:
        """Return the address of the broker."""
        return str(self._address)

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection and the subscriptions."""
        return self._up and self._subscribe_id is None and not self._refused

    @property
    def has_buffered_bytes(self) -> bool:
        """Whether bytes wait that `select` does not report."""
        return has_buffered_bytes(self.socket)

    @property
    def has_unsent_bytes(self) -> bool:
        """Whether bytes wait until the socket accepts them."""
        return self.socket is not None and bool(self._unsent)

    @property
    def _token_number(self) -> int:
        return self.connections * self._channels + self._channel

    # ---- methods for the caller

    def subscribe(self, topics: Iterable[str]) -> None:
        """Replace the subscriptions, for this connection and all later ones."""
        removed, self.topics = set(self.topics) - set(topics), tuple(topics)
        if self._up:
            if removed:
                self._send(codec.encode_unsubscribe(self._next(), sorted(removed)))
            self._subscribe()

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return the messages that arrived; wait for them at most ``timeout_s``.

        One call returns about `POLL_MESSAGES` messages or `POLL_BYTES` bytes. If the connection was
        lost, its messages with QoS 1 are dropped, because the broker redelivers them.
        """
        self._drive(timeout_s)
        arrived, self._arrived, self._arrived_bytes = self._arrived, [], 0
        return arrived if self._up else [message for message in arrived if message.token is None]

    def idle(self, timeout_s: float) -> None:
        """Send buffered packets and sleep ``timeout_s`` without reading (backpressure)."""
        if self._up:
            self._flush()
        time.sleep(timeout_s)

    def ack(self, tokens: Iterable[AckToken | None]) -> None:
        """Acknowledge messages; skip those of earlier connections, which are redelivered."""
        if self._up:
            own = self._token_number
            numbers = [token[1] for token in tokens if token is not None and token[0] == own]
            self._unacknowledged.difference_update(numbers)
            if len(self._acknowledged[0]) >= REMEMBERED:
                self._acknowledged = set(), self._acknowledged[0]
            self._acknowledged[0].update(numbers)
            self._send(codec.encode_puback(numbers))

    def publish(self, topic: str, payload: bytes) -> bool:
        """Publish a message with QoS 1 if connected; return whether it was sent."""
        if not self.connected or len(self._unsent) > MAX_UNSENT_BYTES:
            return False
        self._send(codec.encode_publish(self._next(), topic, payload))
        return self._up

    def send(self, topic: str, payload: bytes) -> AckToken | None:
        """Publish a message with QoS 1 if connected.

        Returns:
            The token by which `confirmed` names the message; None if it was not sent.
        """
        if not self.publish(topic, payload):
            return None
        self._unconfirmed.add(self._number)
        return self._token_number, self._number

    def confirmed(self) -> list[AckToken]:
        """Return the tokens of messages from `send` that the broker has confirmed since the last call."""
        found, self._confirmed = self._confirmed, []
        return found

    def reconnect(self, why: str, cause: str = "broker") -> None:
        """Close the connection, so that the broker redelivers unacknowledged messages.

        The next poll opens a new connection.
        """
        self.close()
        self.problem, self.cause = why, cause

    def close(self, *, forget: bool = False) -> None:
        """Disconnect; the broker keeps unacknowledged messages of a persistent session.

        Args:
            forget: whether to unsubscribe too, so that the broker keeps no messages for this client.
        """
        if forget and self.connected and self.topics:
            self._send(codec.encode_unsubscribe(self._next(), self.topics))
            self._drive(0.2)
        if self.socket is not None and self._up:
            if self._will is not None:
                self._send(codec.encode_publish(self._next(), self._will.topic, self._will.gone, retain=True))
            self._send(codec.DISCONNECT)
        deadline_s = time.monotonic() + CLOSE_S
        while self.socket is not None and self._unsent and time.monotonic() < deadline_s:
            select.select([], [self.socket], [], 0.1)
            self._flush()
        self._close_socket()

    # ---- the connection

    def _drive(self, timeout_s: float) -> None:
        if self.socket is None and not self._connect(timeout_s):
            return
        assert self.socket is not None, "it was just connected"
        held = has_buffered_bytes(self.socket)
        writing = [self.socket] if self._unsent else []
        readable, writable, _ = select.select([self.socket], writing, [], 0 if held else timeout_s)
        if writable:
            self._flush()
        if readable or held:
            self._read()
        if self.socket is not None and not self._up and time.monotonic() - self._since_s > CONNECT_S:
            self._lose(f"the broker at {self._address} does not answer", "network")

    def _connect(self, timeout_s: float) -> bool:
        if not self._pauses.wait(timeout_s):
            return False
        self._since_s = time.monotonic()
        try:
            self.socket = self._reach()
        except OSError as error:
            self.problem = f"no connection to the broker at {self._address}: {error.strerror or error}"
            self.cause = cause(error)
            self._has_settled = False
        self._pauses.tried()
        if self.socket is None:
            return False
        if self._settle_s and not self._is_new and not self._has_settled:
            self._close_socket()
            self._has_settled = True
            self._pauses.hold(self._settle_s)
            return False
        self._is_new = False
        self._reader, self._unsent = codec.Reader(MAX_PAYLOAD_BYTES), bytearray()
        credentials = (self._client_id, self._address.username, self._address.password)
        self._will = self._presence() if self._presence else None
        will = codec.Will(self._will.topic, self._will.gone) if self._will else None
        self._send(codec.encode_connect(*credentials, keep_session=self._persistent, will=will))
        return self.socket is not None

    def _reach(self) -> socket.socket:
        sock = socket.create_connection((self._address.host, self._address.port), CONNECT_S)
        try:
            tune(sock)
            if self._secured is not None:
                sock = self._secured.wrap_socket(sock, server_hostname=self._address.host)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock

    def _close_socket(self) -> None:
        sock, self.socket, self._up, self._has_settled = self.socket, None, False, False
        if sock is not None:
            sock.close()

    def _lose(self, why: str, cause: str = "broker") -> None:
        self._close_socket()
        self.problem, self.cause = self.problem or why, cause

    def _send(self, packet: bytes) -> None:
        self._unsent += packet
        self._flush()

    def _flush(self) -> None:
        if self.socket is None or not self._unsent:
            return
        try:
            del self._unsent[: self.socket.send(self._unsent)]
        except _WOULD_WAIT:
            pass
        except OSError as error:
            self._lose(f"the broker at {self._address} closed the connection ({error.strerror or error})", cause(error))

    def _read(self) -> None:
        deadline_s = time.monotonic() + READ_S
        while self.socket is not None and not self._enough() and time.monotonic() < deadline_s:
            try:
                data = self.socket.recv(READ_BYTES)
                published = self._reader.feed(data)
            except _WOULD_WAIT:
                return
            except (OSError, codec.ProtocolError) as error:
                origin = cause(error) if isinstance(error, OSError) else "broker"
                self._lose(f"the connection to the broker at {self._address} broke: {error}", origin)
                return
            if not data:
                self._lose(f"the broker at {self._address} closed the connection")
                return
            answers, self._reader.answers = self._reader.answers, []
            for answer in answers:
                self._answered(answer)
            self._take(published)

    def _enough(self) -> bool:
        return len(self._arrived) >= POLL_MESSAGES or self._arrived_bytes >= POLL_BYTES

    def _take(self, published: list[codec.Published]) -> None:
        if not published:
            return
        topics, payloads, retained, numbers, redelivered = zip(*published, strict=True)
        fresh = set(numbers)
        if len(fresh) < len(numbers) or None in fresh or True in redelivered or not self._unacknowledged.isdisjoint(fresh):
            for one in published:
                self._take_one(one)
            return
        self._unacknowledged |= fresh
        tokens = zip(repeat(self._token_number), numbers, strict=False)
        self._arrived += map(_as_arrived, zip(topics, payloads, retained, tokens, strict=True))
        self._arrived_bytes += sum(map(len, payloads))

    def _take_one(self, message: codec.Published) -> None:
        token = None
        if message.packet_id is not None:
            if message.packet_id in self._unacknowledged or (
                message.redelivered and any(message.packet_id in known for known in self._acknowledged)
            ):
                return  # redelivery within the connection: already received
            self._unacknowledged.add(message.packet_id)
            token = (self._token_number, message.packet_id)
        self._arrived.append(Arrived(message.topic, message.payload, message.retained, token))
        self._arrived_bytes += len(message.payload)

    def _answered(self, answer: codec.Answer) -> None:
        if answer.kind == codec.CONNACK:
            code = answer.body[1] if len(answer.body) > 1 else 3
            if code:
                self._lose(f"the broker at {self._address} refused the connection: {codec.REFUSALS.get(code, f'code {code}')}")
                return
            self._up, self.problem = True, None
            self._pauses.reset()
            self.connections += 1
            self._unacknowledged.clear()
            self._unconfirmed.clear()
            self._acknowledged = set(), set()
            self._arrived.clear()
            self._subscribe()
            if self._will is not None:
                self._send(codec.encode_publish(self._next(), self._will.topic, self._will.here, retain=True))
        elif answer.kind == codec.PUBACK and (number := int.from_bytes(answer.body[:2], "big")) in self._unconfirmed:
            self._unconfirmed.discard(number)
            self._confirmed.append((self._token_number, number))
        elif answer.kind == codec.SUBACK and int.from_bytes(answer.body[:2], "big") == self._subscribe_id:
            refused = [topic for topic, code in zip(self.topics, answer.body[2:], strict=False) if code >= codec.FAILURE]
            self._subscribe_id, self._refused = None, bool(refused)
            if refused:
                self.problem = f"the broker refused the subscription to {', '.join(refused)}"

    def _subscribe(self) -> None:
        self._subscribe_id, self._refused = None, False
        if self.topics:
            self._subscribe_id = self._next()
            self._send(codec.encode_subscribe(self._subscribe_id, self.topics))

    def _next(self) -> int:
        self._number = self._number % 65_535 + 1
        return self._number
