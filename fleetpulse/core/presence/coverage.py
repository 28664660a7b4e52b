"""Covered time and frontier of one shard, from the coverage gaps of its bridges.

Rule 1: covered time ``c(t)`` is ``t`` minus the coverage gaps before it; nothing is covered before
the first row. A gap lasts while any bridge that serves the site is not listening: it is the union
of the gaps of the bridges.
Rule 2: the frontier never moves back, and a gap never starts before it, so time that was
judged is not judged again.
Rule 3: a row that opens a gap is the first row after an outage. It is applied before its
``received_at`` moves the frontier; otherwise, moving the frontier would judge the span that the row
excludes (ADR 3). The bridge gives it a ``received_at`` that no other row has.
Rule 4: each site has its own coverage and frontier, see `core.presence.shards`.
"""

from dataclasses import dataclass, replace
from typing import Final

MAX_DEAF: Final = 1_000  # bridges that are not listening at one time; each key group keeps their names
MAX_OWN_BRIDGES: Final = 500  # bridges of the installation; the rest is for bridges of recordings
MAX_RECORDED: Final = (
    MAX_DEAF - MAX_OWN_BRIDGES
)  # bridges of a recording that are not listening, or have a gap row, at one instant
Gap = tuple[int, int | None]  # start and end (None: still open), epoch milliseconds


@dataclass(frozen=True, slots=True)
class Coverage:
    """Covered time as a function of the coverage gaps.

    Attributes:
        start_ms: instant before which nothing is covered, or coverage was dropped; epoch
            milliseconds.
        base_ms: covered time at ``start_ms``, milliseconds.
        gaps: coverage gaps, in order and disjoint; only the last may be open.
        deaf: bridges that are not listening, at most `MAX_DEAF`; the last gap is open while there
            is any.
        until_ms: latest end of the outages of bridges that listen again during the open gap.
    """

    start_ms: int
    base_ms: int = 0
    gaps: tuple[Gap, ...] = ()
    deaf: tuple[str, ...] = ()
    until_ms: int | None = None

    def covered(self, instant_ms: int) -> int:
        """Return the covered time c(t) at an instant, milliseconds."""
        if instant_ms <= self.start_ms:
            return self.base_ms
        missed = 0
        for opened, closed in self.gaps:
            if opened >= instant_ms:
                break
            missed += (instant_ms if closed is None else min(closed, instant_ms)) - opened
        return self.base_ms + instant_ms - self.start_ms - missed

    def earliest(self, covered_ms: int) -> int | None:
        """Return the earliest t with ``c(t) >= covered_ms``; None if an open gap prevents it."""
        at_ms, reached = self.start_ms, self.base_ms
        for opened, closed in self.gaps:
            span = opened - at_ms
            if covered_ms - reached <= span:
                break
            if closed is None:
                return None
            at_ms, reached = closed, reached + span
        return at_ms + max(0, covered_ms - reached)

    def greatest(self, covered_ms: int) -> int | None:
        """Return the greatest t with ``c(t) <= covered_ms``, before any open gap ends.

        Returns:
            Epoch milliseconds; None if ``covered_ms`` is less than the covered time at the start.
        """
        at_ms, reached = self.start_ms, self.base_ms
        if covered_ms < reached:
            return None
        for opened, closed in self.gaps:
            span = opened - at_ms
            if covered_ms - reached < span or closed is None:
                break
            at_ms, reached = closed, reached + span
        return at_ms + covered_ms - reached

    def open_gap(self, since_ms: int, bridge: str) -> "Coverage":
        """Open a gap at ``since_ms`` until ``bridge`` listens again; no-op if its gap is open already."""
        if bridge in self.deaf:
            return self
        since = max(since_ms, self.start_ms)
        joined = [gap for gap in self.gaps if gap[1] is None or gap[1] >= since]
        start = min([since, *(opened for opened, _ in joined)])
        separate = self.gaps[: len(self.gaps) - len(joined)]
        until = self.until_ms if self.deaf else max((closed for _, closed in joined if closed is not None), default=None)
        return replace(self, gaps=(*separate, (start, None)), deaf=(*self.deaf, bridge), until_ms=until)

    def has_room_for(self, bridge: str) -> bool:
        """Return whether a gap of ``bridge`` is open, or can be opened within `MAX_DEAF`."""
        return bridge in self.deaf or len(self.deaf) < MAX_DEAF

    def close_gap(self, until_ms: int, bridge: str) -> "Coverage":
        """End the outage of ``bridge`` at ``until_ms``; no-op if it has none."""
        if bridge not in self.deaf:
            return self
        deaf = tuple(other for other in self.deaf if other != bridge)
        until = until_ms if self.until_ms is None else max(until_ms, self.until_ms)
        if deaf:
            return replace(self, deaf=deaf, until_ms=until)
        opened = self.gaps[-1][0]
        return replace(self, gaps=(*self.gaps[:-1], (opened, max(opened, until))), deaf=(), until_ms=None)

    def forget_before(self, instant_ms: int) -> "Coverage":
        """Drop gaps before ``instant_ms`` to bound the size; later c(t) stay equal."""
        if instant_ms <= self.start_ms:
            return self
        remaining = tuple(
            (max(opened, instant_ms), closed) for opened, closed in self.gaps if closed is None or closed > instant_ms
        )
        return replace(self, start_ms=instant_ms, base_ms=self.covered(instant_ms), gaps=remaining)


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Coverage and frontier of one shard.

    Attributes:
        coverage: coverage by the gap rows read.
        newest_ms: newest ``received_at`` read, epoch milliseconds.
        frontier_ms: frontier: messages and deadlines at or before it are judged; None if there is
            none yet.
    """

    coverage: Coverage
    newest_ms: int
    frontier_ms: int | None = None

    @classmethod
    def begin(cls, received_at_ms: int) -> "ShardProgress":
        """Return the state at the first row ever received."""
        return cls(Coverage(received_at_ms), received_at_ms)

    @classmethod
    def judged_through(cls, frontier_ms: int, started_ms: int, allowed_lateness_ms: int) -> "ShardProgress":
        """Return a state with a given frontier and no coverage gap since ``started_ms``.

        Everything up to the frontier counts as judged.
        """
        coverage = Coverage(started_ms)
        newest_ms = started_ms if frontier_ms < started_ms else frontier_ms + allowed_lateness_ms
        return cls(coverage, newest_ms, frontier_ms)

    def read(self, received_at_ms: int, allowed_lateness_ms: int) -> "ShardProgress":
        """Return the state after a row received at ``received_at_ms``."""
        newest = max(self.newest_ms, received_at_ms)
        reach = self.coverage.greatest(self.coverage.covered(newest) - allowed_lateness_ms)
        if newest == self.newest_ms and (reach is None or reach == self.frontier_ms):
            return self
        if reach is None or (self.frontier_ms is not None and reach < self.frontier_ms):
            reach = self.frontier_ms
        return ShardProgress(self.coverage, newest, reach)

    def open_gap(self, row_ms: int, since_ms: int, bridge: str) -> "ShardProgress":
        """Apply a gap row that opens a gap of ``bridge``.

        Args:
            row_ms: ``received_at`` of the row, epoch milliseconds.
            since_ms: instant at which the bridge stopped listening, epoch milliseconds.
            bridge: name of the bridge.
        """
        since = min(since_ms, row_ms)
        if self.frontier_ms is not None:
            since = max(since, self.frontier_ms)
        return replace(self, coverage=self.coverage.open_gap(since, bridge))

    def close_gap(self, row_ms: int, until_ms: int, bridge: str) -> "ShardProgress":
        """Apply a gap row that closes the gap of ``bridge``.

        Args:
            row_ms: ``received_at`` of the row, epoch milliseconds.
            until_ms: instant from which the bridge listens again, epoch milliseconds.
            bridge: name of the bridge.
        """
        return replace(self, coverage=self.coverage.close_gap(max(until_ms, row_ms), bridge))

    def due_at(self, instant_ms: int, allowed_lateness_ms: int) -> int | None:
        """Return the earliest ``received_at`` that moves the frontier to ``instant_ms``.

        None if an open gap precedes it.
        """
        return self.coverage.earliest(self.coverage.covered(instant_ms) + allowed_lateness_ms)
