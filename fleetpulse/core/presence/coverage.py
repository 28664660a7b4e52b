"""Covered time: the time in which we were listening, and the frontier that follows from it.

Rule 1: ``c(t)`` is ``t`` minus the gaps before it; before the first row nothing is covered. A gap is there while any
bridge does not listen that serves the site: it is the union of their gaps.
Rule 2: the frontier never runs backwards, and a gap never reaches behind it: what is judged stays judged.
Rule 3: a row that opens a gap is the first after a silence of ours: it is taken in before its own ``received_at``
moves the frontier, or it would judge the very span that it excuses. The bridge gives it an instant of its own.
Rule 4: each site has its own coverage and frontier, see `core.shards`.
"""

from dataclasses import dataclass, replace
from typing import Final

MAX_DEAF: Final = 1_000  # bridges that do not listen at the same time: each key group keeps their names
MAX_OURS: Final = 500  # bridges of an installation: they have room beside those of a recording
MAX_RECORDED: Final = MAX_DEAF - MAX_OURS  # bridges that do not listen, or have a gap row at one instant, as a recording says
Gap = tuple[int, int | None]  # from when, until when (None: still open), in epoch milliseconds


@dataclass(frozen=True, slots=True)
class Coverage:
    """When we listened.

    Attributes:
        start_ms: the instant before which nothing is covered (or has been forgotten).
        base_ms: covered time at ``start_ms``.
        gaps: spans in which we did not listen, in order and disjoint; only the last may be open.
        deaf: the bridges that do not listen, `MAX_DEAF` at most: while there are any the last gap is open.
        until_ms: of the bridges that listen again in an open gap, the latest instant from which one does.
    """

    start_ms: int
    base_ms: int = 0
    gaps: tuple[Gap, ...] = ()
    deaf: tuple[str, ...] = ()
    until_ms: int | None = None

    def covered(self, instant_ms: int) -> int:
        """Return c(t) in milliseconds: how long we had been listening at ``instant_ms``."""
        if instant_ms <= self.start_ms:
            return self.base_ms
        missed = 0
        for opened, closed in self.gaps:
            if opened >= instant_ms:
                break
            missed += (instant_ms if closed is None else min(closed, instant_ms)) - opened
        return self.base_ms + instant_ms - self.start_ms - missed

    def earliest(self, covered_ms: int) -> int | None:
        """Return the earliest t with ``c(t) >= covered_ms``; None while an open gap keeps it from coming."""
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
        """Return the greatest t with ``c(t) <= covered_ms``, which a still open gap does not reach.

        None where there is none: less had been covered when we began.
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
        """Stand still from ``since_ms`` on, until ``bridge`` listens again; no effect where it said so before."""
        if bridge in self.deaf:
            return self
        since = max(since_ms, self.start_ms)
        joined = [gap for gap in self.gaps if gap[1] is None or gap[1] >= since]
        begin = min([since, *(opened for opened, _ in joined)])
        kept = self.gaps[: len(self.gaps) - len(joined)]
        until = self.until_ms if self.deaf else max((closed for _, closed in joined if closed is not None), default=None)
        return replace(self, gaps=(*kept, (begin, None)), deaf=(*self.deaf, bridge), until_ms=until)

    def has_room_for(self, bridge: str) -> bool:
        """Whether ``bridge`` may say that it does not listen: it said so already, or not too many others do."""
        return bridge in self.deaf or len(self.deaf) < MAX_DEAF

    def close_gap(self, until_ms: int, bridge: str) -> "Coverage":
        """Let ``bridge`` listen again from ``until_ms`` on; no effect where it said nothing else."""
        if bridge not in self.deaf:
            return self
        deaf = tuple(other for other in self.deaf if other != bridge)
        until = until_ms if self.until_ms is None else max(until_ms, self.until_ms)
        if deaf:
            return replace(self, deaf=deaf, until_ms=until)
        opened = self.gaps[-1][0]
        return replace(self, gaps=(*self.gaps[:-1], (opened, max(opened, until))), deaf=(), until_ms=None)

    def forget_before(self, instant_ms: int) -> "Coverage":
        """Drop what lies before ``instant_ms``: the same c(t) from there on, in bounded space."""
        if instant_ms <= self.start_ms:
            return self
        kept = tuple((max(opened, instant_ms), closed) for opened, closed in self.gaps if closed is None or closed > instant_ms)
        return replace(self, start_ms=instant_ms, base_ms=self.covered(instant_ms), gaps=kept)


@dataclass(frozen=True, slots=True)
class Listening:
    """Coverage, and how far it lets us judge.

    Attributes:
        coverage: when we listened, as known from the gap rows read.
        newest_ms: the newest ``received_at`` read.
        frontier_ms: messages and deadlines at or before it are judged; None before the first is.
    """

    coverage: Coverage
    newest_ms: int
    frontier_ms: int | None = None

    @classmethod
    def begin(cls, received_at_ms: int) -> "Listening":
        """Begin with the first row ever received."""
        return cls(Coverage(received_at_ms), received_at_ms)

    @classmethod
    def judged_through(cls, frontier_ms: int, started_ms: int, allowed_lateness_ms: int) -> "Listening":
        """Go on where all up to a frontier is judged, or left out, and nothing was missed since ``started_ms``."""
        coverage = Coverage(started_ms)
        newest_ms = started_ms if frontier_ms < started_ms else frontier_ms + allowed_lateness_ms
        return cls(coverage, newest_ms, frontier_ms)

    def read(self, received_at_ms: int, allowed_lateness_ms: int) -> "Listening":
        """Move to a row received at ``received_at_ms``."""
        newest = max(self.newest_ms, received_at_ms)
        reach = self.coverage.greatest(self.coverage.covered(newest) - allowed_lateness_ms)
        if newest == self.newest_ms and (reach is None or reach == self.frontier_ms):
            return self
        if reach is None or (self.frontier_ms is not None and reach < self.frontier_ms):
            reach = self.frontier_ms
        return Listening(self.coverage, newest, reach)

    def open_gap(self, row_ms: int, since_ms: int, bridge: str) -> "Listening":
        """Take in a gap row received at ``row_ms`` that says ``bridge`` stopped listening at ``since_ms``."""
        since = min(since_ms, row_ms)
        if self.frontier_ms is not None:
            since = max(since, self.frontier_ms)
        return replace(self, coverage=self.coverage.open_gap(since, bridge))

    def close_gap(self, row_ms: int, until_ms: int, bridge: str) -> "Listening":
        """Take in a gap row received at ``row_ms`` that says ``bridge`` listens again from ``until_ms`` on."""
        return replace(self, coverage=self.coverage.close_gap(max(until_ms, row_ms), bridge))

    def due_at(self, instant_ms: int, allowed_lateness_ms: int) -> int | None:
        """Return the earliest ``received_at`` that moves the frontier to ``instant_ms``; None while a gap is open."""
        return self.coverage.earliest(self.coverage.covered(instant_ms) + allowed_lateness_ms)
