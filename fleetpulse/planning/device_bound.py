"""Bound of the disk space that one device can fill in a day, whatever it sends.

Rule 1: a bound is a function of the limits in force: messages and payload bytes per second, rows of a
flood in a segment, and rows of judgements in a batch. The settings ``keep_...`` limit the number of days.
Rule 2: the content of a payload is stored at most once in a table, and random content cannot be
compressed. Row costs are those of the real writers, see ``tests/unit/planning/test_device_bound.py``.

Source: docs/concepts/limits-of-a-device.md explains the terms.
"""

from dataclasses import dataclass, field
from typing import Final

from fleetpulse.core.judgements import NEWEST
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.policy import Rules
from fleetpulse.core.rows import FROM_DEVICES, KEPT_BYTES, SPARED_BYTES
from fleetpulse.core.times import DAY_S

MESSAGE_BYTES: Final = 25  # row of ``messages`` without texts and metrics
KINDS: Final = 3  # kinds of judgements about messages that a device can cause at a time: late, copies, and another
NAMED_ROWS: Final = KINDS * NEWEST  # rows for one message each that a batch writes for a device and minute
SUM_ROWS: Final = len(FROM_DEVICES) * (1 + 2 * (KINDS - 1))  # sums per message kind: late once, others with and without a time
JUDGEMENT_BYTES: Final = 40  # row of ``judgements`` about a message, in files as the job writes them, without texts
SUM_BYTES: Final = 80  # row for several messages
TRANSITION_BYTES: Final = 100  # row of a transition without the texts of its errors
REFUSED_BYTES: Final = 70  # row of ``quarantine`` without its payload and topic
GATEWAY_BYTES: Final = 18  # row of ``gateways`` without its texts
MAX_TOPIC_BYTES: Final = 512  # of a topic in ``quarantine``
_MOST_TEXT: Final = 4 * MAX_TEXT  # bytes of a text field


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of one device.

    Attributes:
        messages_per_s: setting ``flood_limit``.
        bytes_per_s: setting ``flood_bytes``.
        segments_per_s: segments that a bridge writes in a second: four, and one for each 5,000
            messages.
        spared_bytes: greatest payload of a message beyond the limits that is judged.
        flood_rows: rows of a flood in a segment.
        flood_bytes: bytes of the payload in such a row.
        batches_per_s: batches of the lifecycle job in a second: one for each hold time
            (`adaptive_batching`), and one for each 20,000 messages.
        rules: policy of its class.
    """

    messages_per_s: int = 100
    bytes_per_s: int = 65_536
    segments_per_s: float = 8.0
    spared_bytes: int = SPARED_BYTES
    flood_rows: int = 2
    flood_bytes: int = 128
    batches_per_s: float = 1.125
    rules: Rules = field(default_factory=Rules)

    @property
    def accepted_per_s(self) -> float:
        """Messages that are decoded, per second: those within the limit, and the spared ones."""
        return self.messages_per_s + self._spared_per_s

    @property
    def batches_of_minutes_per_s(self) -> float:
        """Pairs of a batch and a minute of ``received_at`` that it reads, per second."""
        return self.batches_per_s + 1 / 60

    @property
    def content_per_s(self) -> float:
        """Bytes of payloads of these messages, per second."""
        return self.bytes_per_s + self._spared_per_s * self.spared_bytes

    @property
    def _spared_per_s(self) -> float:
        return self.segments_per_s + 1  # one in each segment, and one more in a segment that spans two seconds


def bytes_a_day(limits: DeviceLimits) -> dict[str, float]:
    """Return the greatest growth of each table by one device, in bytes a day.

    A message is decoded or refused, so the sum of ``messages``, ``judgements``, ``gateways`` and
    ``quarantine`` exceeds the growth of all tables. Bursts are not included: each adds the messages of a minute.

    Returns:
        ``messages``; ``judgements`` about messages; ``gateways``; ``transitions``; ``quarantine`` for messages
        that cannot be decoded; ``floods`` for rows of quarantine beyond the limits.
    """
    rows, content, rules = limits.accepted_per_s, limits.content_per_s, limits.rules
    of_texts = min(content, rows * 2 * _MOST_TEXT)  # boot, and gateway or session
    named = min(rows, limits.batches_of_minutes_per_s * NAMED_ROWS)
    sums = min(rows - named, limits.batches_of_minutes_per_s * SUM_ROWS)
    of_named = min(content, named * 2 * _MOST_TEXT)  # boot and gateway
    changes = 2 / max(1, rules.death_grace_ms) + 2 * rules.degraded_errors / rules.degraded_window_ms
    changes = min(rows, changes * 1_000)  # per second; a message causes or reverses each change
    a_second = {  # a device may name another site in each topic
        "messages": rows * (MESSAGE_BYTES + MAX_ID_BYTES) + content,
        "judgements": named * (JUDGEMENT_BYTES + MAX_ID_BYTES) + of_named + sums * SUM_BYTES,
        "gateways": rows * (GATEWAY_BYTES + MAX_ID_BYTES) + of_texts,
        "transitions": changes * (TRANSITION_BYTES + rules.last_errors * _MOST_TEXT),
        "quarantine": rows * (REFUSED_BYTES + MAX_TOPIC_BYTES) + min(content, rows * KEPT_BYTES),
        "floods": limits.segments_per_s * limits.flood_rows * (REFUSED_BYTES + MAX_TOPIC_BYTES + limits.flood_bytes),
    }
    return {table: each * DAY_S for table, each in a_second.items()}
