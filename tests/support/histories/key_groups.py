"""Key groups of a job without Spark: batches, timers, and stored forms in between."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute

from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.columnar.fold.judgement_batches import drop_broadcast_copies
from fleetpulse.columnar.fold.key_group import KeyGroup, begin
from fleetpulse.columnar.snapshot.rows import (
    SNAPSHOT_SCHEMA,
    snapshot_rows,
)
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import FLUSH, Kind, Row, key_group
from tests.support.histories.histories import (
    compared_columns,
    with_broadcasts,
)


def in_batches(
    rows: Sequence[Row],
    cuts: Sequence[int],
    deployment: Deployment,
    groups: int = 2,
    initial: Mapping[int, bytes] = MappingProxyType({}),
) -> Counter[tuple[Any, ...]]:
    """Judge rows in key groups and batches as the stream does; return the judgements.

    State passes between calls in its stored form, and the watermark is one batch behind.

    Args:
        rows: rows in the order of ``received_at``.
        cuts: numbers of rows after which a batch ends.
        deployment: lateness, clock lead and jitter.
        groups: number of key groups.
        initial: initial stored forms, by key group.
    """
    stream = Stream(deployment, groups, dict(initial))
    stream.batches(rows, cuts)
    return stream.judgements


class Stream:
    """Key groups of a job, from batch to batch.

    A key group without rows in a batch is evaluated only if its timer is due.

    Args:
        deployment: lateness, clock lead and jitter.
        groups: number of key groups.
        stored: stored forms by key group: initial ones, replaced by current ones.
        chunks: initial chunks of pending rows, by key group.
        look: callback that receives each key group after each of its batches.
    """

    def __init__(
        self,
        deployment: Deployment,
        groups: int,
        stored: dict[int, bytes],
        chunks: Mapping[int, dict[int, bytes]] = MappingProxyType({}),
        look: Callable[[KeyGroup], None] = lambda _: None,
    ) -> None:
        self._look = look
        self.deployment, self.groups, self.stored = deployment, groups, stored
        self.chunks: dict[int, dict[int, bytes]] = {group: dict(chunks.get(group, {})) for group in range(groups)}
        self.judgements: Counter[tuple[Any, ...]] = Counter()
        self.newest = 0
        self._started_ms: int | None = None
        self._due_ms: dict[int, int | None] = {group: self._armed(content) for group, content in stored.items()}

    def _armed(self, content: bytes) -> int | None:
        group = KeyGroup.from_bytes(content)
        group.arm(self.deployment)
        return group.due_ms

    def batches(self, rows: Sequence[Row], cuts: Sequence[int]) -> None:
        """Judge rows in batches that end at the cuts, and one batch of due timers.

        Args:
            rows: rows in the order of ``received_at``.
            cuts: numbers of rows after which a batch ends.
        """
        edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
        for start, end in pairwise(edges):
            self.batch(rows[start:end])
        self.batch([])

    def batch(self, rows: Sequence[Row]) -> None:
        """Judge a batch of rows in the order of ``received_at``, and fire due timers."""
        if self._started_ms is None and rows:
            self._started_ms = rows[0].received_at_ms
        mine: dict[int, list[Row]] = {group: [] for group in range(self.groups)}
        for one in with_broadcasts(rows):
            for group in self._concerned(one):
                mine[group].append(one)
        for group, its in mine.items():
            due_ms = self._due_ms.get(group)
            if its or (due_ms is not None and due_ms <= self.newest):  # the watermark is one batch behind
                self._fold(group, its)
        self.newest = max([self.newest, *(one.received_at_ms for one in rows)])

    def _concerned(self, one: Row) -> Sequence[int]:
        flushing = one.kind is Kind.TICK and one.contents().get("op") == FLUSH
        if one.kind in (Kind.GAP, Kind.POLICY) or flushing or one.is_for_everyone:
            return range(self.groups)
        return (0 if one.kind is Kind.TICK else key_group(one.device_id, self.groups),)

    def _fold(self, group: int, mine: Sequence[Row]) -> None:
        chunks = self.chunks[group]
        state = KeyGroup.from_bytes(self.stored[group]) if group in self.stored else begin(self._started_ms or 0)
        signals = signals_to_batch(one for one in mine if is_signal(one))
        others = [one for one in mine if not is_signal(one)]
        reached = max([self.newest, *(one.received_at_ms for one in others)])
        step = state.fold(signals, others, reached, self.deployment, chunks.__getitem__)
        self._look(state)
        self.judgements += compared_columns(drop_broadcast_copies(group, step.judgements))
        for number in step.deleted_chunks:
            del chunks[number]
        chunks |= dict(step.chunks)
        assert chunks.keys() == {chunk.number for waiting in state.waiting for chunk in waiting.chunks}
        # A timer that was set again during its batch fires in the next batch with rows.
        self._due_ms[group] = None if state.due_ms is None else max(state.due_ms, self.newest + 1)
        self.stored[group] = state.to_bytes()


def snapshot_of(stream: Stream) -> pa.Table:
    """Return the rows of a snapshot of all key groups."""
    batches = [
        batch
        for group, block in stream.stored.items()
        for batch in snapshot_rows(group, block, stream.chunks[group], stream.newest, stream.deployment)
    ]
    return pa.Table.from_batches(batches, SNAPSHOT_SCHEMA)
