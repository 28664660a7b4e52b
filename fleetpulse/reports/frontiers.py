"""Frontiers up to which the lifecycle job has judged, of all sites and of each.

The frontier follows from coverage and the rows that the job has read; `core.presence.shards` defines it.
"""

from collections.abc import Callable
from typing import Any

from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import outcome
from fleetpulse.core.rows import Row
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query
from fleetpulse.reports.messages import ROW, as_row, span, through


def frontier_ms(home: Home, judged_ms: int | None) -> int | None:
    """Return the frontier up to which the job has judged, in epoch milliseconds.

    Args:
        home: home to read.
        judged_ms: ``received_at`` up to which the job has judged; None if its checkpoint does not
            have it yet.
    """
    if judged_ms is None:
        return _first_frontier_ms(home)
    known = shards(home, judged_ms)
    return known.frontier_ms if known else None


def judged_frontier_ms(home: Home) -> int | None:
    """Return the frontier up to which the job has judged, epoch milliseconds; None before the first."""
    return frontier_ms(home, judged_ms(home.checkpoint))


def sites_behind(known: Shards) -> list[dict[str, Any]]:
    """Return the sites whose frontier is behind others: a bridge is not listening.

    Returns:
        Rows with ``sites`` (None: all sites that no gap row names), ``bridges`` (those that do not
        listen), and ``frontier_ms``.
    """
    both = zip((None, *known.sites), known.listenings, strict=True)
    return [
        {"sites": None if sites is None else sorted(sites), "bridges": list(one.coverage.deaf), "frontier_ms": one.frontier_ms}
        for sites, one in both
        if one.coverage.deaf and one.frontier_ms != known.frontier_ms
    ]


def frontier_of_sites(home: Home, judged_ms: int | None) -> Callable[[str], int | None]:
    """Return a function that gives the frontier of a site, see `frontier_ms`."""
    known = shards(home, judged_ms) if judged_ms is not None else None
    first_ms = _first_frontier_ms(home) if judged_ms is None else None
    return lambda site: known.of(site).frontier_ms if known is not None else first_ms


def _first_frontier_ms(home: Home) -> int | None:
    """Return the frontier of the first batch, from its summaries.

    The checkpoint has no frontier before the second batch. In the first batch each key group with
    rows emits a summary at its own frontier. The least of these is returned, since all groups have
    reached it.
    """
    found = query(
        home,
        """SELECT epoch_ms(min(reached)) AS least, count(reached) = count(*) AS all_have_one FROM
           (SELECT key_group, max(event_time) AS reached FROM judgements WHERE kind = 'summary' GROUP BY key_group)""",
    )
    return found[0]["least"] if found[0]["all_have_one"] else None


def shards(home: Home, through_ms: int | None) -> Shards | None:
    """Return coverage and frontier of every site, by rows received up to an instant.

    None reads all landed rows. Only files of bronze with gap rows are opened, since this is called
    each second.
    """
    listened = span(home)
    if listened is None:
        return None
    gap_rows = query(home, "SELECT DISTINCT received_at FROM coverage", tables=["coverage"])
    gaps: list[Row] = []
    if gap_rows:
        only = {"messages": ("received_at", [row["received_at"] for row in gap_rows])}
        found = query(home, f"SELECT {ROW} FROM messages WHERE kind = 'gap'", tables=["messages"], only=only)
        gaps = [as_row(row) for row in found]
    return outcome(through(gaps, listened, through_ms), home.deployment()).shards
