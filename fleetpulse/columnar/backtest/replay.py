"""Backtest of a key group: replay its history under two sets of policies.

The first side has the policies that were recorded. On the second side a candidate policy replaces
them.

Rule 1: rows arrive in blocks, ordered by ``received_at`` from block to block. Verdicts up to the
frontier are final on both sides; equal ones are counted and dropped. Memory is bounded by the
pending rows, the differences, and the distinct strings (codes, sites, gateways) of the history.
Rule 2: only policy rows that take effect within the range are replaced; recorded policies act
before it.
Rule 3: the verdict jitter is 0: it only delays the writing of verdicts, and both sides are compared
at the frontier.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from fleetpulse.columnar.backtest.diff import DIFFERENCE_SCHEMA, differences, in_order, without_common_transitions
from fleetpulse.columnar.codec.arrow import NO_SIGNALS, from_bytes, to_bytes
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import drop_broadcast_copies, judgements_to_batch
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.operations.backtests import AFTER, BEFORE
from fleetpulse.core.policy import Dated, Policies, from_normalised
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.times import DAY_MS

_NOTHING: Final = judgements_to_batch([])


@dataclass(frozen=True, slots=True)
class BacktestRequest:
    """Parameters of a backtest. Instants are epoch milliseconds.

    Attributes:
        deployment: lateness and clock lead.
        policy: candidate policy, normalised.
        from_ms: instant from which the candidate acts and verdicts are compared; None: from the
            start.
        to_ms: instant up to which verdicts are compared; None: up to the frontier.
        started_ms: ``received_at`` of the history's first row.
        newest_ms: ``received_at`` of the history's last row.
    """

    deployment: Deployment
    policy: Mapping[str, Any]
    from_ms: int | None
    to_ms: int | None
    started_ms: int
    newest_ms: int

    def policies(self) -> Policies:
        """Return the candidate policy as initial policies: known from the first row on."""
        policy = from_normalised(self.policy)
        return Policies().including(Dated(self.from_ms or 0, self.started_ms, policy.version, policy))

    def replaces(self, row: Row) -> bool:
        """Whether a row is a recorded policy that the candidate policy replaces."""
        return row.kind is Kind.POLICY and row.event_time_ms is not None and row.event_time_ms >= (self.from_ms or 0)


@dataclass(slots=True)
class BacktestResult:
    """Result of a backtest of one key group, or of several (see `merge_results`).

    Attributes:
        changed: differences, columns of `DIFFERENCE_SCHEMA`.
        days: number of verdicts by side, day (since the epoch, UTC) and mode.
        others: number of judgements other than transitions, by side and kind.
        frontier_ms: event time up to which both sides judged; None if nothing was judged.
    """

    changed: pa.RecordBatch = field(default_factory=lambda: pa.RecordBatch.from_pylist([], schema=DIFFERENCE_SCHEMA))
    days: Counter[tuple[str, int, str]] = field(default_factory=Counter[tuple[str, int, str]])
    others: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    frontier_ms: int | None = None

    def to_bytes(self) -> bytes:
        """Serialize the result as an Arrow IPC stream."""
        known = {"days": _plain(self.days), "others": _plain(self.others), "frontier_ms": self.frontier_ms}
        return to_bytes(self.changed.replace_schema_metadata({"fleetpulse": json.dumps(known)}))

    @classmethod
    def from_bytes(cls, written: bytes) -> "BacktestResult":
        """Read a result that `to_bytes` wrote."""
        changed = from_bytes(written)
        known = json.loads((changed.schema.metadata or {})[b"fleetpulse"])
        days: Counter[tuple[str, int, str]] = Counter({(side, day, mode): count for side, day, mode, count in known["days"]})
        others: Counter[tuple[str, str]] = Counter({(side, kind): count for side, kind, count in known["others"]})
        return cls(changed.replace_schema_metadata(), days, others, known["frontier_ms"])


def _plain(counts: Mapping[Any, int]) -> list[list[Any]]:
    return [[*key, count] for key, count in counts.items()]


def merge_results(found: Iterable[BacktestResult]) -> BacktestResult:
    """Return the sum of the results of several key groups."""
    parts = list(found)
    total = BacktestResult()
    for part in parts:
        total.days += part.days
        total.others += part.others
    total.changed = in_order(pa.concat_batches([total.changed, *(part.changed for part in parts)]))
    total.frontier_ms = max((part.frontier_ms for part in parts if part.frontier_ms is not None), default=None)
    return total


class _Side:
    """One of the two replays: a key group, and the chunks of its pending rows."""

    def __init__(self, group: KeyGroup) -> None:
        self.group = group
        self.chunks: dict[int, bytes] = {}

    def fold(self, signals: pa.RecordBatch, others: Sequence[Row], newest_ms: int, deployment: Deployment) -> pa.RecordBatch:
        step = self.group.fold(signals, others, newest_ms, deployment, self.chunks.__getitem__)
        for number in step.deleted_chunks:
            del self.chunks[number]
        self.chunks.update(step.chunks)
        return step.judgements


class DualReplay:
    """Replay of one key group under both sets of policies.

    Args:
        request: parameters of the backtest.
        key_group: number of the key group; broadcast judgements are counted only in group 0.
    """

    def __init__(self, request: BacktestRequest, key_group: int) -> None:
        self.request = request
        self._deployment = replace(request.deployment, verdict_jitter_ms=0)
        self._key_group = key_group
        self._sides = {
            BEFORE: _Side(KeyGroup(Shards.begin(request.started_ms))),
            AFTER: _Side(KeyGroup(Shards.begin(request.started_ms), request.policies())),
        }
        self._found = BacktestResult()
        self._left: dict[str, list[pa.RecordBatch]] = {side: [_NOTHING] for side in self._sides}

    def fold(self, signals: pa.RecordBatch, others: Sequence[Row], newest_ms: int) -> None:
        """Process a block of rows on both sides.

        Args:
            signals: columns of `SIGNAL_SCHEMA`.
            others: the other rows.
            newest_ms: ``received_at`` up to which every row has been read.
        """
        if self._is_over():
            return
        side_rows = {BEFORE: others, AFTER: [row for row in others if not self.request.replaces(row)]}
        changes: dict[str, pa.RecordBatch] = {}
        for name, side in self._sides.items():
            judgements = side.fold(signals, side_rows[name], newest_ms, self._deployment)
            changes[name] = self._within(
                judgements.filter(pc.equal(judgements["kind"], JudgementKind.TRANSITION.value)), "event_time_ms"
            )
            self._count(name, changes[name], judgements)
        for name, batch in zip(changes, without_common_transitions(changes[BEFORE], changes[AFTER]), strict=True):
            self._left[name].append(batch)

    def finish(self) -> BacktestResult:
        """Advance both sides to the history's last row, and return the result."""
        self.fold(NO_SIGNALS, [], self.request.newest_ms)
        self._found.changed = differences(*(pa.concat_batches(self._left[side]) for side in (BEFORE, AFTER)))
        self._found.frontier_ms = self._frontier_ms()
        return self._found

    def _frontier_ms(self) -> int | None:
        return self._sides[BEFORE].group.shards.frontier_ms

    def _is_over(self) -> bool:
        to_ms, frontier_ms = self.request.to_ms, self._sides[BEFORE].group.shards.least_frontier_ms
        return to_ms is not None and frontier_ms is not None and frontier_ms >= to_ms

    def _within(self, judgements: pa.RecordBatch, instant: str) -> pa.RecordBatch:
        for bound, compare in ((self.request.from_ms, pc.greater_equal), (self.request.to_ms, pc.less_equal)):
            if bound is not None and judgements.num_rows:
                judgements = judgements.filter(compare(judgements[instant], bound))
        return judgements

    def _count(self, side: str, changes: pa.RecordBatch, judgements: pa.RecordBatch) -> None:
        if changes.num_rows:
            days = pc.divide(changes["event_time_ms"], DAY_MS)
            counted = (
                pa.table([days, changes["to_mode"]], ["day", "mode"]).group_by(["day", "mode"]).aggregate([([], "count_all")])
            )
            for one in counted.to_pylist():
                self._found.days[side, one["day"], one["mode"]] += one["count_all"]
        judgements = self._within(
            judgements.filter(pc.not_equal(judgements["kind"], JudgementKind.TRANSITION.value)), "received_at_ms"
        )
        judgements = drop_broadcast_copies(self._key_group, judgements)
        for kind in pc.value_counts(judgements["kind"]).to_pylist() if judgements.num_rows else ():
            self._found.others[side, kind["values"]] += kind["counts"]
