"""Rate limits per device, against floods that displace others or fill the disk.

Rule 1: a message beyond a limit of its device is marked. It goes to quarantine only, cut and counted
(`SegmentBuffer`).
Rule 2: a flood loses data, but its device stays online: of the messages beyond the limits, the newest
of each second is not marked, if it is small (`rows.SPARED_BYTES`).
Rule 3: memory is bounded. A device that has been quiet for long enough is forgotten, which does not
affect its limit.
Rule 4: invented topics of other formats have a bounded number of limits. The devices of a Sparkplug
node beyond `BEHIND_NODE` share the limit of the node, and senders beyond `OTHER_SENDERS` share one.
Senders that share a limit also share the spared message of each second.
Rule 5: a message that makes several rows takes a token for each of them, see `RateLimiter.charge`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

from fleetpulse.core.messages.decode import Rejection
from fleetpulse.core.messages.mapping import NO_MAPPINGS, Mappings
from fleetpulse.core.messages.sparkplug import PREFIX as SPARKPLUG
from fleetpulse.core.messages.sparkplug import Source, parse_source
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.rows import FROM_DEVICES, Kind
from fleetpulse.core.times import HOUR_MS
from streaming.bridge.token_buckets import BURST_S, TokenBuckets

_FULL_MS: Final = BURST_S * 1000  # time after which a bucket is full
_PREFIX: Final = "fleet/"
_KINDS: Final = frozenset(kind.value for kind in FROM_DEVICES)
_KNOWN_KINDS: Final = frozenset(kind.value for kind in Kind)  # no mapping rule matches a topic of four levels ending in one
_LONGEST_AWAY_MS: Final = HOUR_MS  # limit of the outage time that adds tokens: a flood after a week's outage stays limited
_MOST: Final = 100_000  # number of devices at which quiet ones are forgotten
OTHER_SENDERS: Final = 50_000  # senders outside of fleet/ with a limit of their own: those of the last `BURST_S` seconds
BEHIND_NODE: Final = 1_000  # devices of a Sparkplug node with a limit of their own
LONGEST_SENDER: Final = 512  # characters; longer names, and topics that are that long, would fill the memory
_CACHED_TOPICS: Final = 50_000  # topics outside of fleet/ whose sender is remembered: to parse one costs microseconds
_LIMITED_TOPICS: Final = 100_000  # short topics whose buckets are remembered
_SHORT_TOPIC: Final = 128  # characters
_INVALID: Final = _PREFIX  # sender of topics below fleet/ that are not a device's: a mapping may permit them to several devices
_OTHER: Final = "/"  # first character of a sender outside of fleet/; an id has no slash
_SPARKPLUG: Final = f"{_OTHER}+/"  # before group, node and device of a sender; no topic has a plus
_MAPPED: Final = f"{_OTHER}=/"  # before the sender that a mapping finds
_SHARED: Final = f"{_OTHER}#"  # sender that all senders beyond `OTHER_SENDERS` share


class RateLimiter:
    """Limits of rows and of payload bytes per sender (usually a device), see `TokenBuckets`.

    Args:
        per_s: rows per second that a device may send in the long run; 0 for no limit.
        identity: identity scheme of devices.
        bytes_per_s: bytes of payloads per second that it may send; 0 for no limit.
        mappings: mappings of the home, which find the sender of other topics.
    """

    def __init__(
        self,
        per_s: int,
        identity: DeviceIdentity = DeviceIdentity.ID,
        bytes_per_s: int = 0,
        mappings: Mappings = NO_MAPPINGS,
    ) -> None:
        found = partial(_other_sender, mappings, identity is DeviceIdentity.SITE_AND_ID)
        other = partial(_short_or_found, lru_cache(maxsize=_CACHED_TOPICS)(found), found)
        self._own = partial(_sender if identity is DeviceIdentity.ID else _sender_at_site, other)
        self._buckets = TokenBuckets(per_s, bytes_per_s)
        self._slots: dict[str, int] = {}  # cache by short topic, only of senders with buckets of their own
        self._others = 0  # number of senders outside of fleet/
        self._behind = Counter[str]()  # by Sparkplug node: number of its devices
        self._crowded = False  # whether senders share a limit since quiet ones were last forgotten
        self._forgot_ms = 0  # when that was
        self._outage_start_ms: int | None = None  # start of the present outage of the bridge
        self._last_outage = (0, 0)  # end and duration of the last outage

    def sender(self, topic: str) -> str:
        """Return the sender whose limit a message counts towards.

        - Below ``fleet/``: the device (its id, or site and id); one sender for all invalid topics.
        - Sparkplug: the device or node.
        - Topic of a mapping: the sender that the mapping finds (`Mappings.sender_of`).
        - Any other topic: the topic as a whole.

        Beyond the bounds of Rule 4, several senders count as one. Names are cut after `LONGEST_SENDER`
        characters.
        """
        own = self._own(topic)
        return own if own in self._buckets.slots else self._bucket(own)

    def exceeding(self, topics: Sequence[str], now_ms: int, sizes: Sequence[int] | None = None) -> dict[int, str]:
        """Count messages that arrived together; return place and `sender` of those beyond a limit.

        Args:
            topics: topics of the messages.
            now_ms: wall clock time; a step backwards adds no tokens.
            sizes: bytes of the payloads; None for empty ones.
        """
        if not self._buckets.limits:
            return {}
        if self._outage_start_ms is not None:
            self._last_outage, self._outage_start_ms = (
                (now_ms, min(max(0, now_ms - self._outage_start_ms), _LONGEST_AWAY_MS)),
                None,
            )
        try:
            slots = [*map(self._slots.__getitem__, topics)]
        except KeyError:
            slots = [*map(self._slot, topics)]
        beyond = self._buckets.take(slots, [0] * len(slots) if sizes is None else sizes, now_ms, self._last_outage)
        found = {place: self.sender(topics[place]) for place in beyond}
        if len(self._buckets.slots) > _MOST or (self._crowded and abs(now_ms - self._forgot_ms) >= _FULL_MS):
            self._forget(now_ms)
        return found

    def _slot(self, topic: str) -> int:
        """Return the slot of the sender of a topic; admit a new sender."""
        slot = self._slots.get(topic)
        if slot is None:
            own = self._own(topic)
            bucket = own if own in self._buckets.slots else self._admitted(own)
            slot = self._buckets.slot(bucket)
            if bucket == own and len(topic) <= _SHORT_TOPIC:
                if len(self._slots) >= _LIMITED_TOPICS:
                    self._slots.clear()
                self._slots[topic] = slot
        return slot

    def away_since(self, since_ms: int) -> None:
        """Record an outage of the bridge since an instant; the next message ends it."""
        self._outage_start_ms = since_ms if self._outage_start_ms is None else min(self._outage_start_ms, since_ms)

    def charge(self, topic: str, rows: int) -> None:
        """Take tokens for the further rows of an accepted message; `exceeding` took that of the first row."""
        self._buckets.add(self.sender(topic), -rows, 0)

    def refund(self, sender: str, size: int, rows: int = 1) -> None:
        """Return the tokens of a message of a `sender` that was dropped and will be redelivered."""
        self._buckets.add(sender, rows, size)

    def _forget(self, now_ms: int) -> None:
        """Remove full buckets; if there are too many, also the older half of those in use."""
        partial = self._buckets.senders_since(now_ms - _FULL_MS)
        if len(self._buckets.slots) > _MOST and len(partial) > _MOST // 2:
            partial = self._buckets.newest(partial, _MOST // 2)
        self._buckets.keep(partial)
        self._slots.clear()
        self._crowded, self._forgot_ms = False, now_ms
        others = [device for device in partial if device.startswith(_OTHER) and device != _SHARED]
        self._others, self._behind = len(others), Counter(node for node in map(_node, others) if node)

    def _bucket(self, own: str) -> str:
        """Return a bucket for a sender without one: a new bucket, or one that several senders share."""
        if not own.startswith(_OTHER):
            return own
        node = _node(own)
        if node and self._behind[node] >= BEHIND_NODE:
            own = node
        return own if own in self._buckets.slots or self._others < OTHER_SENDERS else _SHARED

    def _admitted(self, own: str) -> str:
        """Choose a bucket for a sender without one, and count the bucket if it is new."""
        bucket = self._bucket(own)
        self._crowded = self._crowded or bucket != own
        if bucket.startswith(_OTHER) and bucket != _SHARED and bucket not in self._buckets.slots:
            self._others += 1
            node = _node(bucket)
            if node:
                self._behind[node] += 1
        return bucket


class SparedMessages:
    """Messages beyond the limit that are kept for judging: the newest of each second.

    Only messages that wait for their segment are covered.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}  # by sender: the second, and the place of its message

    def newest(self, sender: str, topic: str, received_at_ms: int, place: int) -> int | None:
        """Spare a message beyond the limit of its sender.

        Args:
            sender: sender of the message, see `RateLimiter.exceeding`.
            topic: topic of the message.
            received_at_ms: time of receipt, epoch milliseconds.
            place: place of its row in the buffer.

        Returns:
            Place of the message to refuse instead: the spared message before it in the same second.
            It is the message's own place if no device can have sent it; None if none is refused.
        """
        if topic.startswith(_PREFIX) and topic.rpartition("/")[2] not in _KINDS:
            return place
        second = received_at_ms // 1000
        before = self._places.get(sender)
        self._places[sender] = (second, place)
        return before[1] if before is not None and before[0] == second else None

    def places(self) -> set[int]:
        """Return the places of all spared messages."""
        return {place for _, place in self._places.values()}


def _sender(other: Callable[[str], str], topic: str) -> str:
    """Return the device id of a topic below ``fleet/``, regardless of site; else the result of ``other``."""
    if not topic.startswith(_PREFIX):
        return other(topic)
    levels = topic.split("/", 3)
    return levels[2][:LONGEST_SENDER] if len(levels) > 3 and levels[3] in _KNOWN_KINDS else _INVALID


def _sender_at_site(other: Callable[[str], str], topic: str) -> str:
    """Return site and device id of a topic below ``fleet/``; else the result of ``other``."""
    if not topic.startswith(_PREFIX):
        return other(topic)
    own, _, kind = topic.rpartition("/")
    return own[:LONGEST_SENDER] if kind in _KNOWN_KINDS and own.count("/") == 2 else _INVALID


def _short_or_found(cached: Callable[[str], str], found: Callable[[str], str], topic: str) -> str:
    """Return the sender of a topic outside of ``fleet/``; only the senders of short topics are cached."""
    return cached(topic) if len(topic) <= LONGEST_SENDER else found(topic)[:LONGEST_SENDER]


def _other_sender(mappings: Mappings, with_site: bool, topic: str) -> str:
    """Return node or device of a Sparkplug topic, for all types of messages; else the sender of a mapped topic.

    A device whose name is not printable counts as its node: the node could vary the name to get further
    limits. Any other topic is a sender of its own.
    """
    if topic.startswith(SPARKPLUG):
        source = parse_source(topic)
        if not isinstance(source, Rejection):
            node = f"{_SPARKPLUG}{source.group}/{source.node}"
            return node if source.device is None else f"{node}/{source.device}"
        of_node, _, _ = topic.rpartition("/")
        if topic.count("/") == 4 and isinstance(source := parse_source(f"{of_node}/_"), Source):
            return f"{_SPARKPLUG}{source.group}/{source.node}"
    mapped = mappings.sender_of(topic, with_site=with_site)
    return _OTHER + topic if mapped is None else _MAPPED + mapped


def _node(sender: str) -> str | None:
    """Return the node of a Sparkplug device; None for any other sender."""
    return sender.rpartition("/")[0] if sender.startswith(_SPARKPLUG) and sender.count("/") == 4 else None
