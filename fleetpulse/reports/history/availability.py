"""Availability of devices: share of covered time in each mode.

Rule 1: a coverage gap of a site counts neither as up nor as down for its devices.
Rule 2: a device counts from the first row of its life on, while it is neither decommissioned nor
forgotten. A device without judgements does not count. Time as unreachable (its gateway is dead) is
neither up nor down.
Rule 3: a report computes no verdict. The mode is that of the newest transition, after amendments.
Before the first emitted transition of a life, it is the mode from which this transition led.
(Bootstrapped devices have earlier transitions, which were never emitted.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.lifecycle import OUT_OF_SERVICE, Mode
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.tables import JUDGEMENTS, literals
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, reading

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

COUNTED: Final = tuple(mode for mode in Mode if mode not in OUT_OF_SERVICE)
HEARD: Final = (Mode.ONLINE, Mode.DEGRADED, Mode.FLAGGED)  # modes of a device that was heard within its timeout
_LISTENED: Final = "(SELECT unnest(?::INT[]) AS shard, unnest(?::BIGINT[]) AS opened_ms, unnest(?::BIGINT[]) AS closed_ms)"
_SHARDS: Final = "(SELECT unnest(?::VARCHAR[]) AS of_site, unnest(?::INT[]) AS number)"


@dataclass(frozen=True, slots=True)
class Span:
    """Span of event time, epoch milliseconds.

    Attributes:
        from_ms: first instant of the span.
        to_ms: first instant after the span.
    """

    from_ms: int
    to_ms: int


def covered_parts(coverage: Coverage, span: Span) -> list[Span]:
    """Return the covered parts of a span, in order."""
    parts: list[Span] = []
    at_ms = max(span.from_ms, coverage.start_ms)
    for opened, closed in coverage.gaps:
        if at_ms < min(opened, span.to_ms):
            parts.append(Span(at_ms, min(opened, span.to_ms)))
        at_ms = span.to_ms if closed is None else max(at_ms, closed)
    if at_ms < span.to_ms:
        parts.append(Span(at_ms, span.to_ms))
    return parts


@dataclass(frozen=True, slots=True)
class CoveredSpans:
    """Covered spans of the sites.

    Attributes:
        parts: covered spans of each shard, disjoint.
        shards: number of each named site's shard; other sites have shard 0.
    """

    parts: Sequence[Sequence[Span]]
    shards: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def within(cls, shards: Shards, span: Span, held_back_ms: int = 0) -> "CoveredSpans":
        """Return the covered parts of a span, up to the frontier of each shard.

        Args:
            shards: coverage and frontier of every site.
            span: the span.
            held_back_ms: distance of the end from the frontier: verdicts of that time can be
                delayed by a jitter.
        """
        parts = [
            covered_parts(one.coverage, Span(span.from_ms, min(span.to_ms, (one.frontier_ms or 0) - held_back_ms)))
            for one in shards.listenings
        ]
        return cls(parts, {site: number for number, sites in enumerate(shards.sites, 1) for site in sites})


def availability(home: Home, when: CoveredSpans, by: Sequence[str]) -> list[dict[str, Any]]:
    """Return the share of time in each mode, for each group of devices.

    Args:
        home: home to read.
        when: covered spans of the sites.
        by: columns to group by: ``device_id``, ``site``, ``device_class``, with their values in the
            transitions.

    Returns:
        One row for each group with covered time, in the order of ``by``. Its columns are those of
        ``by``; ``devices``; ``covered_ms``, the sum over the devices; ``available``, the share of
        the reachable time in which they were heard within their timeout (None without reachable
        time); the share of each counted mode; and ``never_seen``, the share in which they were
        offline and had never been heard.
    """
    with reading(home, (JUDGEMENTS.name,)) as tables:
        return availability_of(tables, when, by)


def availability_of(tables: "DuckDBPyConnection", when: CoveredSpans, by: Sequence[str]) -> list[dict[str, Any]]:
    """Like `availability`, but read judgements through an open connection."""
    names = ", ".join(by)
    shares = ", ".join(f"sum(ms) FILTER (mode = '{mode}') / sum(ms) AS {mode}" for mode in COUNTED)
    heard = literals(HEARD)
    counted = literals(COUNTED)
    sql = f"""
    WITH changes AS (
        SELECT *, epoch_ms(event_time) AS at_ms, epoch_ms(life) AS life_ms,
            lead(epoch_ms(event_time)) OVER device AS until_ms, lag(life) OVER device AS life_before
        FROM transitions WINDOW device AS (PARTITION BY device_id ORDER BY event_time, coalesce(amendment_no, transition_no))
    ), spans AS (
        SELECT device_id, site, device_class, to_mode AS mode, at_ms AS begin_ms, coalesce(until_ms, ?) AS end_ms, never_seen
        FROM changes
        UNION ALL
        SELECT device_id, site, device_class, from_mode, life_ms, at_ms, false FROM changes
        WHERE life_before IS DISTINCT FROM life AND life_ms < at_ms
    ), met AS (
        SELECT spans.*, least(end_ms, closed_ms) - greatest(begin_ms, opened_ms) AS ms
        FROM spans LEFT JOIN {_SHARDS} AS sites ON of_site = site
        JOIN {_LISTENED} AS listened ON shard = coalesce(number, 0) AND begin_ms < closed_ms AND end_ms > opened_ms
        WHERE mode IN ({counted})
    )
    SELECT {names}, count(DISTINCT device_id) AS devices, sum(ms)::BIGINT AS covered_ms,
        coalesce(sum(ms) FILTER (mode IN ({heard})), 0) / sum(ms) FILTER (mode <> '{Mode.UNREACHABLE}') AS available, {shares},
        coalesce(sum(ms) FILTER (never_seen), 0) / sum(ms) AS never_seen
    FROM met WHERE ms > 0 GROUP BY {names} ORDER BY {names}
    """
    parts = [(shard, part.from_ms, part.to_ms) for shard, shard_parts in enumerate(when.parts) for part in shard_parts]
    numbers, starts, ends = ([part[place] for part in parts] for place in range(3))
    sites = [[*when.shards], [*when.shards.values()]]
    found = fetch(tables, sql, [max(ends, default=0), *sites, numbers, starts, ends])
    return [{**row, **{mode.value: row[mode.value] or 0.0 for mode in COUNTED}} for row in found]
