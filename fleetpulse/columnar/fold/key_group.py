"""Key group, the unit of state: devices, pending rows, coverage and policies.

Rule 1: calls of ``fold`` take rows in the order of ``received_at``; within a call, in any order.
Rule 2: the judgements depend on the rows and on the newest ``received_at``, never on how rows were
cut into calls. A verdict jitter changes only the call in which a verdict is emitted.
"""

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.arrow import SIGNAL_SCHEMA, batch_to_rows, rows_to_batch
from fleetpulse.columnar.codec.context_json import context_from_plain, context_to_plain
from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.columnar.fold.judge import DueRows, FoldCall
from fleetpulse.columnar.fold.judgement_batches import JUDGEMENT_SCHEMA, judgements_to_batch
from fleetpulse.columnar.fold.ordering import by_shard, frontiers, shards_of, split_late
from fleetpulse.columnar.fold.pending import PendingRows, Read, pending_from_plain, pending_to_plain, span_ms
from fleetpulse.columnar.jit.context import NEVER, NONE, Vocabulary, packed_context
from fleetpulse.columnar.jit.kernel import jitter_delays
from fleetpulse.columnar.jit.take import taken
from fleetpulse.columnar.state.codec import from_stored, to_stored
from fleetpulse.columnar.state.devices import Devices
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.shards import Advance, Shards
from fleetpulse.core.replay import Deployment, LatenessFilter, arrival, cuts_at_gaps, read_before
from fleetpulse.core.rows import FLUSH, Kind, Row

_BEFORE_ALL: Final = -(2**61)  # replaces a frontier that is not known yet


@dataclass(frozen=True, slots=True)
class FoldResult:
    """Result of one call of `KeyGroup.fold`.

    Attributes:
        judgements: columns of `JUDGEMENT_SCHEMA`.
        chunks: new chunks of pending rows to store, with their numbers.
        deleted_chunks: numbers of the chunks to delete.
    """

    judgements: pa.RecordBatch
    chunks: list[tuple[int, bytes]]
    deleted_chunks: list[int]


@dataclass(slots=True)
class KeyGroup:
    """State of one key group.

    Attributes:
        shards: coverage and frontier of every site.
        policies: known policies.
        devices: devices as columns.
        waiting: index of the pending chunks of each shard.
        counts: devices by mode as JSON, as last emitted in a summary; empty before the first.
        due_ms: earliest ``received_at`` at which a row or deadline becomes due; None if there is
            none.
    """

    shards: Shards
    policies: Policies = field(default_factory=Policies)
    devices: Devices = field(default_factory=Devices)
    waiting: list[PendingRows] = field(default_factory=list[PendingRows])
    counts: str = ""
    due_ms: int | None = None

    def __post_init__(self) -> None:
        """Create an empty index of pending chunks for each shard if none is given."""
        self.waiting = self.waiting or [PendingRows() for _ in range(len(self.shards))]

    def fold(
        self,
        signals: pa.RecordBatch,
        others: Sequence[Row],
        newest_ms: int,
        deployment: Deployment,
        read: Read,
    ) -> FoldResult:
        """Add rows, then judge everything at or before the frontier.

        Args:
            signals: signals and wills of the group in one micro-batch, columns of `SIGNAL_SCHEMA`.
            others: other rows of the micro-batch, gateway events for everyone included.
            newest_ms: ``received_at`` up to which every row has been read.
            deployment: lateness, clock lead and jitter.
            read: function that returns a chunk of pending rows by its number.
        """
        signals, others = _received_in_order(signals), sorted(others, key=arrival)
        cuts = cuts_at_gaps(others, self.shards)
        if not cuts:
            return self._fold(signals, others, newest_ms, deployment, read)
        received = signals["received_at_ms"].to_numpy()
        written, deleted, judgements = dict[int, bytes](), set[int](), list[pa.RecordBatch]()
        start, first = 0, 0

        def reading(number: int) -> bytes:
            return written.get(number) or read(number)

        for at in (*cuts, None):
            gap = None if at is None else others[at]
            end = len(received) if gap is None else int(np.searchsorted(received, gap.received_at_ms))
            through_ms = newest_ms if gap is None else read_before(gap)
            part = signals.slice(start, end - start)
            step = self._fold(part, others[first:at], through_ms, deployment, reading)
            judgements.append(step.judgements)
            written.update(step.chunks)
            deleted |= {*step.deleted_chunks}
            start, first = end, at or 0
        remaining = [(number, chunk) for number, chunk in written.items() if number not in deleted]
        return FoldResult(_concat(judgements, JUDGEMENT_SCHEMA), remaining, sorted(deleted - written.keys()))

    def _fold(
        self, signals: pa.RecordBatch, others: Sequence[Row], newest_ms: int, deployment: Deployment, read: Read
    ) -> FoldResult:
        """Fold rows in arrival order; only the first row may be a gap row of `cuts_at_gaps`."""
        before, judgements = self.shards, list[pa.RecordBatch]()
        read_rows = self._read_rows(signals, others, newest_ms, deployment, judgements)
        chunks, deleted = self._split(before, deployment, read) if len(self.shards) > len(before) else ([], [])
        advance = Advance.between(before, self.shards, deployment.allowed_lateness_ms)
        fresh, due = dict(chunks), list[DueRows]()

        def reading(number: int) -> bytes:
            return fresh.get(number) or read(number)

        for shard, listening in enumerate(self.shards.listenings):
            new, rows = read_rows.signals[shard], read_rows.others[shard]
            frontier_ms, waiting = listening.frontier_ms, self.waiting[shard]
            early = np.ones(new.num_rows, bool)
            if frontier_ms is not None:
                due_signals, due_others, read_out = waiting.take(advance.former_ms[shard], frontier_ms, reading)
                deleted += read_out
                early = new["presence_ms"].to_numpy() > frontier_ms
                commands = [row for batch in due_others for row in batch_to_rows(batch)]
                commands += [row for row in rows if _at(row) <= frontier_ms]
                read_rows.others[shard] = [row for row in rows if _at(row) > frontier_ms]
                waited = sum(batch.num_rows for batch in due_signals)
                known = _concat([*due_signals, new], SIGNAL_SCHEMA)
                due.append(DueRows(shard, known, np.concatenate([np.ones(waited, bool), ~early]), commands))
            read_rows.early.append(early)
        if due:
            judgements += self._judge(due, advance, deployment, read_rows.flushed_ms)
        else:
            self.arm(deployment)
        for shard, listening in enumerate(self.shards.listenings):
            shard_chunks, shard_deleted = self._keep(
                shard, listening.frontier_ms, advance.former_ms[shard], read_rows, deployment, reading
            )
            chunks, deleted = [*chunks, *shard_chunks], [*deleted, *shard_deleted]
        self._set_due_for_pending(deployment)
        remaining = [(number, chunk) for number, chunk in chunks if number not in deleted]
        return FoldResult(_concat(judgements, JUDGEMENT_SCHEMA), remaining, [number for number in deleted if number not in fresh])

    def _keep(
        self,
        shard: int,
        frontier_ms: int | None,
        before_ms: int | None,
        read_rows: "_ReadRows",
        deployment: Deployment,
        read: Read,
    ) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Store the pending rows of a shard.

        Returns:
            New chunks with their numbers, and the numbers of the chunks to delete.
        """
        waiting = self._waiting(shard)
        advance_ms = 0 if frontier_ms is None or before_ms is None else frontier_ms - before_ms
        width_ms = span_ms(advance_ms, deployment.allowed_lateness_ms)
        written = waiting.written
        chunks = waiting.write(read_rows.signals[shard], width_ms, read_rows.early[shard])
        chunks += waiting.write(rows_to_batch(read_rows.others[shard]), width_ms)
        joined, parts = waiting.join(frontier_ms, written, read, moving=advance_ms > 0)
        return [*chunks, *joined], parts

    def _waiting(self, shard: int) -> PendingRows:
        """Return the pending chunks of a shard, after setting its next free number.

        Chunks of all shards share one sequence of numbers.
        """
        waiting = self.waiting[shard]
        waiting.written = max(one.written for one in self.waiting)
        return waiting

    def _split(self, before: Shards, deployment: Deployment, read: Read) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Move pending rows into the new shards of their sites; return chunks as `_keep` does."""
        sources = {before.number(min(sites)) for sites in self.shards.sites[len(before) - 1 :]}
        self.waiting += [PendingRows() for _ in range(len(self.shards) - len(before))]
        width_ms, chunks, deleted = span_ms(0, deployment.allowed_lateness_ms), list[tuple[int, bytes]](), list[int]()
        for source in sources:
            signals, others, read_out = self.waiting[source].take(before.listenings[source].frontier_ms, NEVER, read)
            deleted += read_out
            rows = [row for batch in others for row in batch_to_rows(batch)]
            of_source = [number for number, sites in enumerate(self.shards.sites, 1) if before.number(min(sites)) == source]
            chunks += self.store_pending(_concat(signals, SIGNAL_SCHEMA), rows, width_ms, {source, *of_source})
        return chunks, deleted

    def store_pending(
        self, signals: pa.RecordBatch, others: Sequence[Row], width_ms: int, shards: Container[int] | None = None
    ) -> list[tuple[int, bytes]]:
        """Store pending rows, each in the shard of its site.

        Args:
            signals: columns of `SIGNAL_SCHEMA`, with their presence times.
            others: other rows.
            width_ms: width of the span of event time that a chunk covers.
            shards: numbers of the shards that store rows for everyone; None: shards whose frontier
                is before the row.

        Returns:
            The chunks to store, with their numbers.
        """
        chunks: list[tuple[int, bytes]] = []
        numbers = shards_of(signals, self.shards)
        for shard, frontier_ms in enumerate(self.shards.frontiers_ms):
            chunks += self._waiting(shard).write(signals, width_ms, numbers == shard)
            shard_rows = [row for row in others if not row.is_for_everyone and self.shards.number(row.site) == shard]
            for row in (row for row in others if row.is_for_everyone):
                shard_rows += [row] if (row.at_ms > _or_long_ago(frontier_ms) if shards is None else shard in shards) else []
            chunks += self._waiting(shard).write(rows_to_batch(shard_rows), width_ms)
        return chunks

    def _read_rows(
        self,
        signals: pa.RecordBatch,
        others: Sequence[Row],
        newest_ms: int,
        deployment: Deployment,
        judgements: list[pa.RecordBatch],
    ) -> "_ReadRows":
        """Update coverage, frontiers and policies; return rows that can still act."""
        intake = LatenessFilter(deployment, self.shards, self.policies, [])
        received = signals["received_at_ms"].to_numpy()
        on_time: dict[int, list[pa.RecordBatch]] = {}
        start, base = 0, self.shards  # coverage is constant between two gap rows

        def part(end: int) -> None:
            if end == start:
                return
            for shard, shard_signals in by_shard(signals.slice(start, end - start), base):
                listening = base.listenings[shard]
                context = packed_context(listening.coverage, Policies(), (), Vocabulary(), Vocabulary())
                start_ms = NONE if listening.frontier_ms is None else listening.frontier_ms
                received_ms = shard_signals["received_at_ms"].to_numpy()
                reached = frontiers(context, received_ms, deployment.allowed_lateness_ms, listening.newest_ms, start_ms)
                split = split_late(shard_signals, reached, deployment)
                on_time.setdefault(shard, []).append(split.kept)
                judgements.extend(split.judgements)

        waiting: list[Row] = []
        flushed: tuple[int | None, ...] = (None,) * len(base)
        for row in others:
            if row.kind is Kind.GAP:
                end = int(np.searchsorted(received, row.received_at_ms))
                part(end)
                if end > start and intake.shards is not None:
                    intake.shards = intake.shards.read(int(received[end - 1]), deployment.allowed_lateness_ms)
                start = end
            if intake.read(row):
                waiting.append(row)
            assert intake.shards is not None, "a row was read"
            if row.kind is Kind.TICK and row.contents().get("op") == FLUSH:
                flushed = tuple(one.frontier_ms for one in intake.shards.listenings)  # as of this tick, wherever the batch ends
            if row.kind is Kind.GAP:
                base = intake.shards
                flushed += flushed[:1] * (len(base) - len(flushed))
        part(signals.num_rows)
        assert intake.shards is not None, "a key group begins with a row"
        newest_ms = max(newest_ms, int(received[-1]) if len(received) else newest_ms)
        self.shards = shards = intake.shards.read(newest_ms, deployment.allowed_lateness_ms)
        self.policies = intake.policies
        if intake.judgements:
            judgements.append(judgements_to_batch(intake.judgements))
        numbers = range(len(shards))
        shard_others = [
            [row for row in waiting if row.is_for_everyone or shards.number(row.site) == number] for number in numbers
        ]
        return _ReadRows([_concat(on_time.get(number, ()), SIGNAL_SCHEMA) for number in numbers], shard_others, flushed)

    def _judge(
        self, due: Sequence[DueRows], advance: Advance, deployment: Deployment, flushed_ms: Sequence[int | None]
    ) -> list[pa.RecordBatch]:
        judging = FoldCall(self.devices, advance, self.policies)
        judging.apply_rows(due)
        width_ms, frontiers_ms = deployment.verdict_jitter_ms, [_or_long_ago(one) for one in advance.shards.frontiers_ms]
        at_least_ms = [_or_long_ago(one) for one in flushed_ms]
        at = judging.shards_of_devices()
        through_ms = np.maximum(np.array(frontiers_ms)[at] - self._delays(width_ms), np.array(at_least_ms)[at])
        settled_ms = _or_long_ago(self.shards.least_frontier_ms)
        left_ms = judging.advance_time(through_ms, settled_ms)
        self.devices.drop_absent()
        behind_ms = [max(one - width_ms, least) for one, least in zip(frontiers_ms, at_least_ms, strict=True)]
        self.shards = self.shards.forget_before(behind_ms)
        # A flush must not drop policies: `LatenessFilter` limits the number of policies from this
        # instant on, and that number must not depend on how rows were cut into calls.
        self.policies = self.policies.pruned(deployment.emitted_through_ms(settled_ms))
        self.due_ms = None
        self._set_due_for_deadlines(frontiers_ms, left_ms, deployment)
        return judging.batches

    def _delays(self, width_ms: int) -> Any:
        """Return the delay of each device's deadlines by the verdict jitter, in milliseconds."""
        if not width_ms or not len(self.devices):
            return np.zeros(len(self.devices), np.int64)
        ids = self.devices.ids if not self.devices.ids.offset else pa.concat_arrays([self.devices.ids])
        _, offsets, text = ids.buffers()
        ends = np.frombuffer(offsets, np.int32)[: len(ids) + 1]
        return jitter_delays(ends, np.frombuffer(text, np.uint8), width_ms)

    def arm(self, deployment: Deployment) -> None:
        """Set `due_ms` without judging anything; for devices from a bootstrap or snapshot."""
        self.due_ms = None
        frontiers_ms = [_or_long_ago(one) for one in self.shards.frontiers_ms]
        advance = Advance.between(self.shards, self.shards, deployment.allowed_lateness_ms)
        judging = FoldCall(self.devices, advance, self.policies)
        through_ms = np.array(frontiers_ms)[judging.shards_of_devices()] - self._delays(deployment.verdict_jitter_ms)
        left_ms = judging.advance_time(through_ms, _BEFORE_ALL)
        assert not judging.batches, "imported devices are judged up to their frontier"
        self._set_due_for_deadlines(frontiers_ms, left_ms, deployment)
        self._set_due_for_pending(deployment)

    def _set_due_for_deadlines(self, frontiers_ms: Sequence[int], left_ms: Sequence[int | None], deployment: Deployment) -> None:
        for listening, frontier_ms, left in zip(self.shards.listenings, frontiers_ms, left_ms, strict=True):
            if left is not None:
                self._set_due(listening.due_at(frontier_ms + left, deployment.allowed_lateness_ms))

    def _set_due_for_pending(self, deployment: Deployment) -> None:
        for listening, waiting in zip(self.shards.listenings, self.waiting, strict=True):
            if (first_ms := waiting.first_ms()) is not None:
                self._set_due(listening.due_at(first_ms, deployment.allowed_lateness_ms))

    def _set_due(self, received_at_ms: int | None) -> None:
        if received_at_ms is not None and (self.due_ms is None or received_at_ms < self.due_ms):
            self.due_ms = received_at_ms

    def summary(self, key_group: int) -> Judgement | None:
        """Return a summary of the devices by mode; None if equal to the last summary."""
        counts = json.dumps(self.devices.by_mode(), sort_keys=True)
        if counts == self.counts:
            return None
        self.counts = counts
        at_ms = self.shards.frontier_ms
        return Judgement(JudgementKind.SUMMARY, "_", event_time_ms=at_ms, key_group=key_group, counts=counts)

    def to_bytes(self, form: int = STORED_FORM) -> bytes:
        """Return the stored form, without the chunks.

        Args:
            form: format version, see `columnar.codec.versions`.
        """
        known: dict[str, Any] = {
            **context_to_plain(self.shards, self.policies),
            "waiting": pending_to_plain(self.waiting),
            "counts": self.counts,
            "due_ms": self.due_ms,
        }
        return to_stored(self.devices, known, form)

    @classmethod
    def from_bytes(cls, stored: bytes) -> "KeyGroup":
        """Read a stored form.

        Raises:
            FleetError: the format version is unknown.
        """
        devices, known = from_stored(stored)
        shards, policies = context_from_plain(known)
        waiting = pending_from_plain(known["waiting"], len(shards))
        return cls(shards, policies, devices, waiting, known["counts"], known["due_ms"])


def begin(received_at_ms: int) -> KeyGroup:
    """Return an empty key group for a history that starts at ``received_at_ms``."""
    return KeyGroup(Shards.begin(received_at_ms))


@dataclass(slots=True)
class _ReadRows:
    """Rows that can still act, by shard.

    Attributes:
        signals: signals of each shard, with their presence times.
        others: other rows of each shard; rows for everyone are in every shard.
        flushed_ms: instant of each shard up to which no verdict is delayed; None without a flush.
        early: mask of each shard's signals that are not due.
    """

    signals: list[pa.RecordBatch]
    others: list[list[Row]]
    flushed_ms: tuple[int | None, ...]
    early: list[NDArray[np.bool_]] = field(default_factory=list[NDArray[np.bool_]])


def _received_in_order(signals: pa.RecordBatch) -> pa.RecordBatch:
    received = signals["received_at_ms"].to_numpy()
    return taken(signals, np.argsort(received, kind="stable")) if (received[1:] < received[:-1]).any() else signals


def _or_long_ago(instant_ms: int | None) -> int:
    return _BEFORE_ALL if instant_ms is None else instant_ms


def _at(row: Row) -> int:
    assert row.event_time_ms is not None, "a pending row has an event time"
    return row.event_time_ms


def _concat(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    some = [batch for batch in batches if batch.num_rows]
    if not some:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return some[0] if len(some) == 1 else pa.concat_batches(some)
