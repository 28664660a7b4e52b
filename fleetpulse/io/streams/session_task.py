"""Fold of the sessions of key groups in a Spark task.

Rule 1: this module has no rules about sessions, see `columnar.streams.sessions`. A call yields at most one row, with
all of its changes, and with the state when a snapshot is due. That depends only on rows that all key groups see.
Rule 2: a key group without a state begins with that of the snapshot with which the checkpoint begins.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from fleetpulse.columnar.codec.arrow import NO_SIGNALS, batch_to_rows, from_bytes, to_bytes
from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.columnar.streams.sessions import SessionGroup
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.streams.sessions import is_snapshot_due
from fleetpulse.io.lifecycle.block_files import read_block
from fleetpulse.io.lifecycle.state_cache import StateValueCache
from fleetpulse.io.lifecycle.state_socket import leave_server_waiting
from fleetpulse.io.spark.python_worker import freeze_gc
from fleetpulse.io.streams.session_processor import InitialState, declare

_OutputRow: Final = SparkRow("key_group", "changes", "state")


class SessionTask:
    """Fold of the key groups of one task, one at a time.

    Args:
        handle: Spark's handle of the state.
        silence_ms: limit of silence, milliseconds.
        initial: state with which the checkpoint begins; None for none.
    """

    def __init__(self, handle: StatefulProcessorHandle, silence_ms: int, initial: InitialState | None) -> None:
        self._handle, self._silence_ms, self._initial = handle, silence_ms, initial
        self._group, self._name = declare(handle)
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
        batch = _whole(signals)
        if stored is not None:
            group = SessionGroup.from_bytes(stored)
        elif self._initial is not None:
            group = _initial_groups(self._initial.path, self._initial.key_groups)[key_group]
            batch, gaps = group.unread(batch, gaps, repeats=self._initial.repeats)
            newest_ms = max(newest_ms, group.shards.newest_ms)
        else:
            group = SessionGroup.begin(started_ms)
        snapshot_due = stored is None or is_snapshot_due(group.shards.newest_ms, newest_ms)
        changes = group.fold(batch, gaps, newest_ms, self._silence_ms)
        state = group.to_bytes()
        self._write(state, name[0] if name else None)
        if changes.num_rows or snapshot_due:
            yield _OutputRow(key_group, to_bytes(changes), state if snapshot_due else None)

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
        _initial_groups.cache_clear()
        freeze_gc()
        leave_server_waiting(self._handle)


def _whole(signals: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(signals) if signals else NO_SIGNALS


@lru_cache(maxsize=1)
def _initial_groups(path: Path, key_groups: int) -> list[SessionGroup]:
    """Return the initial states of all key groups; the task that reads them clears the cache at its end."""
    return SessionGroup.from_bytes(path.read_bytes()).split(key_groups)
