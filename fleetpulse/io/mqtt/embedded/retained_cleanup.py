"""Removal of retained messages of a user that crowds out those of others.

The broker acknowledges a retained message that it cannot store, so a full store of retained messages
loses verdicts and the state of a Sparkplug host without an error at their publisher.

Rule: while retained messages take more than half of their store, those of the user with the most bytes are
removed, oldest first. Those of fleetpulse itself always remain.

Source: nats-server 2.15.1, server/mqtt.go (`mqttEncodeRetainedMessage`, `processRetainedMsgDel`)
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from fleetpulse.io.mqtt.acl import SERVICE_USER
from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi

STREAM: Final = "$MQTT_rmsgs"
MOST_REMOVALS: Final = 2_000  # at a time
_SUBJECTS: Final = "$MQTT.rmsgs."
_REMOVED: Final = "$MQTT.JSA.fleetpulse.RD"  # the server drops a removed message from its memory
_SOURCE: Final = "Nmqtt-RSource"
_SIZE: Final = "Nats-Msg-Size"
_RECORD_BYTES: Final = 200  # of a short topic, headers and indexes


@dataclass(frozen=True, slots=True)
class Retained:
    """Retained message in the broker's store.

    Attributes:
        sequence: number of its record.
        subject: its NATS subject.
        user: user that published it.
        size_bytes: approximate size in the store.
    """

    sequence: int
    subject: str
    user: str
    size_bytes: int


def heaviest_user(stored: Iterable[Retained]) -> str | None:
    """Return the user whose retained messages take most bytes; None if all are fleetpulse's own."""
    sizes = Counter[str]()
    for one in stored:
        if one.user != SERVICE_USER:
            sizes[one.user] += one.size_bytes
    return max(sizes, key=lambda user: (sizes[user], user), default=None)


def clear_retained(api: BrokerApi) -> int:
    """Remove retained messages while they crowd the store; return their number, at most `MOST_REMOVALS`.

    Raises:
        OSError: the server cannot be reached.
        ValueError: it refused a request.
    """
    if not api.is_crowded(STREAM):
        return 0
    user = heaviest_user(_stored(api))
    listed = [*islice((one for one in _stored(api) if one.user == user), MOST_REMOVALS)] if user is not None else []
    for one in listed:  # by its number, so that a newer message of the topic remains
        api(f"$JS.API.STREAM.MSG.DELETE.{STREAM}", {"seq": one.sequence, "no_erase": True})
        api.tell(_REMOVED, {"subject": one.subject, "seq": one.sequence})
    return len(listed)


def _stored(api: BrokerApi) -> Iterator[Retained]:
    """Yield all retained messages, oldest first, without their payloads."""
    for subject, sequence, headers in api.headers(STREAM):
        size_bytes = int(headers.get(_SIZE, 0)) + len(subject) + _RECORD_BYTES
        yield Retained(sequence, subject.removeprefix(_SUBJECTS), headers.get(_SOURCE, ""), size_bytes)
