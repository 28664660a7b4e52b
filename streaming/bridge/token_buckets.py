"""Token buckets of senders, stored as columns: one bucket of rows and one of payload bytes for each.

Rule 1: a message is within a limit if its bucket has at least one token. So a sender may exceed a limit
by one message, and a message of any size, or of any number of rows, can be within it.
Rule 2: messages that arrived together are counted on columns. Only senders that may exceed a limit are
then counted message by message, with equal results.
"""

from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

BURST_S: Final = 60  # burst in seconds of the limit, for messages that a device buffered while it was away
_FEW: Final = 24  # fewer messages are counted one by one, which then takes less time
_SLOTS: Final = 1_024  # at first; the number doubles
_NEW_MS: Final = -1  # instant of buckets without a message


class TokenBuckets:
    """Two token buckets per sender.

    Args:
        rows_per_s: rows per second that a sender may send in the long run; 0 for no limit.
        bytes_per_s: bytes of payloads per second that it may send; 0 for no limit.

    Attributes:
        slots: index of the buckets of each sender.
    """

    def __init__(self, rows_per_s: int, bytes_per_s: int) -> None:
        self.slots: dict[str, int] = {}
        self._per_ms, self._bytes_per_ms = rows_per_s / 1000, bytes_per_s / 1000
        self._burst, self._burst_bytes = rows_per_s * BURST_S or inf, bytes_per_s * BURST_S or inf
        self._replace(np.empty(0, np.int64), _SLOTS)

    @property
    def limits(self) -> bool:
        """Whether there is a limit at all."""
        return min(self._burst, self._burst_bytes) < inf

    def slot(self, sender: str) -> int:
        """Return the index of the buckets of a sender; a new sender has full ones."""
        slot = self.slots.get(sender)
        if slot is None:
            slot = len(self.slots)
            if slot == len(self._at_ms):
                self._replace(np.arange(slot), 2 * slot)
            self.slots[sender] = slot
        return slot

    def take(self, slots: Sequence[int], sizes: Sequence[int], now_ms: int, outage: tuple[int, int]) -> list[int]:
        """Take the tokens of messages that arrived together; return the places of those beyond a limit.

        Args:
            slots: slot of each message.
            sizes: bytes of each payload.
            now_ms: wall clock time; a step backwards adds no tokens.
            outage: end and duration of an outage in which the broker queued messages; a sender gets the
                tokens of that time with its first message after the outage.
        """
        if len(slots) < _FEW:
            return self._take_one_by_one(range(len(slots)), slots, sizes, now_ms, outage)
        at = np.array(slots, np.int64)
        rows, size = self._filled(at, now_ms, outage)
        self._rows[at], self._bytes[at], self._at_ms[at] = rows, size, now_ms
        np.subtract.at(self._rows, at, 1.0)  # in the order of the messages, also of one sender
        np.subtract.at(self._bytes, at, np.array(sizes, np.float64))
        scarce = (self._rows[at] < 1) | (self._bytes[at] < 1)
        if not scarce.any():
            return []
        places, again = np.flatnonzero(scarce).tolist(), at[scarce]
        self._rows[again], self._bytes[again] = rows[scarce], size[scarce]
        return self._take_one_by_one(places, slots, sizes, now_ms, outage)

    def _filled(self, at: NDArray[np.int64], now_ms: int, outage: tuple[int, int]) -> tuple[NDArray[np.float64], ...]:
        """Return the tokens of rows and of bytes of slots, with those added up to the present."""
        since_ms, (back_ms, away_ms) = self._at_ms[at], outage
        elapsed_ms = np.maximum(now_ms - since_ms, 0)
        added_ms = np.where(since_ms < back_ms, away_ms, 0) if back_ms <= now_ms <= back_ms + away_ms else None
        found: list[NDArray[np.float64]] = []
        for tokens, burst, per_ms in (
            (self._rows, self._burst, self._per_ms),
            (self._bytes, self._burst_bytes, self._bytes_per_ms),
        ):
            left = tokens[at]
            left = np.maximum(np.minimum(left + elapsed_ms * per_ms, burst), left)  # more than the burst after an outage
            found.append(left if added_ms is None else left + added_ms * per_ms)
        return tuple(found)

    def _take_one_by_one(
        self, places: Iterable[int], slots: Sequence[int], sizes: Sequence[int], now_ms: int, outage: tuple[int, int]
    ) -> list[int]:
        rows, of_bytes = (cast("memoryview[float]", tokens.data) for tokens in (self._rows, self._bytes))
        at_ms = self._at_ms.data
        back_ms, away_ms = outage
        returned = back_ms <= now_ms <= back_ms + away_ms
        beyond: list[int] = []
        for place in places:
            slot = slots[place]
            left, bytes_left, since_ms = rows[slot], of_bytes[slot], at_ms[slot]
            if now_ms > since_ms:
                filled = left + (now_ms - since_ms) * self._per_ms
                left = filled if filled < self._burst else max(self._burst, left)
                filled = bytes_left + (now_ms - since_ms) * self._bytes_per_ms
                bytes_left = filled if filled < self._burst_bytes else max(self._burst_bytes, bytes_left)
            if returned and since_ms < back_ms:
                left += away_ms * self._per_ms
                bytes_left += away_ms * self._bytes_per_ms
            if left < 1 or bytes_left < 1:
                beyond.append(place)
                rows[slot], of_bytes[slot], at_ms[slot] = left, bytes_left, now_ms
            else:
                rows[slot], of_bytes[slot], at_ms[slot] = left - 1, bytes_left - sizes[place], now_ms
        return beyond

    def add(self, sender: str, rows: int, size: int) -> None:
        """Add tokens to the buckets of a sender; no effect if it has none."""
        slot = self.slots.get(sender)
        if slot is not None:
            self._rows[slot] += rows
            self._bytes[slot] += size

    def senders_since(self, since_ms: int) -> list[str]:
        """Return the senders with a message after an instant, the longest known first."""
        recent = self._at_ms[: len(self.slots)] > since_ms
        return [sender for sender, is_recent in zip(self.slots, recent.tolist(), strict=True) if is_recent]

    def newest(self, senders: Collection[str], count: int) -> list[str]:
        """Return those of the senders whose last messages are the newest, the oldest of them first."""
        return sorted(senders, key=lambda sender: self._at_ms[self.slots[sender]])[-count:]

    def keep(self, senders: Collection[str]) -> None:
        """Forget all other senders."""
        kept = np.array([self.slots[sender] for sender in senders], np.int64)
        self._replace(kept, max(_SLOTS, 2 * len(kept)))
        self.slots = {sender: slot for slot, sender in enumerate(senders)}

    def _replace(self, kept: NDArray[np.int64], size: int) -> None:
        """Move the buckets of some slots to the first slots of new columns."""
        rows, of_bytes = np.full(size, self._burst, np.float64), np.full(size, self._burst_bytes, np.float64)
        at_ms = np.full(size, _NEW_MS, np.int64)
        if len(kept):
            rows[: len(kept)], of_bytes[: len(kept)] = self._rows[kept], self._bytes[kept]
            at_ms[: len(kept)] = self._at_ms[kept]
        self._rows, self._bytes, self._at_ms = rows, of_bytes, at_ms
