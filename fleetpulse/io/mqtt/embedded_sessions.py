"""MQTT sessions of a bridge at the embedded broker: one for each topic filter.

A session with several filters receives a backlog out of order: if it exceeds the limit of unacknowledged
messages of a session, NATS skips some messages and delivers them after newer ones. Messages that were
unacknowledged when a connection ended also follow newer ones, until `REDELIVERY_S` has passed.

Rule 1: a session has one topic filter, so NATS never skips a message.
Rule 2: a session connects only after the broker has been reachable for `SETTLE_S` without the session, so
that redelivered messages precede newer ones.
Rule 3: if one session is lost, all are closed and connect again. A caller sees one connection.
Rule 4: a session is served as long as the broker has it, even if its filter is no longer requested: the
broker keeps messages for it, and its store is limited.
Rule 5: a home that is older than rule 1 has one session, with the client id itself. Each start ends this
session, which would otherwise fill the store. The coverage gap of the start covers its unread messages.

Source: docs/adr/0005-broker-redelivery.md
"""

import json
import select
import time
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final

from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import POLL_MESSAGES, AckToken, Arrived, Presence, Receiver
from fleetpulse.io.system.fsync import atomic_write

MAX_UNACKED: Final = 8_192  # of a session and of its filter: both must be equal, and NATS never changes that of a filter
REDELIVERY_S: Final = 6  # redelivery timeout of NATS; it also holds for a bridge that reconnected
SETTLE_S: Final = REDELIVERY_S + 0.5


class EmbeddedSessions:
    """Receiver of MQTT messages in one session for each topic filter, with the methods of `Receiver`.

    Args:
        address: address of the embedded broker.
        client_id: secret from which the client ids of the sessions are derived.
        topics: topic filters; `publish` uses the session of the first one.
        record: file with the filters of all sessions that the broker has.
        presence: see `Receiver`; belongs to the session of the first filter.
        settle_s: time between two connections of a session, see rule 2.

    Attributes:
        connections: number of times that all sessions were connected.
        problem: see `Receiver`.
        cause: see `Receiver`.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        topics: Iterable[str],
        record: Path,
        *,
        presence: Callable[[], Presence] | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.connections = 0
        self.problem: str | None = None
        self.cause = "broker"
        self._address = address
        before = tuple(json.loads(record.read_text())) if record.exists() else ()
        served = tuple(dict.fromkeys((*topics, *before)))
        if served != before:
            atomic_write(record, json.dumps(served))
        connect = partial(Receiver, address, settle_s=settle_s, is_new=not before, channels=len(served))
        self._receivers = [
            connect(derived_client_id(client_id, topic), (topic,), presence=None if place else presence, channel=place)
            for place, topic in enumerate(served)
        ]
        self._former: Receiver | None = Receiver(address, client_id, persistent=False)  # ends the session, see rule 5
        self._was_connected = False
        self._first = 0  # index of the receiver that is read first; it rotates, so that each has its turn

    def __str__(self) -> str:
        """Return the address of the broker."""
        return str(self._address)

    @property
    def connected(self) -> bool:
        """Whether all sessions are connected."""
        return all(one.connected for one in self._receivers)

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return the messages that arrived in any session; wait for them at most ``timeout_s``.

        If one session lost its connection, all are closed, and the messages with QoS 1 are dropped, because the
        broker redelivers them.
        """
        self._end_former()
        self._await(timeout_s)
        arrived: list[Arrived] = []
        self._first = (self._first + 1) % len(self._receivers)
        for one in (*self._receivers[self._first :], *self._receivers[: self._first]):
            arrived += one.poll(0)
            if len(arrived) >= POLL_MESSAGES:
                break
        up = self.connected
        self.connections += up and not self._was_connected
        failed = next((one for one in self._receivers if one.problem is not None), None)
        self.problem = failed.problem if failed else None
        self.cause = failed.cause if failed else self.cause
        if self._was_connected and not up:
            self.close()
            arrived = [message for message in arrived if message.token is None]
        self._was_connected = up
        return arrived

    def _end_former(self) -> None:
        if self._former is not None:
            self._former.poll(0)
            if self._former.connected:
                self._former.close()
                self._former = None

    def _await(self, timeout_s: float) -> None:
        """Wait until a session has bytes to read or can send; `poll` then drives each session without a wait."""
        connected = [(one.socket, one.has_unsent_bytes) for one in self._receivers if one.socket is not None]
        if any(one.has_buffered_bytes for one in self._receivers):
            return
        if len(connected) < len(self._receivers):
            time.sleep(timeout_s)
        else:
            writing = [socket for socket, has_unsent_bytes in connected if has_unsent_bytes]
            select.select([socket for socket, _ in connected], writing, [], timeout_s)

    def idle(self, timeout_s: float) -> None:
        """Send buffered packets and sleep ``timeout_s`` without reading (backpressure)."""
        for one in self._receivers:
            one.idle(0)
        time.sleep(timeout_s)

    def ack(self, tokens: Iterable[AckToken | None]) -> None:
        """Acknowledge messages, each in its session; skip those of earlier connections."""
        count = len(self._receivers)
        if count == 1:
            self._receivers[0].ack(tokens)
            return
        by_session: list[list[AckToken]] = [[] for _ in range(count)]
        for token in tokens:
            if token is not None:
                by_session[token[0] % count].append(token)
        for one, own in zip(self._receivers, by_session, strict=True):
            if own:
                one.ack(own)

    def publish(self, topic: str, payload: bytes) -> bool:
        """Publish with QoS 1 in the session of the first filter; return whether the message was sent."""
        return self._receivers[0].publish(topic, payload)

    def send(self, topic: str, payload: bytes) -> AckToken | None:
        """Publish like `publish`; return the token by which `confirmed` names the message, or None."""
        return self._receivers[0].send(topic, payload)

    def confirmed(self) -> list[AckToken]:
        """Return the tokens that the broker has confirmed since the last call."""
        return self._receivers[0].confirmed()

    def reconnect(self, why: str, cause: str = "broker") -> None:
        """Close the connections, so that the broker redelivers unacknowledged messages."""
        for one in self._receivers:
            one.reconnect(why, cause)
        self.problem, self.cause = why, cause

    def close(self, *, forget: bool = False) -> None:
        """Disconnect all sessions; see `Receiver.close`."""
        for one in (*self._receivers, *([self._former] if self._former else [])):
            one.close(forget=forget)


def derived_client_id(secret: str, topic: str) -> str:
    """Return the client id of a session: as long and as hard to guess as ``secret``, see `Home.session`."""
    return session_prefix(secret) + blake2b(topic.encode(), key=secret.encode(), digest_size=5).hexdigest()


def session_prefix(secret: str) -> str:
    """Return the beginning of the client ids of all sessions that are derived from a secret."""
    return f"fleet{blake2b(key=secret.encode(), digest_size=4).hexdigest()}"
