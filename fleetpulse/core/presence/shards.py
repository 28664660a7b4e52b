"""Shards: coverage and frontier of every site.

A bridge that is not listening delays the verdicts of the sites that it serves, and of no others.

Rule 1: a gap row names the sites that it concerns; without names it concerns every site.
Rule 2: sites that the same gap rows concern are a shard: they share coverage and frontier.
Rule 3: the frontier of the site of a message decides whether it is late or due. Silence of a device
counts covered time of its current site.
Rule 4: rows of one device that belong to several shards are judged in the order in which they
become due.

Source: ADR 36.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, cast

from fleetpulse.core.messages.text import MAX_ID_BYTES
from fleetpulse.core.presence.coverage import ShardProgress
from fleetpulse.core.rows import Row, order

MAX_NAMED_SITES: Final = 1_000  # sites that gap rows name; each key group keeps their names
_NEVER: Final = 2**62
_BEFORE_ALL: Final = -(2**61)


@dataclass(frozen=True, slots=True)
class Scope:
    """The sites that a gap concerns.

    Attributes:
        sites: names of sites.
        is_others: whether the gap concerns every site except ``sites``.
    """

    sites: frozenset[str] = frozenset()
    is_others: bool = True

    @classmethod
    def of_gap(cls, content: Mapping[str, Any]) -> "Scope":
        """Parse the scope of a gap row.

        The scope is every site if the row names no site, or more than `MAX_NAMED_SITES`.
        """
        for name, is_others in (("sites", False), ("except", True)):
            listed = content.get(name)
            if isinstance(listed, list):
                sites = cast("list[Any]", listed)
                if 0 < len(sites) <= MAX_NAMED_SITES and all(map(_is_site, sites)):
                    return cls(frozenset(sites), is_others)
        return EVERY_SITE

    def to_plain(self) -> dict[str, list[str]]:
        """Return the entry for a gap row, see `of_gap`; empty for every site."""
        return {"except" if self.is_others else "sites": sorted(self.sites)} if self.sites else {}

    def concerns(self, site: str) -> bool:
        """Whether the gap concerns a site."""
        return (site in self.sites) is not self.is_others


def _is_site(name: Any) -> bool:
    return isinstance(name, str) and len(name.encode()) <= MAX_ID_BYTES


EVERY_SITE: Final = Scope()


def served_sites(sites: Iterable[str], shared: Iterable[str], *, takes_foreign: bool) -> Scope:
    """Return the sites that a gap of a bridge concerns: no other bridge serves them.

    Args:
        sites: sites of a further bridge; empty for the first bridge and for the Kafka bridge.
        shared: sites that the first bridge leaves to other bridges.
        takes_foreign: whether the bridge reads topics of other formats, whose messages may be of
            any site.
    """
    if own := frozenset(sites):
        return Scope(own, is_others=False)
    return EVERY_SITE if takes_foreign else Scope(frozenset(shared))


@dataclass(frozen=True)
class Shards:
    """Coverage and frontier of every site, by shard.

    Attributes:
        listenings: coverage and frontier of each shard; the first shard has all sites that no gap
            row has named.
        sites: sites of each other shard, in order and disjoint.
    """

    listenings: tuple[ShardProgress, ...]
    sites: tuple[frozenset[str], ...] = ()

    @classmethod
    def begin(cls, received_at_ms: int) -> "Shards":
        """Return the shards at the first row ever received."""
        return cls((ShardProgress.begin(received_at_ms),))

    @classmethod
    def judged_through(cls, frontier_ms: int, started_ms: int, allowed_lateness_ms: int) -> "Shards":
        """Return one shard for all sites, see `ShardProgress.judged_through`."""
        return cls((ShardProgress.judged_through(frontier_ms, started_ms, allowed_lateness_ms),))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {site: number for number, sites in enumerate(self.sites, 1) for site in sites}

    def __len__(self) -> int:
        return len(self.listenings)

    def number(self, site: str | None) -> int:
        """Return the number of a site's shard."""
        return self._numbers.get(site, 0) if site is not None else 0

    def of(self, site: str | None) -> ShardProgress:
        """Return coverage and frontier of a site."""
        return self.listenings[self.number(site)]

    @property
    def start_ms(self) -> int:
        """Instant before which no site has coverage, or its coverage was dropped."""
        return min(one.coverage.start_ms for one in self.listenings)

    @property
    def newest_ms(self) -> int:
        """Newest ``received_at`` read, epoch milliseconds."""
        return self.listenings[0].newest_ms

    @property
    def frontier_ms(self) -> int | None:
        """Greatest frontier of any shard, epoch milliseconds; None if there is none yet."""
        return max((one.frontier_ms for one in self.listenings if one.frontier_ms is not None), default=None)

    @property
    def frontiers_ms(self) -> tuple[int | None, ...]:
        """Frontier of each shard, epoch milliseconds."""
        return tuple(one.frontier_ms for one in self.listenings)

    @property
    def least_frontier_ms(self) -> int | None:
        """Least frontier of all shards, epoch milliseconds; None if a shard has none yet."""
        known = [one.frontier_ms for one in self.listenings if one.frontier_ms is not None]
        return min(known) if len(known) == len(self) else None

    def read(self, received_at_ms: int, allowed_lateness_ms: int) -> "Shards":
        """Return the shards after a row received at ``received_at_ms``."""
        moved = tuple(one.read(received_at_ms, allowed_lateness_ms) for one in self.listenings)
        same = all(one is before for one, before in zip(moved, self.listenings, strict=True))
        return self if same else self._with(moved)

    def _with(self, listenings: tuple[ShardProgress, ...]) -> "Shards":
        shards = replace(self, listenings=listenings)
        shards.__dict__["_numbers"] = self._numbers
        return shards

    def covering(self, known: "Shards") -> "Shards":
        """Return these shards with the coverage of ``known``, which starts earlier."""
        sites = (None, *(min(shard_sites) for shard_sites in self.sites))
        coverages = (known.of(site).coverage for site in sites)
        return self._with(
            tuple(replace(one, coverage=coverage) for one, coverage in zip(self.listenings, coverages, strict=True))
        )

    def forget_before(self, instants_ms: Sequence[int]) -> "Shards":
        """Drop coverage before one instant for each shard, see `Coverage.forget_before`."""
        return self._with(
            tuple(
                replace(one, coverage=one.coverage.forget_before(instant_ms))
                for one, instant_ms in zip(self.listenings, instants_ms, strict=True)
            )
        )

    def has_room_for(self, bridge: str) -> bool:
        """Return whether a gap of ``bridge`` can be open in every shard, see `Coverage.has_room_for`."""
        return all(one.coverage.has_room_for(bridge) for one in self.listenings)

    def open_gap(self, row_ms: int, since_ms: int, bridge: str, scope: Scope = EVERY_SITE) -> "Shards":
        """Open a gap for the sites of a scope, see `ShardProgress.open_gap`.

        A shard that the scope includes in part is split.
        """
        if len(self._numbers.keys() | scope.sites) > MAX_NAMED_SITES:
            scope = EVERY_SITE
        shards = self._split(scope)
        concerned = [scope.is_others, *(scope.concerns(min(sites)) for sites in shards.sites)]
        both = zip(shards.listenings, concerned, strict=True)
        moved = tuple(one.open_gap(row_ms, since_ms, bridge) if is_concerned else one for one, is_concerned in both)
        return replace(shards, listenings=moved)

    def _split(self, scope: Scope) -> "Shards":
        listenings, sites = list(self.listenings), list(self.sites)
        for number, shard_sites in enumerate(self.sites, 1):
            if (split_off := shard_sites & scope.sites) and split_off != shard_sites:
                sites[number - 1] = shard_sites - split_off
                listenings.append(self.listenings[number])
                sites.append(split_off)
        if new := scope.sites - self._numbers.keys():
            listenings.append(self.listenings[0])
            sites.append(new)
        return self if len(listenings) == len(self) else Shards(tuple(listenings), tuple(sites))

    def close_gap(self, row_ms: int, until_ms: int, bridge: str) -> "Shards":
        """Close the gap of a bridge, see `ShardProgress.close_gap`."""
        return self._with(tuple(one.close_gap(row_ms, until_ms, bridge) for one in self.listenings))


@dataclass(frozen=True, slots=True)
class Due:
    """A row of a device that has become due.

    Attributes:
        received_at_ms: ``received_at`` that moved the frontier of its shard to the row.
        shard: number of its shard.
        row: row of the device, or gateway event for all key groups.
    """

    received_at_ms: int
    shard: int
    row: Row


@dataclass(frozen=True, slots=True)
class Advance:
    """Movement of the frontiers between two gap rows, with constant coverage.

    Attributes:
        shards: coverage and frontiers afterwards.
        former_ms: frontiers before, epoch milliseconds; None for a shard without one.
        allowed_lateness_ms: allowed lateness of the installation.
    """

    shards: Shards
    former_ms: tuple[int | None, ...]
    allowed_lateness_ms: int

    @classmethod
    def between(cls, before: Shards | None, after: Shards, allowed_lateness_ms: int) -> "Advance":
        """Return the movement between two states.

        A shard that was split off in between starts at the frontier of its source.
        """
        if before is None:
            return cls(after, (None,) * len(after), allowed_lateness_ms)
        sites = [None, *(min(shard_sites) for shard_sites in after.sites)]
        return cls(after, tuple(before.of(site).frontier_ms for site in sites), allowed_lateness_ms)

    def judged_to(self, frontier_ms: int, site: str | None = None) -> "Advance":
        """Return the movement of all frontiers, or of one site's, to an instant.

        If a site is given, the other shards read the ``received_at`` that moves its frontier to the instant.
        """
        shards, shard = self.shards, None if site is None else self.shards.number(site)
        if shard is not None:
            received_at_ms = shards.listenings[shard].due_at(frontier_ms, self.allowed_lateness_ms)
            shards = shards if received_at_ms is None else shards.read(received_at_ms, self.allowed_lateness_ms)
        moved = tuple(
            replace(one, frontier_ms=frontier_ms) if shard in (None, number) else one
            for number, one in enumerate(shards.listenings)
        )
        return replace(self, shards=replace(shards, listenings=moved))

    def up_to(self, frontier_ms: int) -> "Advance":
        """Return the movement with every frontier limited to an instant."""
        known = self.shards.listenings
        moved = tuple(
            one if one.frontier_ms is None else replace(one, frontier_ms=min(one.frontier_ms, frontier_ms)) for one in known
        )
        return replace(self, shards=replace(self.shards, listenings=moved))

    def is_due(self, row: Row, shard: int) -> bool:
        """Whether the frontier of a shard reaches a row by this movement."""
        former_ms, frontier_ms = self.former_ms[shard], self.shards.listenings[shard].frontier_ms
        return frontier_ms is not None and row.at_ms <= frontier_ms and (former_ms is None or row.at_ms > former_ms)

    def in_order(self, rows: Iterable[Row], events: Iterable[Row], shards: Iterable[int]) -> list[Due]:
        """Merge the due rows of a device and gateway events, in the order in which they become due.

        Args:
            rows: due rows of the device, without copies.
            events: gateway events as each key group receives them, due or not.
            shards: numbers of the shard of the device and of the shards of its rows.
        """
        due = [Due(self.due_at(row), self.shards.number(row.site), row) for row in rows]
        due.sort(key=lambda each: (each.received_at_ms, order(each.row)))
        due_events = [(shard, row) for shard in sorted({*shards}) for row in events if self.is_due(row, shard)]
        of_gateways = [Due(self._due_at(row, shard), shard, row) for shard, row in due_events]
        of_gateways.sort(key=lambda each: (each.received_at_ms, each.row.arrival, each.shard))
        return sorted(
            [*due, *of_gateways], key=lambda each: (each.received_at_ms, each.row.at_ms)
        )  # at one instant rows come first

    def due_at(self, row: Row) -> int:
        """Return the ``received_at`` that moves the frontier of its site to a row."""
        return self._due_at(row, self.shards.number(row.site))

    def _due_at(self, row: Row, shard: int) -> int:
        received_at_ms = self.shards.listenings[shard].due_at(row.at_ms, self.allowed_lateness_ms)
        return _NEVER if received_at_ms is None else received_at_ms

    def judged_before(self, due: Due, site: str) -> int:
        """Return the frontier of a site just before a row of another shard became due.

        For a row of the same shard, return an instant before all others.
        """
        shard = self.shards.number(site)
        if shard == due.shard:
            return _BEFORE_ALL
        listening, former_ms = self.shards.listenings[shard], self.former_ms[shard]
        covered_ms = listening.coverage.covered(min(due.received_at_ms - 1, listening.newest_ms))
        reached = [former_ms, listening.coverage.greatest(covered_ms - self.allowed_lateness_ms)]
        return max((one for one in reached if one is not None), default=_BEFORE_ALL)
