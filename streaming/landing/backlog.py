"""Segments and leases of the bridges; fencing of bridges without a valid lease.

Rule 1: if a bridge does not renew its lease, or has stopped, landing fences it and continues
without it. The fence is the next segment of the bridge, and opens a coverage gap for its sites.
Rows that the bridge wrote before the fence come first.
Rule 2: a single bridge needs no fence: it reports its coverage gaps itself, before any other row.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import structlog

from fleetpulse.core.presence.shards import Scope, served_sites
from fleetpulse.core.rows import EVERYONE, Kind, Origin
from fleetpulse.io.ingest.leases import LEASE_MS, Lease, read_lease
from fleetpulse.io.ingest.segments import (
    BridgeFencedError,
    BridgePosition,
    SegmentRow,
    bridge_position,
    list_segments,
    positions,
    read_segment,
    remove_leftovers,
    rows_table,
    write_segment,
)
from streaming.landing.merge import MAX_SEGMENT_ROWS, Backlog, Part, place

_LOG: Final = structlog.get_logger("landing")


class Bridges:
    """Bridges of a home.

    Args:
        folders: segment folders by bridge.
        now_ms: present wall clock time; no bridge is fenced within `lease_ms` after it, since
            bridges may just be starting.
        lease_ms: time without a renewal after which a bridge is fenced.
        sites: sites of the further bridges, by bridge.
        takes_foreign: whether the first bridge takes topics of other formats, see `served_sites`.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        now_ms: int,
        lease_ms: int = LEASE_MS,
        sites: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        takes_foreign: bool = True,
    ) -> None:
        self.folders = folders
        self._sites, self._takes_foreign = sites, takes_foreign
        self._lease_ms = lease_ms
        self._since_ms = now_ms
        for folder in folders.values():
            remove_leftovers(folder, fences=True)
        self._landed: dict[str, tuple[int, int]] = {}  # by bridge: last read segment, and the place after its rows

    def backlogs(self, places: Mapping[str, int], now_ms: int, max_rows: int, max_bytes: int) -> list[Backlog]:
        """Read the rows of each bridge after its place; fence bridges without a lease.

        Args:
            places: place by bridge up to which every table has its rows, see `merge.place`.
            now_ms: present wall clock time.
            max_rows: limit of rows per bridge, exceeded by up to one segment. With several bridges,
                all rows of an instant are read.
            max_bytes: limit of bytes per bridge, with the same exceptions.
        """
        if len(self.folders) == 1:
            return [self._backlog(name, places[name], max_rows, max_bytes, None) for name in self.folders]
        leases = {name: read_lease(folder) for name, folder in self.folders.items()}
        awaited = {name: lease for name, lease in leases.items() if lease is not None and not self._is_silent(lease, now_ms)}
        for name, lease in leases.items():
            if name not in awaited and awaited:
                self._fence(name, lease, now_ms)
        through = {name: lease.through_ms for name, lease in awaited.items()}
        return [self._backlog(name, places[name], max_rows, max_bytes, through.get(name)) for name in self.folders]

    def _is_silent(self, lease: Lease, now_ms: int) -> bool:
        if lease.stopped and lease.beat_ms > self._since_ms:
            return True
        return now_ms - max(lease.beat_ms, self._since_ms) > self._lease_ms

    def _backlog(self, name: str, start: int, max_rows: int, max_bytes: int, through_ms: int | None) -> Backlog:
        parts: list[Part] = []
        rows, size, alone = 0, 0, len(self.folders) == 1
        for number, path in list_segments(self.folders[name]):
            if (number + 1) * MAX_SEGMENT_ROWS <= start:
                continue
            if (rows >= max_rows or size >= max_bytes) and (alone or _instant(parts[0], 0) < _instant(parts[-1], -1)):
                return Backlog(parts, through_ms, more=True)
            if (number, start) == self._landed.get(name):
                continue  # the newest segment, which is not deleted
            table, first = read_segment(path), max(0, start - number * MAX_SEGMENT_ROWS)
            self._landed[name] = (number, place(number, table.num_rows))
            if first < table.num_rows:
                parts.append(Part(name, number, first, table.slice(first), positions(table)[first:]))
                rows, size = rows + table.num_rows - first, size + table.nbytes
        return Backlog(parts, through_ms)

    def _fence(self, name: str, lease: Lease | None, now_ms: int) -> None:
        """Fence a bridge: open a coverage gap on its behalf, after all rows that it wrote.

        No effect if a gap is open or the bridge never listened. A segment newer than the lease
        means that the bridge has just come back: it renews its lease after writing a segment.
        """
        position = bridge_position(self.folders[name])
        if position is None or position.gap_open:
            return
        back = lease is None or position.received_at_ms > lease.beat_ms
        if back and now_ms - position.received_at_ms <= self._lease_ms:
            return
        at_ms = max(position.received_at_ms, lease.through_ms if lease else 0) + 1
        try:
            scope = served_sites(self._sites.get(name, ()), position.shared, takes_foreign=self._takes_foreign)
            _write_gap(self.folders[name], name, position, at_ms, scope)
        except BridgeFencedError:
            return  # the bridge is back, and has written this segment number
        _LOG.warning("fenced a bridge without a valid lease; a coverage gap is open, the broker queues its messages", bridge=name)


def _instant(part: Part, at: int) -> int:
    return int(part.rows["received_at_ms"].to_numpy()[at])


def _write_gap(folder: Path, name: str, position: BridgePosition, at_ms: int, scope: Scope) -> None:
    since_ms = position.received_at_ms if position.last_canary_ms is None else position.last_canary_ms
    gap = {"op": "open", "from": since_ms, "after": position.received_at_ms, "why": "bridge", **scope.to_plain()}
    topic, payload = f"fleet/{EVERYONE}/{name}/{Kind.GAP.value}", json.dumps(gap, separators=(",", ":")).encode()
    write_segment(
        folder,
        position.number + 1,
        rows_table([SegmentRow(at_ms, topic, payload, Origin.BRIDGE.value)]),
        bridge=name,
        last_canary_ms=position.last_canary_ms,
        gap_open=True,
        played=position.played,
        shared=position.shared,
        fence=True,
        left_open=position.left_open,
        tail=position.tail,
    )


def delete_landed_segments(folders: Mapping[str, Path], places: Mapping[str, int]) -> None:
    """Delete segments that have landed in every table; keep each bridge's newest."""
    for path in landed_segments(folders, places):
        path.unlink(missing_ok=True)


def landed_segments(folders: Mapping[str, Path], places: Mapping[str, int]) -> list[Path]:
    """Return the segments landed in every table, except the newest of each bridge.

    The newest segment contains the bridge's position.
    """
    return [
        path
        for name, folder in folders.items()
        for number, path in list_segments(folder)[:-1]
        if (number + 1) * MAX_SEGMENT_ROWS <= places[name]
    ]
