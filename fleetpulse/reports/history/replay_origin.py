"""Origins for replaying devices: first row of bronze, or a snapshot of the state.

Rule 1: every row after an origin must exist. A snapshot qualifies until retention removes rows of
the versions of bronze that are read after it.
Rule 2: a snapshot qualifies for a device if no late message of the device concerns the time before
it. Late messages that amend had processed by then are excepted: the judged and the amended history
have the same state at the snapshot (`core.amendments.ReplayOrigin`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from deltalake.exceptions import DeltaError

from fleetpulse.core.amendments import ReplayOrigin
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import AMENDMENTS, JudgementKind
from fleetpulse.core.replay import EMPTY_OUTCOME, Outcome
from fleetpulse.core.rows import EVERYONE, Kind, Row
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES, literals
from fleetpulse.core.times import MINUTE_MS, format_instant
from fleetpulse.io.delta.compacted import remainder_end
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.amend_progress import read_amend_progress
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import SnapshotInfo, is_whole, snapshots
from fleetpulse.reports.messages import rows_since_version, rows_through

DONE: Final = "amend"  # writer in commits of judgements; number: ``received_at`` up to which late messages are processed
_AT_ONCE: Final = 500  # devices whose late messages are in memory at the same time
_MOST_NAMED: Final = 1_000  # maximum number of devices in a snapshot's metadata
LATE: Final = f"""(kind = '{JudgementKind.LATE}' AND message_kind IS DISTINCT FROM '{Kind.DEATH}'
    OR kind = '{JudgementKind.REFUSED}' AND message_kind = '{Kind.REGISTRY}')"""  # rows that an amended history treats as on time
LAST_MS: Final = f"""CASE WHEN messages IS NULL THEN epoch_ms(received_at)
    ELSE least(epoch_ms(received_until), epoch_ms(received_at) // {MINUTE_MS} * {MINUTE_MS} + {MINUTE_MS - 1}) END"""  # DuckDB:
# latest possible ``received_at`` of a message that a row counts, epoch milliseconds
CAME_LATE: Final = "came_late"  # key in `retention_floor` of the rows of `LATE`: they are complete since that ``received_at``
Late = Mapping[str, Sequence[tuple[int, int]]]


def applicable_amend_progress(home: Home, newest_ms: int | None) -> tuple[int | None, tuple[str, ...]]:
    """Return the progress of amend that applies to a state.

    Args:
        home: home to read.
        newest_ms: ``received_at`` up to which the state includes all rows.

    Returns:
        ``received_at`` up to which late messages were processed, and the devices to which it does
        not apply. The instant is None if there was no amend yet, or if amend had read beyond
        ``newest_ms``. If there are too many devices to name, it is the earlier instant that applies
        to all devices.
    """
    now = read_amend_progress(home)
    if now is None or newest_ms is None or not holds_table(home.table(JUDGEMENTS.name)):
        return None, ()
    if not 0 < now.through_ms <= newest_ms or now.done_ms != tables.landed(home, JUDGEMENTS, DONE):
        return None, ()
    return (now.through_ms - 1, now.unmet) if len(now.unmet) <= _MOST_NAMED else (now.done_ms or None, ())


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Origin of the histories of some devices.

    Attributes:
        snapshot: snapshot at the origin; None: the first row of bronze.
        whole_from: version of bronze from which on no row was missing when the origin was chosen.
    """

    snapshot: SnapshotInfo | None = None
    whole_from: int = 0

    def rows(self, home: Home, device_ids: Sequence[str], through_ms: int | None) -> list[Row]:
        """Return the rows after the origin that concern some devices, up to an instant.

        Args:
            home: home to read.
            device_ids: ids of the devices.
            through_ms: ``received_at`` of the last rows, epoch milliseconds; None: all.

        Raises:
            FleetError: maintenance has removed some of the rows meanwhile.
        """
        if self.snapshot is None:
            found, first = rows_through(home, device_ids, through_ms), self.whole_from
        else:
            assert self.snapshot.newest_ms is not None, "only a snapshot with a position is chosen"
            first = self.snapshot.bronze
            found = rows_since_version(home, device_ids, (first, self.snapshot.newest_ms), through_ms)
        if removed_below(home) > first:
            raise FleetError(
                "maintenance has removed messages that amend needs meanwhile; run amend again", code="messages-removed"
            )
        return found

    def outcome(self, home: Home, device_ids: Sequence[str]) -> Outcome:
        """Return the outcome at the origin, for some devices.

        Raises:
            FleetError: maintenance has removed the snapshot meanwhile.
        """
        if self.snapshot is None:
            return EMPTY_OUTCOME
        from fleetpulse.columnar.snapshot.rows import GROUP, OWN_ROW, PENDING, outcome_of  # here, since it imports numba

        sql = f"""SELECT * FROM {DEVICE_SNAPSHOTS.name} WHERE part <> '{PENDING}'
            AND (list_contains(?, device_id) OR part = '{GROUP}' OR (part = '{OWN_ROW}' AND device_id = '{EVERYONE}'))"""
        return outcome_of(rows_of_snapshot(home, self.snapshot, sql, [list(device_ids)]))


def rows_of_snapshot(home: Home, snapshot: SnapshotInfo, sql: str, parameters: Iterable[Any] = ()) -> pa.Table:
    """Run SQL over the rows of a snapshot.

    Raises:
        FleetError: maintenance has removed the snapshot meanwhile.
    """
    from duckdb import IOException

    assert snapshot.version is not None, "the snapshot was read from the table's history"
    try:
        return tables.query_files(
            DEVICE_SNAPSHOTS, tables.files_of_version(home, DEVICE_SNAPSHOTS, snapshot.version), sql, parameters
        )
    except (DeltaError, IOException):
        if is_whole(home.table(DEVICE_SNAPSHOTS.name), snapshot.version):
            raise
        raise FleetError(
            f"snapshot {snapshot.version} was removed by maintenance meanwhile; run the command again", code="snapshot-removed"
        ) from None


def removed_below(home: Home) -> int:
    """Return the version of bronze below which rows were removed; 0 if none was."""
    return max((remainder_end(path.name) or 0 for path in tables.paths_of(home, MESSAGES)), default=0)


@dataclass(frozen=True, slots=True)
class OriginChoice:
    """Result of `choose_origins`: origins of devices.

    Attributes:
        by_origin: devices by origin.
        why: reason for each device for which no snapshot qualifies. A device can also be in
            ``by_origin``: its whole history may be retained in bronze.
    """

    by_origin: Mapping[StartingPoint, Sequence[str]]
    why: Mapping[str, str]


def choose_origins(home: Home, device_ids: Iterable[str], through_ms: int) -> OriginChoice:
    """Choose the origin of each device: the newest qualifying snapshot, or bronze.

    Args:
        home: home to read.
        device_ids: ids of the devices.
        through_ms: ``received_at`` up to which the job has judged; later late messages are ignored.
    """
    order = list(device_ids)
    below = removed_below(home)
    known = complete_snapshots(home, below, through_ms)
    kept_ms = oldest_kept_ms(home, MESSAGES.name) or 0
    forgotten_ms = _forgotten_before(home)
    forgotten = [] if forgotten_ms is None else [(0, forgotten_ms - 1)]
    by_origin: dict[StartingPoint, list[str]] = {}
    why: dict[str, str] = {}
    for first in range(0, len(order), _AT_ONCE):
        some = order[first : first + _AT_ONCE]
        amended = set[str]() if forgotten_ms is None else _amended_before(home, some, kept_ms)
        for device_id, listed in _late(home, some, through_ms).items():
            late = [*forgotten, *listed]
            chosen = next((one.taken for one in known if one.of(device_id).beyond(late) is None), None)
            if chosen is None and below:
                why[device_id] = _too_old(kept_ms, late, [one.of(device_id) for one in known])
                if device_id in amended or any(received_ms < kept_ms for _, received_ms in listed):
                    continue
            by_origin.setdefault(StartingPoint(chosen, below), []).append(device_id)
    return OriginChoice(by_origin, why)


@dataclass(frozen=True, slots=True)
class CandidateSnapshot:
    """Snapshot with the facts that decide whether it qualifies as an origin."""

    taken: SnapshotInfo
    newest_ms: int
    frontier_ms: int
    unmet: frozenset[str]

    def of(self, device_id: str) -> ReplayOrigin:
        """Return the snapshot as the origin of a device's replay."""
        return ReplayOrigin(self.newest_ms, self.frontier_ms, None if device_id in self.unmet else self.taken.amended_ms)


def complete_snapshots(home: Home, below: int, through_ms: int) -> list[CandidateSnapshot]:
    """Return the snapshots after which bronze is complete, newest first.

    Args:
        home: home to read.
        below: version of bronze below which rows were removed.
        through_ms: greatest ``received_at`` of a snapshot, epoch milliseconds.
    """
    return [
        CandidateSnapshot(one, one.newest_ms, one.frontier_ms, frozenset(one.unmet))
        for one in snapshots(home)
        if one.is_known and one.newest_ms is not None and one.frontier_ms is not None
        if one.bronze >= below and one.newest_ms <= through_ms
    ]


def _late(home: Home, device_ids: Sequence[str], through_ms: int) -> Late:
    """Return event time and ``received_at`` of the listed late messages of devices.

    Of a row for several messages, these are the least and the greatest.
    """
    sql = f"""SELECT device_id, epoch_ms(event_time) AS event_ms, {LAST_MS} AS received_ms FROM judgements
        WHERE {LATE} AND list_contains(?, device_id) AND epoch_ms(received_at) <= ? AND event_time IS NOT NULL"""
    found: dict[str, list[tuple[int, int]]] = {device_id: [] for device_id in device_ids}
    for row in tables.query(home, sql, [list(device_ids), through_ms]):
        found[row["device_id"]].append((row["event_ms"], row["received_ms"]))
    return found


def _forgotten_before(home: Home) -> int | None:
    """Return the ``received_at`` since which all late messages are listed.

    None if none was removed.
    """
    from_ms = oldest_kept_ms(home, CAME_LATE)
    return oldest_kept_ms(home, "late") if from_ms is None else from_ms or None  # homes of early releases have one floor for both


def _amended_before(home: Home, device_ids: Sequence[str], at_ms: int) -> set[str]:
    """Return the devices with an amendment of an event before an instant.

    The late messages that caused it may be neither listed nor retained.
    """
    kinds = literals(AMENDMENTS)
    sql = f"""SELECT DISTINCT device_id FROM judgements
        WHERE kind IN ({kinds}) AND list_contains(?, device_id) AND epoch_ms(event_time) < ?"""
    return {row["device_id"] for row in tables.query(home, sql, [list(device_ids), at_ms])}


def _too_old(kept_ms: int, late: Sequence[tuple[int, int]], origins: Sequence[ReplayOrigin]) -> str:
    removed = f"messages received before {format_instant(kept_ms)} were removed (keep_messages)"
    if not origins:
        return f"{removed}, and there is no snapshot after which bronze is complete; take one regularly (./fleet state snapshot)"

    def beyond_all(some: Sequence[ReplayOrigin]) -> list[tuple[int, int]]:
        return [one for one in late if all(origin.beyond([one]) is not None for origin in some)]

    event_ms, received_ms = min(beyond_all(origins) or beyond_all(origins[-1:]))
    at = format_instant(received_ms)
    cause = (
        f"message received at {at} reaches back to {format_instant(event_ms)}"
        if event_ms
        else f"messages received until {at} are no longer all listed (keep_late)"
    )
    return (
        f"the late {cause}; no retained snapshot can be the origin of its replay, and {removed}; to make amending possible for "
        f"later messages, run ./fleet amend until nothing is left, then ./fleet state snapshot"
    )
