"""A key group: the devices that share a place in the state, what waits for its time, and what is known of us.

Rule 1: ``fold`` takes rows in the order of ``received_at`` between calls, in any order within one.
Rule 2: what comes out depends on the rows and on how far ``received_at`` has come; never on how calls were cut. A jitter
spreads when verdicts are written, and nothing else.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.blocks import SIGNAL_SCHEMA, batch_to_rows, rows_to_batch
from fleetpulse.columnar.choosing import taken
from fleetpulse.columnar.devices import Devices
from fleetpulse.columnar.due import frontiers, sift
from fleetpulse.columnar.forms import STORED_FORM
from fleetpulse.columnar.judging import Judging
from fleetpulse.columnar.kernel import spread
from fleetpulse.columnar.standing import world_from_plain, world_to_plain
from fleetpulse.columnar.stored import from_stored, to_stored
from fleetpulse.columnar.told import TOLD_SCHEMA, from_judgements
from fleetpulse.columnar.waiting import Waiting, span_ms
from fleetpulse.columnar.world import NONE, Vocabulary, world_arrays
from fleetpulse.core.coverage import Listening
from fleetpulse.core.judgements import Judgement, Verdict
from fleetpulse.core.messages import FLUSH, Kind, Row
from fleetpulse.core.policy import Policies
from fleetpulse.core.replay import Deployment, Intake, arrival

_BEFORE_ALL: Final = -(2**61)  # stands for a frontier before the first is known


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one call.

    Attributes:
        told: judgements, columns of `TOLD_SCHEMA`.
        chunks: waiting rows to be kept, by number.
        gone: numbers of chunks that are no longer needed.
    """

    told: pa.RecordBatch
    chunks: list[tuple[int, bytes]]
    gone: list[int]


@dataclass(slots=True)
class KeyGroup:
    """The state of one key group.

    Attributes:
        listening: coverage and frontier.
        policies: those known.
        devices: as columns.
        waiting: rows whose time has not come: where they are.
        counts: devices by mode, as last said in a summary; empty before the first.
        due_ms: the ``received_at`` at which something will be due; None where nothing will.
    """

    listening: Listening
    policies: Policies = field(default_factory=Policies)
    devices: Devices = field(default_factory=Devices)
    waiting: Waiting = field(default_factory=Waiting)
    counts: str = ""
    due_ms: int | None = None

    def fold(
        self,
        signals: pa.RecordBatch,
        others: Sequence[Row],
        newest_ms: int,
        deployment: Deployment,
        read: Callable[[int], bytes],
    ) -> Step:
        """Take in rows, then judge all that lies at or before the frontier.

        Args:
            signals: the group's signals and wills of one micro-batch, columns of `SIGNAL_SCHEMA`.
            others: its other rows; what a gateway's death says to everyone among them.
            newest_ms: up to where every row has been read, by ``received_at``.
            deployment: lateness, clock lead and jitter.
            read: returns a chunk of waiting rows by its number.
        """
        before_ms = self.listening.frontier_ms
        told: list[pa.RecordBatch] = []
        signals, others, flushed = self._take_in(signals, others, newest_ms, deployment, told)
        frontier_ms = self.listening.frontier_ms
        gone: list[int] = []
        early = np.ones(signals.num_rows, bool)
        if frontier_ms is not None:
            due_signals, due_others, gone = self.waiting.take(before_ms, frontier_ms, read)
            early = signals["presence_ms"].to_numpy() > frontier_ms
            commands = [row for batch in due_others for row in batch_to_rows(batch)]
            commands += [row for row in others if _at(row) <= frontier_ms]
            others = [row for row in others if _at(row) > frontier_ms]
            waited = sum(batch.num_rows for batch in due_signals)
            due = np.concatenate([np.ones(waited, bool), ~early])
            known = _concat([*due_signals, signals], SIGNAL_SCHEMA)
            told += self._judge(known, due, commands, frontier_ms, deployment, flushed)
        else:
            self.arm(deployment)
        advance_ms = 0 if frontier_ms is None or before_ms is None else frontier_ms - before_ms
        width_ms = span_ms(advance_ms, deployment.allowed_lateness_ms)
        written = self.waiting.written
        chunks = [*self.waiting.write(signals, width_ms, early), *self.waiting.write(rows_to_batch(others), width_ms)]
        joined, parts = self.waiting.join(frontier_ms, written, read, moving=advance_ms > 0)
        chunks, gone = [*chunks, *joined], [*gone, *parts]
        first_ms = self.waiting.first_ms()
        if first_ms is not None:
            self._be_due(self.listening.due_at(first_ms, deployment.allowed_lateness_ms))
        return Step(_concat(told, TOLD_SCHEMA), chunks, gone)

    def _take_in(
        self,
        signals: pa.RecordBatch,
        others: Sequence[Row],
        newest_ms: int,
        deployment: Deployment,
        told: list[pa.RecordBatch],
    ) -> tuple[pa.RecordBatch, list[Row], int | None]:
        """Move coverage, frontier and policies; return what may still act, and up to where no verdict is held back."""
        intake = Intake(deployment, self.listening, self.policies, [])
        received = signals["received_at_ms"].to_numpy()
        if (received[1:] < received[:-1]).any():
            order = np.argsort(received, kind="stable")
            signals, received = taken(signals, order), received[order]
        kept: list[pa.RecordBatch] = []
        begin, base = 0, self.listening  # coverage is the same from a gap row to the next

        def part(end: int) -> None:
            if end > begin:
                world = world_arrays(base.coverage, Policies(), (), Vocabulary(), Vocabulary())
                start_ms = NONE if base.frontier_ms is None else base.frontier_ms
                reached = frontiers(world, received[begin:end], deployment.allowed_lateness_ms, base.newest_ms, start_ms)
                sifted = sift(signals.slice(begin, end - begin), reached, deployment)
                kept.append(sifted.kept)
                told.extend(sifted.told)

        waiting: list[Row] = []
        flushed: int | None = None
        for row in sorted(others, key=arrival):
            if row.kind is Kind.GAP:
                end = int(np.searchsorted(received, row.received_at_ms))
                part(end)
                if end > begin and intake.listening is not None:
                    intake.listening = intake.listening.read(int(received[end - 1]), deployment.allowed_lateness_ms)
                begin = end
            if intake.read(row):
                waiting.append(row)
            if row.kind is Kind.TICK and row.contents().get("op") == FLUSH and intake.listening is not None:
                flushed = intake.listening.frontier_ms  # as it is at that row, however the batch was cut
            if row.kind is Kind.GAP and intake.listening is not None:
                base = intake.listening
        part(signals.num_rows)
        assert intake.listening is not None, "a key group begins with a row"
        newest_ms = max(newest_ms, int(received[-1]) if len(received) else newest_ms)
        self.listening = intake.listening.read(newest_ms, deployment.allowed_lateness_ms)
        self.policies = intake.policies
        if intake.judgements:
            told.append(from_judgements(intake.judgements))
        return _concat(kept, SIGNAL_SCHEMA), waiting, flushed

    def _judge(
        self,
        signals: pa.RecordBatch,
        due: NDArray[np.bool_],
        commands: Sequence[Row],
        frontier_ms: int,
        deployment: Deployment,
        flushed_ms: int | None,
    ) -> list[pa.RecordBatch]:
        judging = Judging(self.devices, self.listening.coverage, self.policies)
        judging.rows(signals, due, commands)
        width_ms, at_least_ms = deployment.verdict_jitter_ms, _BEFORE_ALL if flushed_ms is None else flushed_ms
        through_ms = np.maximum(frontier_ms - self._delays(width_ms), at_least_ms)
        left_ms = judging.pass_time(through_ms, frontier_ms)
        self.devices.drop_absent()
        behind_ms = max(frontier_ms - width_ms, at_least_ms)
        self.listening = replace(self.listening, coverage=self.listening.coverage.forget_before(behind_ms))
        # not where a flush has come to: how many there are after what a jitter may hold back is counted, however rows were cut
        self.policies = self.policies.pruned(deployment.said_through_ms(frontier_ms))
        self.due_ms = None
        if left_ms is not None:
            self._be_due(self.listening.due_at(frontier_ms + left_ms, deployment.allowed_lateness_ms))
        return judging.told

    def _delays(self, width_ms: int) -> Any:
        """Return by how much the verdicts on each device's silence are held back."""
        if not width_ms or not len(self.devices):
            return np.zeros(len(self.devices), np.int64)
        ids = self.devices.ids if not self.devices.ids.offset else pa.concat_arrays([self.devices.ids])
        _, offsets, text = ids.buffers()
        ends = np.frombuffer(offsets, np.int32)[: len(ids) + 1]
        return spread(ends, np.frombuffer(text, np.uint8), width_ms)

    def arm(self, deployment: Deployment) -> None:
        """Set when something will be due, without judging anything; for devices that were brought in."""
        frontier_ms = self.listening.frontier_ms
        self.due_ms = None
        if frontier_ms is None:
            frontier_ms = _BEFORE_ALL
        through_ms = np.full(len(self.devices), frontier_ms) - self._delays(deployment.verdict_jitter_ms)
        judging = Judging(self.devices, self.listening.coverage, self.policies)
        left_ms = judging.pass_time(through_ms, _BEFORE_ALL)
        assert not judging.told, "what is brought in is judged up to its frontier"
        if left_ms is not None:
            self._be_due(self.listening.due_at(frontier_ms + left_ms, deployment.allowed_lateness_ms))
        first_ms = self.waiting.first_ms()
        if first_ms is not None:
            self._be_due(self.listening.due_at(first_ms, deployment.allowed_lateness_ms))

    def _be_due(self, received_at_ms: int | None) -> None:
        if received_at_ms is not None and (self.due_ms is None or received_at_ms < self.due_ms):
            self.due_ms = received_at_ms

    def summary(self, key_group: int) -> Judgement | None:
        """Say how many devices are in which mode, where that has changed since it was last said."""
        counts = json.dumps(self.devices.by_mode(), sort_keys=True)
        if counts == self.counts:
            return None
        self.counts = counts
        at_ms = self.listening.frontier_ms
        return Judgement(Verdict.SUMMARY, "_", event_time_ms=at_ms, key_group=key_group, counts=counts)

    def to_bytes(self, form: int = STORED_FORM) -> bytes:
        """Return the stored form, but for the chunks.

        Args:
            form: its version, see `columnar.stored`.
        """
        known: dict[str, Any] = {
            **world_to_plain(self.listening, self.policies),
            "waiting": self.waiting.to_plain(),
            "counts": self.counts,
            "due_ms": self.due_ms,
        }
        return to_stored(self.devices, known, form)

    @classmethod
    def from_bytes(cls, stored: bytes) -> "KeyGroup":
        """Read the stored form.

        Raises:
            FleetError: it was written by a version that this one does not know.
        """
        devices, known = from_stored(stored)
        listening, policies = world_from_plain(known)
        return cls(listening, policies, devices, Waiting.from_plain(known["waiting"]), known["counts"], known["due_ms"])


def begin(received_at_ms: int) -> KeyGroup:
    """Return an empty key group of a history whose first row was received at ``received_at_ms``."""
    return KeyGroup(Listening.begin(received_at_ms))


def _at(row: Row) -> int:
    assert row.event_time_ms is not None, "a row without event time does not wait"
    return row.event_time_ms


def _concat(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    some = [batch for batch in batches if batch.num_rows]
    if not some:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return some[0] if len(some) == 1 else pa.concat_batches(some)
