"""Fold of the sessions of key groups in a Spark task.

Rule: this module has no rules about sessions, see `columnar.streams.sessions`. A call yields at most one row, with
all of its changes.
"""

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from fleetpulse.columnar.codec.arrow import NO_SIGNALS, batch_to_rows, from_bytes, to_bytes
from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.columnar.streams.sessions import SessionGroup
from fleetpulse.core.rows import Kind, Row
from fleetpulse.io.lifecycle.block_files import read_block
from fleetpulse.io.lifecycle.state_cache import StateValueCache
from fleetpulse.io.lifecycle.state_socket import leave_server_waiting
from fleetpulse.io.spark.python_worker import freeze_gc

_OutputRow: Final = SparkRow("key_group", "changes")


class SessionTask:
    """Fold of the key groups of one task, one at a time.

    Args:
        handle: Spark's handle of the state.
        silence_ms: limit of silence, milliseconds.
    """

    def __init__(self, handle: StatefulProcessorHandle, silence_ms: int) -> None:
        self._handle, self._silence_ms = handle, silence_ms
        self._group = handle.getValueState("group", "block binary")
        self._name = handle.getValueState("copy", "name string")
        self._copies = StateValueCache.of_worker()

    def fold(self, key_group: int, rows: Iterator[Any]) -> Iterator[Any]:
        """Fold the blocks of a key group in a micro-batch.

        Args:
            key_group: number of the key group.
            rows: rows with blocks, and wake rows without.
        """
        signals: list[pa.RecordBatch] = []
        gaps: list[Row] = []
        started_ms = newest_ms = 0
        for row in rows:
            newest_ms, started_ms = max(newest_ms, row.newest_ms), row.started_ms
            if (block := read_block(row, "signals")) is not None:
                signals.append(from_wire(block))
            if row.others is not None:
                others = from_bytes(row.others)
                gaps += batch_to_rows(others.filter(pa.array([kind == Kind.GAP for kind in others["kind"].to_pylist()])))
        name = self._name.get()
        stored = self._read(name[0] if name else None)
        group = SessionGroup.begin(started_ms) if stored is None else SessionGroup.from_bytes(stored)
        changes = group.fold(_whole(signals), gaps, newest_ms, self._silence_ms)
        self._write(group.to_bytes(), name[0] if name else None)
        if changes.num_rows:
            yield _OutputRow(key_group, to_bytes(changes))

    def _read(self, name: str | None) -> bytes | None:
        if name is None:
            return None
        if (copy := self._copies.find(name)) is not None:
            return copy
        stored = self._group.get()
        return stored[0] if stored else None

    def _write(self, block: bytes, former: str | None) -> None:
        if former is not None:
            self._copies.drop(former)
        self._group.update((block,))
        self._name.update((self._copies.keep(block),))

    def close(self) -> None:
        """Finish the task."""
        freeze_gc()
        leave_server_waiting(self._handle)


def _whole(signals: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(signals) if signals else NO_SIGNALS
