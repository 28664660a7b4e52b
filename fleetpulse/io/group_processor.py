"""The operator around a key group: it decodes, calls the fold, encodes, and arms one timer.

Rule 1: no rule about devices is here, and no side effect: all that a call says is in the rows that it yields.
Rule 2: the watermark runs one millisecond behind the newest ``received_at``, so that rows that share it are kept; it
only wakes a group. A timer may fire early; it is armed again.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from fleetpulse.columnar.blocks import batch_to_rows, from_bytes
from fleetpulse.columnar.group import KeyGroup, begin
from fleetpulse.core.judgements import Judgement
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS

WATERMARK_DELAY_MS: Final = 1
_ADDED_LATER: Final = ("judged_at", "generation")  # by the shell: they are not the fold's
_INSTANTS: Final = tuple(column.name for column in JUDGEMENTS.columns if column.type == "timestamp")
OUTPUT: Final = ", ".join(
    f"{column.name}_ms long" if column.name in _INSTANTS else f"{column.name} {column.type}"
    for column in JUDGEMENTS.columns
    if column.name not in _ADDED_LATER
)
_NAMES: Final = [item.split()[0] for item in OUTPUT.split(", ")]
_OutputRow = SparkRow(*_NAMES)


class GroupProcessor(StatefulProcessor):
    """One key group's call for each micro-batch in which it has rows, and for its timer.

    Args:
        deployment: lateness and clock lead.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state: the group, what waits in it, and when its timer stands."""
        self.handle = handle
        self.group = handle.getValueState("group", "block binary, timer long")
        self.waiting = handle.getValueState("waiting", "rows binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fold the group's blocks of a micro-batch."""
        messages = []
        started_ms = 0
        for row in rows:
            messages += batch_to_rows(from_bytes(row.block)[0])
            started_ms = row.started_ms
        newest_ms = max(message.received_at_ms for message in messages)
        yield from self._fold(key[0], messages, newest_ms, timerValues, started_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Let time pass for the group."""
        yield from self._fold(key[0], [], 0, timerValues, 0)

    def close(self) -> None:
        """Nothing is held."""

    def _fold(self, key_group: int, messages: list[Any], newest_ms: int, timers: Any, started_ms: int) -> Iterator[Any]:
        watermark_ms = timers.getCurrentWatermarkInMs()
        stored, waiting = self.group.get(), self.waiting.get()
        group = KeyGroup.from_stored(stored[0], waiting[0] if waiting else None) if stored else begin(started_ms)
        newest_ms = max(newest_ms, watermark_ms + WATERMARK_DELAY_MS)
        judgements = group.fold(messages, newest_ms, self.deployment)
        summary = group.summary(key_group)
        timer_ms = self._arm(stored[1] if stored else None, group.due_ms, watermark_ms)
        block, rows = group.to_stored()
        self.group.update((block, timer_ms))
        if rows is not None:
            self.waiting.update((rows,))
        elif waiting:
            self.waiting.clear()
        for judgement in [*judgements, summary] if summary else judgements:
            yield to_output(judgement)

    def _arm(self, standing_ms: int | None, due_ms: int | None, watermark_ms: int) -> int | None:
        """Arm the group's one timer, unless one stands that comes first anyway."""
        wanted_ms = None if due_ms is None else max(due_ms - WATERMARK_DELAY_MS, watermark_ms + 1)
        if standing_ms is not None and standing_ms > watermark_ms:
            if wanted_ms is None or standing_ms <= wanted_ms:
                return standing_ms
            self.handle.deleteTimer(standing_ms)
        if wanted_ms is not None:
            self.handle.registerTimer(wanted_ms)
        return wanted_ms


def to_output(judgement: Judgement) -> Any:
    """Return a judgement as a row of `OUTPUT`."""
    values = []
    for name in _NAMES:
        value = getattr(judgement, name)
        if name == "last_errors":
            value = json.dumps(value) if value else None
        values.append(str(value) if name in ("kind", "from_mode", "to_mode", "trigger") and value else value)
    return _OutputRow(*values)
