"""Facts of pages that are not in memory: coverage gaps, sites that are held back, problems of the stream.

Rule: a value of the facts in memory is computed once for each of their versions, and a fact of tables is read at most
each `SLOW_S`. All requests share them.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.core.monitoring.health import Rating
from fleetpulse.core.presence.shards import Shards
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.reports import frontiers
from fleetpulse.reports import judgements as reports
from fleetpulse.reports.operations import stream
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.recent import VersionedValues

SLOW_S: Final = 3.0
_MOST: Final = 200  # values that are kept


@dataclass(frozen=True, slots=True)
class Gap:
    """Span in which a bridge of some sites was not listening.

    Attributes:
        sites: sites; empty for all sites that no gap row names.
        since_ms: start, epoch milliseconds.
        until_ms: end, epoch milliseconds; None if it lasts.
        bridges: bridges that are not listening; empty if the gap is closed.
    """

    sites: tuple[str, ...]
    since_ms: int
    until_ms: int | None
    bridges: tuple[str, ...] = ()


class PageFacts:
    """Facts of pages, by version.

    Args:
        live: facts in memory.
    """

    def __init__(self, live: LiveFleet) -> None:
        self._live = live
        self._values = VersionedValues(_MOST)

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return a value for the version in memory, see `VersionedValues`."""
        return self._values.get(self._live.reached_tag(), key, compute)

    def shards(self) -> Shards | None:
        """Return coverage and frontier of every site; None before the first row."""
        home = self._live.home
        return self._live.recent.get("shards", SLOW_S, lambda: frontiers.shards(home, judged_ms(home.checkpoint)))

    def gaps(self, since_ms: int, until_ms: int) -> list[Gap]:
        """Return the coverage gaps that touch a span, in order."""
        known = self.shards()
        if known is None:
            return []
        found = list[Gap]()
        for sites, one in zip(((), *known.sites), known.listenings, strict=True):
            for opened_ms, closed_ms in one.coverage.gaps:
                if opened_ms < until_ms and (closed_ms is None or closed_ms > since_ms):
                    deaf = tuple(one.coverage.deaf) if closed_ms is None else ()
                    found.append(Gap(tuple(sorted(sites)), opened_ms, closed_ms, deaf))
        return sorted(found, key=lambda gap: (gap.since_ms, gap.sites))

    def gaps_of_site(self, site: str | None) -> Sequence[tuple[int, int | None]]:
        """Return the coverage gaps of a site."""
        known = self.shards()
        return () if known is None else known.of(site).coverage.gaps

    def held_back(self) -> list[dict[str, Any]]:
        """Return the sites whose verdicts wait for a bridge, see `reports.frontiers.sites_behind`."""
        known = self.shards()
        return [] if known is None else frontiers.sites_behind(known)

    def problems(self) -> list[str]:
        """Return the problems of the running jobs, and the metrics of the lifecycle job that are not good."""
        of_jobs = stream.troubles(stream.statuses(self._live.home))
        found = [f"{job}: {problem}" for job, problems in of_jobs.items() for problem in problems]
        return [*found, *self._live.recent.get("problems", SLOW_S, self._of_health)]

    def _of_health(self) -> list[str]:
        found = reports.health(self._live.home, batches=1)
        if found is None:
            return []
        return [
            f"lifecycle: {one['metric']} is {one['rating']} ({one['column']} {one['value']:,})"
            for one in found["rated"]
            if one["rating"] in (Rating.WARNING, Rating.CRITICAL)
        ]
