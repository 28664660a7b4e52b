"""Removal of retained messages of a user that fills their store for all others.

The broker acknowledges a retained message even if it cannot store the message. A full store would thus lose
verdicts and the state of a Sparkplug host, without an error at their publisher.

Rule 1: the store has a limit of bytes, and a limit of messages, since the server keeps all topics in memory.
Rule 2: while the store is more than half full by either limit, messages of the user with the greatest share
are removed, oldest first. Messages of fleetpulse itself are never removed, nor those of a user with less than
`LEAST_SHARE`: the many users of a large fleet may fill the store together.

Source: nats-server 2.15.1, server/mqtt.go (`mqttEncodeRetainedMessage`, `processRetainedMsgDel`)
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, starmap
from typing import Final

from fleetpulse.io.mqtt.acl import SERVICE_USER
from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi, StreamUse

STREAM: Final = "$MQTT_rmsgs"
MOST_REMOVALS: Final = 10_000  # of one call; finding the messages reads the whole store
LEAST_SHARE: Final = 0.01  # least share of the store of a user whose messages are removed
_SUBJECTS: Final = "$MQTT.rmsgs."
_REMOVED: Final = "$MQTT.JSA.fleetpulse.RD"  # makes the server drop a removed message from its memory
_SOURCE: Final = "Nmqtt-RSource"
_SIZE: Final = "Nats-Msg-Size"
_RECORD_BYTES: Final = 200  # approximate size of a short topic, headers and indexes


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


def heaviest_user(stored: Iterable[Retained], store: StreamUse) -> str | None:
    """Return the user whose retained messages take the greatest share of the store.

    Returns:
        User; None if no user but fleetpulse itself has `LEAST_SHARE`.
    """
    sizes, numbers = Counter[str](), Counter[str]()
    for one in stored:
        if one.user != SERVICE_USER:
            sizes[one.user] += one.size_bytes
            numbers[one.user] += 1
    shares = {user: store._replace(size_bytes=sizes[user], messages=numbers[user]).share for user in sizes}
    return max(
        (user for user, share in shares.items() if share >= LEAST_SHARE), key=lambda user: (shares[user], user), default=None
    )


class RetainedCleaner:
    """Removal of retained messages, in several steps."""

    def __init__(self) -> None:
        self._fruitless_share = 0.0  # used share of the store when a search, which reads it all, last found no user

    def clean(self, api: BrokerApi) -> int:
        """Remove up to `MOST_REMOVALS` messages if the store is over half full; return their number.

        Raises:
            OSError: the server cannot be reached.
            ValueError: it refused a request.
        """
        store = api.use_of(STREAM)
        if not store.is_crowded or store.share < self._fruitless_share + LEAST_SHARE:
            self._fruitless_share = min(self._fruitless_share, store.share)
            return 0
        with api.headers(STREAM) as found:
            user = heaviest_user(starmap(_retained, found), store)
        self._fruitless_share = store.share if user is None else 0.0
        if user is None:
            return 0
        with api.headers(STREAM) as found:
            listed = [*islice((one for one in starmap(_retained, found) if one.user == user), MOST_REMOVALS)]
        for one in listed:  # by sequence number, so that a newer message of the topic remains
            api(f"$JS.API.STREAM.MSG.DELETE.{STREAM}", {"seq": one.sequence, "no_erase": True})
            api.tell(_REMOVED, {"subject": one.subject, "seq": one.sequence})
        return len(listed)


def _retained(subject: str, sequence: int, headers: Mapping[str, str]) -> Retained:
    size_bytes = int(headers.get(_SIZE, 0)) + len(subject) + _RECORD_BYTES
    return Retained(sequence, subject.removeprefix(_SUBJECTS), headers.get(_SOURCE, ""), size_bytes)
