"""Load of chaos: publishers that record each message that the broker acknowledged.

Rule 1: each message has a unique identity: device, kind, event time, boot and seq. The identity of
an undecodable message is its payload.
Rule 2: a message counts from its acknowledgement on. Until then its publisher keeps it, and sends
it again after a lost connection.
Rule 3: the rate is constant, independent of the broker. While the broker is down, devices keep
sending, and publishers buffer their messages.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from random import Random
from types import TracebackType
from typing import Final, NamedTuple, Self

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import Kind
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.system.wall_clock import wall_clock_ms

PUBLISHERS: Final = 2
PATIENCE_S: Final = 180.0  # timeout of a publisher whose broker does not acknowledge
SILENT_EVERY: Final = 10  # every tenth device is silent half of the time, for longer than its timeout
SILENT_MS: Final = 25_000
_LATE_MS: Final = 600_000
_MAX_IN_FLIGHT: Final = 1_000_000  # maximum number of unacknowledged messages
_UNDECODABLE, _LATE, _TWICE, _ERROR = 0.005, 0.01, 0.02, 0.04  # cumulative shares of the messages

Identity = tuple[str, str, int, str, int]  # device, kind, event time in epoch milliseconds, boot, seq


class Message(NamedTuple):
    """Message of a device.

    Attributes:
        topic: topic of the message.
        payload: payload, in bytes.
        identity: unique identity; None if the payload cannot be decoded.
        alive_ms: instant for which the message proves that its device was alive, epoch
            milliseconds; None if it proves nothing.
    """

    topic: str
    payload: bytes
    identity: Identity | None
    alive_ms: int | None


class Acknowledged(NamedTuple):
    """Message that the broker acknowledged.

    Attributes:
        message: the message.
        at_ms: instant of its PUBACK, epoch milliseconds.
    """

    message: Message
    at_ms: int


class Devices:
    """Devices that send in turn.

    Most messages are heartbeats; a few are errors, copies, late, or undecodable.

    Args:
        numbers: numbers of the devices.
        random: source of the random choices.
    """

    def __init__(self, numbers: Sequence[int], random: Random) -> None:
        self._numbers = numbers
        self._random = random
        self._boot = f"b{random.randrange(10**6)}"
        self._count = 0

    def next_messages(self, now_ms: int) -> list[Message]:
        """Return the messages of the next device: none, one, or one and its copy."""
        number = self._numbers[self._count % len(self._numbers)]
        self._count += 1
        if number % SILENT_EVERY == 0 and now_ms // SILENT_MS % 2:
            return []
        drawn = self._random.random()
        kind = Kind.ERROR if _TWICE <= drawn < _ERROR else Kind.HEARTBEAT
        at_ms = now_ms - _LATE_MS if _UNDECODABLE <= drawn < _LATE else now_ms
        device, seq = f"chaos-{number:05d}", self._count
        content = {"ts": at_ms, "boot": self._boot, "seq": seq} | ({"code": "e1"} if kind is Kind.ERROR else {})
        payload, topic = json.dumps(content).encode(), f"fleet/site-{number % 3}/{device}/{kind.value}"
        if drawn < _UNDECODABLE:
            return [Message(topic, payload[:-1] + device.encode(), None, None)]
        message = Message(topic, payload, (device, kind.value, at_ms, self._boot, seq), now_ms if at_ms == now_ms else None)
        return [message, message] if _LATE <= drawn < _TWICE else [message]


class Load:
    """Constant load, as a context that publishes it.

    Args:
        address: address of the broker.
        devices: number of devices.
        rate_per_s: messages a second of all devices together.
        seed: seed of the messages.

    Attributes:
        acknowledged: messages that the broker acknowledged; complete once `finished` returns True.
    """

    def __init__(self, address: BrokerAddress, devices: int, rate_per_s: float, seed: int) -> None:
        self.acknowledged: list[Acknowledged] = []
        self._address = address
        self._pause_s = PUBLISHERS / rate_per_s
        self._stopped, self._cancelled = threading.Event(), threading.Event()
        self._failure: FleetError | None = None
        shares = [Devices(range(place, devices, PUBLISHERS), Random(f"{seed} {place}")) for place in range(PUBLISHERS)]
        self._threads = [threading.Thread(target=self._publish, args=share) for share in enumerate(shares)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cancelled.set()
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Check that all publishers run.

        Raises:
            FleetError: a publisher failed or ended.
        """
        if self._failure is not None:
            raise self._failure
        if not self._stopped.is_set() and not all(thread.is_alive() for thread in self._threads):
            raise FleetError("a publisher of the load ended unexpectedly; see its output above", code="publisher-ended")

    def end(self) -> None:
        """Stop sending; the publishers still wait for pending acknowledgements."""
        self._stopped.set()

    def finished(self) -> bool:
        """Return whether all sent messages are acknowledged."""
        self.check()
        return not any(thread.is_alive() for thread in self._threads)

    def _publish(self, place: int, devices: Devices) -> None:
        under_way: deque[Message] = deque()
        more = {"in_flight": _MAX_IN_FLIGHT, "patience_s": PATIENCE_S, "cancelled": self._cancelled.is_set}
        try:
            with Publisher(self._address, f"fleet-chaos-{place}", **more) as publisher:
                next_s = time.monotonic()
                while not self._stopped.is_set():
                    for message in devices.next_messages(wall_clock_ms()):
                        publisher.publish(message.topic, message.payload)
                        under_way.append(message)
                    next_s += self._pause_s
                    self._listen_until(next_s, publisher, under_way)
                while under_way and not self._cancelled.is_set():
                    publisher.flush(PATIENCE_S)
                    self._note(publisher, under_way)
        except FleetError as error:
            if not self._cancelled.is_set():
                self._failure = error

    def _listen_until(self, end_s: float, publisher: Publisher, under_way: deque[Message]) -> None:
        while True:
            rest_s = end_s - time.monotonic()
            publisher.pump(max(0.0, rest_s))
            self._note(publisher, under_way)
            if rest_s <= 0 or self._stopped.is_set():
                return

    def _note(self, publisher: Publisher, under_way: deque[Message]) -> None:
        """Record new acknowledgements, which arrive in the order of publication."""
        now_ms = wall_clock_ms()
        while len(under_way) > publisher.published - publisher.acknowledged:
            self.acknowledged.append(Acknowledged(under_way.popleft(), now_ms))
