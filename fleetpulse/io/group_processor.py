"""The operator around a key group: it decodes, calls the fold, encodes, and arms one timer.

Rule 1: no rule about devices is here, and no side effect: all that a call says is in the row that it yields.
Rule 2: the watermark runs one millisecond behind the newest ``received_at``, so that rows that share it are kept; it
only wakes a group. A timer may fire early; it is armed again.
Rule 3: a batch with rows wakes every group (`bronze_blocks.with_wake_rows`), and a group is folded once in it: what is due by
then is judged, and its timer is moved beyond the watermark before Spark asks which have expired.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from fleetpulse.columnar.blocks import NO_SIGNALS, batch_to_rows, from_bytes, to_bytes
from fleetpulse.columnar.group import KeyGroup, Step, begin
from fleetpulse.columnar.told import from_judgements, said_by
from fleetpulse.columnar.wire import from_wire
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoint import WATERMARK_DELAY_MS
from fleetpulse.io.group_state import GroupState
from fleetpulse.io.handover import handed
from fleetpulse.io.state_line import leave_waiting
from fleetpulse.io.workers import settle

pc: Any = pyarrow.compute  # its functions are made at run time: no checker knows them
OUTPUT: Final = "key_group int, judgements binary"
_OutputRow = SparkRow("key_group", "judgements")
TOLD: Final = ", ".join(f"{column.name} {column.type}" for column in JUDGEMENTS.columns)
_INSTANT: Final = pa.timestamp("us", "UTC")
_NO_STEP: Final = Step(from_judgements([]), [], [])  # of a group that was brought in, not folded


class GroupProcessor(StatefulProcessor):
    """One key group's call for each micro-batch in which it has rows, and for its timer.

    Args:
        deployment: lateness, clock lead and jitter.
        form: the stored form to write.
        silent: whether what is said is heard by nobody: then a summary is still to be said.
    """

    def __init__(self, deployment: Deployment, form: int, *, silent: bool = False) -> None:
        self.deployment = deployment
        self.form = form
        self.silent = silent

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state: the group with its timer, and what waits in it."""
        self.handle = handle
        self.state = GroupState(handle)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        """Begin with devices that another generation, or the registry, has brought; see `columnar.seeds`."""
        group = KeyGroup.from_bytes(initialState.block)
        group.arm(self.deployment)
        self.state.read()
        chunks = [(one["number"], bytes(one["rows"])) for one in initialState.chunks]
        self._keep(group, replace(_NO_STEP, chunks=chunks), None, timerValues.getCurrentWatermarkInMs(), owes=True)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fold the group's blocks of a micro-batch."""
        signals: list[pa.RecordBatch] = []
        others: list[Any] = []
        started_ms = newest_ms = 0
        for row in rows:
            newest_ms = max(newest_ms, row.newest_ms)
            if (block := handed(row, "signals")) is not None:
                signals.append(from_wire(block))
            if row.others is not None:
                others += batch_to_rows(from_bytes(row.others))
            started_ms = row.started_ms
        batch = pa.concat_batches(signals) if signals else NO_SIGNALS
        yield from self._fold(key[0], batch, others, timerValues, newest_ms=newest_ms, started_ms=started_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Let time pass for the group."""
        yield from self._fold(key[0], NO_SIGNALS, [], timerValues, fired=True)

    def close(self) -> None:
        """Nothing is held but what every task needs."""
        settle()
        leave_waiting(self.handle)

    def _fold(
        self,
        key_group: int,
        signals: pa.RecordBatch,
        others: list[Any],
        timers: Any,
        *,
        newest_ms: int = 0,
        started_ms: int = 0,
        fired: bool = False,
    ) -> Iterator[Any]:
        watermark_ms = timers.getCurrentWatermarkInMs()
        newest_ms = max(newest_ms, watermark_ms + WATERMARK_DELAY_MS)
        stored = self.state.read()
        if not (fired or signals.num_rows or others) and not _is_due(stored, newest_ms):
            return
        group = KeyGroup.from_bytes(stored[0]) if stored else begin(started_ms)
        step = group.fold(signals, others, newest_ms, self.deployment, self.state.chunk)
        summary = None if self.silent else group.summary(key_group)
        standing_ms = stored[1] if stored and not fired else None  # a timer that fired is gone
        self._keep(group, step, standing_ms, watermark_ms, owes=self.silent)
        told = [said_by(key_group, step.told), *([from_judgements([summary])] if summary else [])]
        if any(batch.num_rows for batch in told):
            yield _OutputRow(key_group, to_bytes(pa.concat_batches(told)))

    def _keep(self, group: KeyGroup, step: Step, standing_ms: int | None, watermark_ms: int, *, owes: bool) -> None:
        """Keep what came of a call, and arm the group's one timer unless the right one stands.

        Args:
            group: the group.
            step: what came of it.
            standing_ms: when its timer stands; None without one.
            watermark_ms: of the batch.
            owes: whether it still has to say how many devices it has: then it is woken as soon as the watermark moves.
        """
        due_ms = watermark_ms if owes else group.due_ms
        wanted_ms = None if due_ms is None else max(due_ms - WATERMARK_DELAY_MS, watermark_ms + 1)
        if standing_ms != wanted_ms:
            if standing_ms is not None:
                self.handle.deleteTimer(standing_ms)
            if wanted_ms is not None:
                self.handle.registerTimer(wanted_ms)
        self.state.write(group.to_bytes(self.form), wanted_ms, step.chunks, step.gone)


def _is_due(stored: tuple[bytes, int | None] | None, newest_ms: int) -> bool:
    """Whether a group that is woken without rows has anything to judge: its timer runs `WATERMARK_DELAY_MS` before that."""
    return stored is not None and stored[1] is not None and stored[1] + WATERMARK_DELAY_MS <= newest_ms


def unpacker(generation: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what turns rows of `OUTPUT` into judgements, columns of `TOLD`.

    They are whole here, and nothing is projected after it: an expression with the batch's time would be compiled anew,
    and then be warmed up anew, in every batch.

    Args:
        generation: of the job.
    """

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for judgements in batch["judgements"]:
                yield _complete(from_bytes(judgements.as_py()), generation)
        settle()

    return unpack


def _complete(told: pa.RecordBatch, generation: int) -> pa.RecordBatch:
    """Add what the shell knows, and make instants of milliseconds."""
    added = {
        "judged_at": pa.scalar(time.time_ns() // 1000, pa.int64()).cast(_INSTANT),
        "generation": pa.scalar(generation, pa.int32()),
    }
    columns: dict[str, pa.Array] = {name: pa.repeat(value, told.num_rows) for name, value in added.items()}
    for column in JUDGEMENTS.columns:
        if column.name not in added:
            instant = column.type == "timestamp"
            columns[column.name] = _instants(told[f"{column.name}_ms"]) if instant else told[column.name]
    return pa.RecordBatch.from_pydict({column.name: columns[column.name] for column in JUDGEMENTS.columns})


def _instants(millis: pa.Array) -> pa.Array:
    return pc.multiply(millis, 1000).cast(_INSTANT)
