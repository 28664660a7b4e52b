"""A device that floods: how much each may send, so that one cannot take the place of the fleet.

Rule 1: a message beyond a device's limit is kept, and marked: it goes to quarantine, and nowhere else.
Rule 2: a flood costs data, never presence: of what is beyond the limit the newest message of each second is not marked.
Rule 3: memory is bounded: a device that has been quiet for long enough is forgotten, which changes nothing for it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.rows import FROM_DEVICES

BURST_S: Final = 60  # what a device may send at once: that many seconds of its limit, such as what it kept while it was away
_OURS: Final = "fleet/"
_KINDS: Final = frozenset(kind.value for kind in FROM_DEVICES)
_LONGEST_AWAY_MS: Final = 3_600_000  # that a device is allowed for at once: a flood is one after a week of standstill too
_MOST: Final = 100_000  # devices remembered before the quiet ones are forgotten


class RateLimiter:
    """A bucket a device, filled evenly; a message takes one from it.

    Args:
        per_s: how many messages a second each may send in the long run; 0 for as many as it likes.
        identity: what identifies a device.
    """

    def __init__(self, per_s: int, identity: DeviceIdentity = DeviceIdentity.ID) -> None:
        self.sender = _sender if identity is DeviceIdentity.ID else _sender_at_site
        self._per_ms = per_s / 1000
        self._burst = per_s * BURST_S
        self._left: dict[str, tuple[float, int]] = {}  # by device: what was left, and when
        self._away_ms: int | None = None  # since when nobody listens
        self._back = (0, 0)  # when somebody listened again, and after how long

    def exceeding(self, topics: Sequence[str], now_ms: int) -> list[int]:
        """Count messages that arrived together; return the places of those that are beyond their device's limit.

        Args:
            topics: below ``fleet/`` the id names the device, or site and id; a foreign topic names it whole.
            now_ms: on the wall; running backwards, it fills nothing.
        """
        if not self._burst:
            return []
        if self._away_ms is not None:
            self._back, self._away_ms = (now_ms, min(max(0, now_ms - self._away_ms), _LONGEST_AWAY_MS)), None
        known, burst, per_ms, (back_ms, away_ms) = self._left, self._burst, self._per_ms, self._back
        sender = self.sender
        unknown, beyond = (burst, -1), list[int]()
        returned = back_ms <= now_ms <= back_ms + away_ms  # the broker kept for us what it was allowed to send meanwhile
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
        """Nobody listens since an instant on the wall; with the next message somebody does."""
        self._away_ms = since_ms if self._away_ms is None else min(self._away_ms, since_ms)

    def give_back(self, topic: str) -> None:
        """A message that was within the limit was let go of, and comes again: it has taken nothing."""
        device = self.sender(topic)
        if device in self._left:
            left, at_ms = self._left[device]
            self._left[device] = (left + 1, at_ms)

    def _forget(self, now_ms: int) -> None:
        """Let go of full buckets, and of the older half where all are in use."""
        full_ms = BURST_S * 1000
        kept = {device: held for device, held in self._left.items() if now_ms - held[1] < full_ms}
        if len(kept) > _MOST // 2:
            newest = sorted(kept.items(), key=lambda item: item[1][1])[-(_MOST // 2) :]
            kept = dict(newest)
        self._left = kept


class Spared:
    """Messages beyond their device's limit that count all the same: a device's newest of a second, as long as it waits.

    Args:
        sender: returns the device that a topic names, see `RateLimiter.sender`.
    """

    def __init__(self, sender: Callable[[str], str]) -> None:
        self._sender = sender
        self._places: dict[str, tuple[int, int]] = {}  # by device: the second, and the place of its message

    def newest(self, topic: str, received_at_ms: int, place: int) -> int | None:
        """Spare a message beyond its device's limit.

        Args:
            topic: where it was published.
            received_at_ms: when it was received, epoch milliseconds.
            place: of its row among those that wait.

        Returns:
            The place that does not count: that of the message which this one follows within the second, its own if no device
            can have sent it, or None.
        """
        if topic.startswith(_OURS) and topic.rpartition("/")[2] not in _KINDS:
            return place
        device, second = self._sender(topic), received_at_ms // 1000
        before = self._places.get(device)
        self._places[device] = (second, place)
        return before[1] if before is not None and before[0] == second else None

    def places(self) -> set[int]:
        """Return the places of all messages that are spared."""
        return {place for _, place in self._places.values()}


def _sender(topic: str) -> str:
    """Return the device that a topic names, whatever its site; a foreign topic stands for itself."""
    levels = topic.split("/", 3) if topic.startswith(_OURS) else ()
    return levels[2] if len(levels) > 2 else topic


def _sender_at_site(topic: str) -> str:
    """Return the device that a topic names, with its site; likewise."""
    return topic.rpartition("/")[0] if topic.startswith(_OURS) and topic.count("/") == 3 else topic
