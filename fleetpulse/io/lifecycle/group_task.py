"""Fold of key groups in a Spark task: blocks to judgements, state and timers.

Rule 1: this module has no rules about devices. A call yields one row with all of its judgements, or
with the files that contain them.
Rule 2: the watermark is one millisecond behind the newest ``received_at``, so that rows of that
instant are kept. The watermark only wakes a group. A timer may fire early and is then set again.
Rule 3: a batch with rows wakes every group (`bronze.with_wake_rows`) and folds each group once. The
fold judges everything due and moves the timer beyond the watermark. Spark checks for expired timers
after that.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from fleetpulse.columnar.codec.arrow import NO_SIGNALS, batch_to_rows, from_bytes, to_bytes
from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.columnar.fold.judgement_batches import drop_broadcast_copies, judgements_to_batch, sum_repeats
from fleetpulse.columnar.fold.key_group import FoldResult, KeyGroup, begin
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.checkpoint import WATERMARK_DELAY_MS
from fleetpulse.io.lifecycle.block_files import read_block
from fleetpulse.io.lifecycle.state_socket import leave_server_waiting
from fleetpulse.io.lifecycle.state_variables import GroupState
from fleetpulse.io.spark.python_worker import freeze_gc

_OutputRow = SparkRow("key_group", "judgements", "files")
MANY: Final = 5_000  # from this number on, the judgements of one call go into files
_NO_STEP: Final = FoldResult(judgements_to_batch([]), [], [])  # result for a group of the initial state


class GroupFold:
    """Fold of the key groups of one task, one at a time.

    Args:
        handle: Spark's handle of the state.
        deployment: allowed lateness, clock lead and jitter.
        form: format version to write.
        silent: whether summaries are withheld, see `GroupProcessor`.
        table: folder of the judgements table, see `GroupProcessor`.
        generation: generation of the job.
        whole: whether each judgement has a row of its own, see `GroupProcessor`.
    """

    def __init__(
        self,
        handle: StatefulProcessorHandle,
        deployment: Deployment,
        form: int,
        *,
        silent: bool,
        table: str | None = None,
        generation: int = 0,
        whole: bool = False,
    ) -> None:
        self.handle, self._whole = handle, whole
        self._table, self._generation = table, generation
        self.deployment, self.form, self.silent = deployment, form, silent
        self.state = GroupState(handle)

    def begin_with(self, initial: Any, watermark_ms: int) -> None:
        """Load the initial state of a key group, a row of `BOOTSTRAP_SCHEMA`."""
        group = KeyGroup.from_bytes(initial.block)
        group.arm(self.deployment)
        self.state.read()
        chunks = [(one["number"], bytes(one["rows"])) for one in initial.chunks]
        self._keep(group, replace(_NO_STEP, chunks=chunks), None, watermark_ms, summary_pending=True)

    def fold_rows(self, key_group: int, rows: Iterator[Any], watermark_ms: int) -> Iterator[Any]:
        """Fold the group's rows of a micro-batch: blocks, or only a wake row."""
        signals: list[pa.RecordBatch] = []
        others: list[Any] = []
        started_ms = newest_ms = 0
        for row in rows:
            newest_ms = max(newest_ms, row.newest_ms)
            if (block := read_block(row, "signals")) is not None:
                signals.append(from_wire(block))
            if row.others is not None:
                others += batch_to_rows(from_bytes(row.others))
            started_ms = row.started_ms
        batch = pa.concat_batches(signals) if signals else NO_SIGNALS
        yield from self._fold(key_group, batch, others, watermark_ms, newest_ms=newest_ms, started_ms=started_ms)

    def fold_timer(self, key_group: int, watermark_ms: int) -> Iterator[Any]:
        """Judge everything that is due after the group's timer fired."""
        yield from self._fold(key_group, NO_SIGNALS, [], watermark_ms, fired=True)

    def close(self) -> None:
        """Finish the task."""
        freeze_gc()
        leave_server_waiting(self.handle)

    def _fold(
        self,
        key_group: int,
        signals: pa.RecordBatch,
        others: list[Any],
        watermark_ms: int,
        *,
        newest_ms: int = 0,
        started_ms: int = 0,
        fired: bool = False,
    ) -> Iterator[Any]:
        newest_ms = max(newest_ms, watermark_ms + WATERMARK_DELAY_MS)
        stored = self.state.read()
        if not (fired or signals.num_rows or others) and not _is_due(stored, newest_ms):
            return
        group = KeyGroup.from_bytes(stored[0]) if stored else begin(started_ms)
        step = group.fold(signals, others, newest_ms, self.deployment, self.state.chunk)
        summary = None if self.silent else group.summary(key_group)
        registered_ms = stored[1] if stored and not fired else None  # Spark removed the timer that fired
        self._keep(group, step, registered_ms, watermark_ms, summary_pending=self.silent)
        judgements = drop_broadcast_copies(key_group, step.judgements)
        if not self._whole:
            judgements = sum_repeats(judgements, newest_ms)
        batches = [judgements, *([judgements_to_batch([summary])] if summary else [])]
        if any(batch.num_rows for batch in batches):
            yield self._row(key_group, pa.concat_batches(batches))

    def _row(self, key_group: int, judgements: pa.RecordBatch) -> Any:
        if self._table is None or judgements.num_rows < MANY:
            return _OutputRow(key_group, to_bytes(judgements), None)
        from fleetpulse.io.lifecycle.judgement_sink import (
            write_to_files,  # the import starts a thread, and a process that forks workers must have only one
        )

        return _OutputRow(key_group, None, write_to_files(self._table, judgements, self._generation))

    def _keep(
        self, group: KeyGroup, step: FoldResult, registered_ms: int | None, watermark_ms: int, *, summary_pending: bool
    ) -> None:
        """Store a group after a call, and set the group's one timer unless it is correct.

        Args:
            group: key group after the call.
            step: result of the call.
            registered_ms: time of the registered timer, epoch milliseconds; None without a timer.
            watermark_ms: watermark of the batch, epoch milliseconds.
            summary_pending: whether the group must still emit a summary. Its timer then fires as soon as the
                watermark moves.
        """
        due_ms = watermark_ms if summary_pending else group.due_ms
        timer_ms = None if due_ms is None else max(due_ms - WATERMARK_DELAY_MS, watermark_ms + 1)
        if registered_ms != timer_ms:
            if registered_ms is not None:
                self.handle.deleteTimer(registered_ms)
            if timer_ms is not None:
                self.handle.registerTimer(timer_ms)
        self.state.write(group.to_bytes(self.form), timer_ms, step.chunks, step.deleted_chunks)


def _is_due(stored: tuple[bytes, int | None] | None, newest_ms: int) -> bool:
    """Return whether a group woken without rows has anything to judge up to ``newest_ms``.

    The timer is set `WATERMARK_DELAY_MS` before the time at which the group is due.
    """
    return stored is not None and stored[1] is not None and stored[1] + WATERMARK_DELAY_MS <= newest_ms
