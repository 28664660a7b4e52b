"""Rate limit per device, so that a flooding device cannot displace the fleet.

Rule 1: a message beyond the limit of its device is kept and marked. It goes to quarantine only.
Rule 2: a flood costs data, but never presence: of the messages beyond the limit, the newest of each
second is not marked.
Rule 3: memory is bounded. A device that has been quiet for long enough is forgotten, which does not
affect its limit.
"""

from collections.abc import Callable, Sequence
from typing import Final

from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.rows import FROM_DEVICES

BURST_S: Final = 60  # burst in seconds of the limit, for messages that a device buffered while it was away
_PREFIX: Final = "fleet/"
_KINDS: Final = frozenset(kind.value for kind in FROM_DEVICES)
_LONGEST_AWAY_MS: Final = 3_600_000  # limit of the outage time that adds tokens: after a week, a flood is a flood
_MOST: Final = 100_000  # number of devices at which quiet ones are forgotten


class RateLimiter:
    """Token bucket per device; each message takes one token.

    Args:
        per_s: messages per second that a device may send in the long run; 0 for no limit.
        identity: identity scheme of devices.
    """

    def __init__(self, per_s: int, identity: DeviceIdentity = DeviceIdentity.ID) -> None:
        self.sender = _sender if identity is DeviceIdentity.ID else _sender_at_site
        self._per_ms = per_s / 1000
        self._burst = per_s * BURST_S
        self._left: dict[str, tuple[float, int]] = {}  # by device: tokens left, and when
        self._outage_start_ms: int | None = None  # start of the present outage of the bridge
        self._last_outage = (0, 0)  # end and duration of the last outage

    def exceeding(self, topics: Sequence[str], now_ms: int) -> list[int]:
        """Count messages that arrived together; return places of those beyond the limit.

        Args:
            topics: topics of the messages. Below ``fleet/`` the id identifies the device, or site
                and id; any other topic identifies a device as a whole.
            now_ms: wall clock time; a step backwards adds no tokens.
        """
        if not self._burst:
            return []
        if self._outage_start_ms is not None:
            self._last_outage, self._outage_start_ms = (
                (now_ms, min(max(0, now_ms - self._outage_start_ms), _LONGEST_AWAY_MS)),
                None,
            )
        known, burst, per_ms, (back_ms, away_ms) = self._left, self._burst, self._per_ms, self._last_outage
        sender = self.sender
        unknown, beyond = (burst, -1), list[int]()
        returned = back_ms <= now_ms <= back_ms + away_ms  # the broker queued messages of the outage
        for place, topic in enumerate(topics):
            device = sender(topic)
            left, at_ms = known.get(device, unknown)
            if now_ms > at_ms:
                filled = left + (now_ms - at_ms) * per_ms
                left = filled if filled < burst else max(burst, left)
            if returned and at_ms < back_ms:
                left += away_ms * per_ms
            if left < 1:
                beyond.append(place)
                known[device] = (left, now_ms)
            else:
                known[device] = (left - 1, now_ms)
        if len(known) > _MOST:
            self._forget(now_ms)
        return beyond

    def away_since(self, since_ms: int) -> None:
        """Record an outage of the bridge since an instant; the next message ends it."""
        self._outage_start_ms = since_ms if self._outage_start_ms is None else min(self._outage_start_ms, since_ms)

    def refund(self, topic: str) -> None:
        """Return the token of a message that was dropped and will be redelivered."""
        device = self.sender(topic)
        if device in self._left:
            left, at_ms = self._left[device]
            self._left[device] = (left + 1, at_ms)

    def _forget(self, now_ms: int) -> None:
        """Remove full buckets, and the older half if too many are in use."""
        full_ms = BURST_S * 1000
        partial = {device: held for device, held in self._left.items() if now_ms - held[1] < full_ms}
        if len(partial) > _MOST // 2:
            newest = sorted(partial.items(), key=lambda item: item[1][1])[-(_MOST // 2) :]
            partial = dict(newest)
        self._left = partial


class SparedMessages:
    """Messages beyond the limit that are kept for judging: the newest of each second.

    Only messages that wait for their segment are covered.

    Args:
        sender: function from topic to device, see `RateLimiter.sender`.
    """

    def __init__(self, sender: Callable[[str], str]) -> None:
        self._sender = sender
        self._places: dict[str, tuple[int, int]] = {}  # by device: the second, and the place of its message

    def newest(self, topic: str, received_at_ms: int, place: int) -> int | None:
        """Spare a message beyond the limit of its device.

        Args:
            topic: topic of the message.
            received_at_ms: time of receipt, epoch milliseconds.
            place: place of its row in the buffer.

        Returns:
            Place of the message to refuse instead: the spared message before it in the same second.
            It is the message's own place if no device can have sent it; None if none is refused.
        """
        if topic.startswith(_PREFIX) and topic.rpartition("/")[2] not in _KINDS:
            return place
        device, second = self._sender(topic), received_at_ms // 1000
        before = self._places.get(device)
        self._places[device] = (second, place)
        return before[1] if before is not None and before[0] == second else None

    def places(self) -> set[int]:
        """Return the places of all spared messages."""
        return {place for _, place in self._places.values()}


def _sender(topic: str) -> str:
    """Return the device id of a topic, regardless of site; any other topic as a whole."""
    levels = topic.split("/", 3) if topic.startswith(_PREFIX) else ()
    return levels[2] if len(levels) > 2 else topic


def _sender_at_site(topic: str) -> str:
    """Return site and device id of a topic; any other topic as a whole."""
    return topic.rpartition("/")[0] if topic.startswith(_PREFIX) and topic.count("/") == 3 else topic
