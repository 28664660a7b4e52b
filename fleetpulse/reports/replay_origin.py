"""Where a device's history may be judged from again: the first row of bronze, or a snapshot of the state.

Rule 1: behind where a history begins every row is there: a snapshot counts while retention has not come to the version of bronze
that is read on from it.
Rule 2: a snapshot counts where nothing that came late lies before it, but for what an amend was done with by then: there the
judged and the amended history have one state (`core.amending.Beginning`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from deltalake.exceptions import DeltaError

from fleetpulse.core.amendments import Beginning
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import AMENDMENTS, JudgementKind
from fleetpulse.core.replay import NOTHING, Outcome
from fleetpulse.core.rows import EVERYONE, Kind, Row
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES
from fleetpulse.core.times import format_instant
from fleetpulse.io.delta.compacted import remainder_end
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.amend_progress import reached
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import SnapshotInfo, is_whole, snapshots
from fleetpulse.reports.messages import rows_behind, rows_through

DONE: Final = "amend"  # amend's number in judgements: up to which ``received_at`` all that came late is done with
_AT_ONCE: Final = 500  # devices of which all that ever came late is in memory together
_MOST_NAMED: Final = 1_000  # devices in a snapshot's note
LATE: Final = f"""(kind = '{JudgementKind.LATE}' AND message_kind IS DISTINCT FROM '{Kind.DEATH}'
    OR kind = '{JudgementKind.REFUSED}' AND message_kind = '{Kind.REGISTRY}')"""  # what an amended history takes as on time
CAME_LATE: Final = "came_late"  # as `kept` calls those rows: from which ``received_at`` on the table has all of them
Late = Mapping[str, Sequence[tuple[int, int]]]


def done_with(home: Home, newest_ms: int | None) -> tuple[int | None, tuple[str, ...]]:
    """Return up to which ``received_at`` amend was done with what came late, for a state that knows all up to ``newest_ms``.

    Returns:
        That instant, and the devices for which it does not count. None where there was no amend yet, or it had read further
        than that. Of too many devices to be named it is the instant that counts for each of them.
    """
    now = reached(home)
    if now is None or newest_ms is None or not holds_table(home.table(JUDGEMENTS.name)):
        return None, ()
    if not 0 < now.through_ms <= newest_ms or now.done_ms != tables.landed(home, JUDGEMENTS, DONE):
        return None, ()
    return (now.through_ms - 1, now.unmet) if len(now.unmet) <= _MOST_NAMED else (now.done_ms or None, ())


@dataclass(frozen=True, slots=True)
class Begun:
    """Where some devices' histories begin.

    Attributes:
        snapshot: with it; None: with the first row that bronze has.
        whole_from: the version of bronze from which on no row was missing when that was chosen.
    """

    snapshot: SnapshotInfo | None = None
    whole_from: int = 0

    def rows(self, home: Home, device_ids: Sequence[str], through_ms: int | None) -> list[Row]:
        """Return the rows from there on, of some devices and for everybody, up to an instant of ``received_at``.

        Raises:
            FleetError: some of them were removed meanwhile.
        """
        if self.snapshot is None:
            found, first = rows_through(home, device_ids, through_ms), self.whole_from
        else:
            assert self.snapshot.newest_ms is not None, "others are not chosen"
            first = self.snapshot.bronze
            found = rows_behind(home, device_ids, (first, self.snapshot.newest_ms), through_ms)
        if removed_below(home) > first:
            raise FleetError(
                "messages that it begins with were removed by maintenance meanwhile; run amend again", code="messages-removed"
            )
        return found

    def outcome(self, home: Home, device_ids: Sequence[str]) -> Outcome:
        """Return what had become of these devices there.

        Raises:
            FleetError: the snapshot was removed meanwhile.
        """
        if self.snapshot is None:
            return NOTHING
        from fleetpulse.columnar.snapshot.rows import GROUP, OWN_ROW, PENDING, come_to  # and with it numba

        sql = f"""SELECT * FROM {DEVICE_SNAPSHOTS.name} WHERE part <> '{PENDING}'
            AND (list_contains(?, device_id) OR part = '{GROUP}' OR (part = '{OWN_ROW}' AND device_id = '{EVERYONE}'))"""
        return come_to(rows_of_snapshot(home, self.snapshot, sql, [list(device_ids)]))


def rows_of_snapshot(home: Home, taken: SnapshotInfo, sql: str, parameters: Iterable[Any] = ()) -> pa.Table:
    """Run SQL over the rows of a snapshot.

    Raises:
        FleetError: it was removed meanwhile.
    """
    from duckdb import IOException

    assert taken.version is not None, "it was read from the table's history"
    try:
        return tables.query_files(
            DEVICE_SNAPSHOTS, tables.files_of_version(home, DEVICE_SNAPSHOTS, taken.version), sql, parameters
        )
    except (DeltaError, IOException):
        if is_whole(home.table(DEVICE_SNAPSHOTS.name), taken.version):
            raise
        raise FleetError(
            f"snapshot {taken.version} was removed by maintenance meanwhile; run it again", code="snapshot-removed"
        ) from None


def removed_below(home: Home) -> int:
    """Return the version of bronze below which rows were removed; 0 where none was."""
    return max((remainder_end(path.name) or 0 for path in tables.paths_of(home, MESSAGES)), default=0)


@dataclass(frozen=True, slots=True)
class Reach:
    """From where which devices' histories begin, and of which none is whole.

    Attributes:
        begun: the devices, by where they begin.
        why: of devices that no snapshot reaches, the reason; one that also stands in ``begun`` may be new enough to do without.
    """

    begun: Mapping[Begun, Sequence[str]]
    why: Mapping[str, str]


def reach(home: Home, device_ids: Iterable[str], through_ms: int) -> Reach:
    """Return from where devices can be judged again, each from the newest snapshot before all that came late for it.

    Args:
        home: the home.
        device_ids: the devices.
        through_ms: ``received_at`` up to which the job has judged; what came late until then counts.
    """
    order = list(device_ids)
    below = removed_below(home)
    known = whole_behind(home, below, through_ms)
    kept_ms = oldest_kept_ms(home, MESSAGES.name) or 0
    forgotten_ms = _forgotten_before(home)
    forgotten = [] if forgotten_ms is None else [(0, forgotten_ms - 1)]
    begun: dict[Begun, list[str]] = {}
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
            begun.setdefault(Begun(chosen, below), []).append(device_id)
    return Reach(begun, why)


@dataclass(frozen=True, slots=True)
class Known:
    """A snapshot, by what a history that begins with it depends on."""

    taken: SnapshotInfo
    newest_ms: int
    frontier_ms: int
    unmet: frozenset[str]

    def of(self, device_id: str) -> Beginning:
        """Return where the history of a device begins with it."""
        return Beginning(self.newest_ms, self.frontier_ms, None if device_id in self.unmet else self.taken.amended_ms)


def whole_behind(home: Home, below: int, through_ms: int) -> list[Known]:
    """Return the snapshots behind which bronze is whole, the newest first.

    Args:
        home: the home.
        below: the version of bronze below which rows were removed.
        through_ms: none is newer, by ``received_at``.
    """
    return [
        Known(one, one.newest_ms, one.frontier_ms, frozenset(one.unmet))
        for one in snapshots(home)
        if one.is_known and one.newest_ms is not None and one.frontier_ms is not None
        if one.bronze >= below and one.newest_ms <= through_ms
    ]


def _late(home: Home, device_ids: Sequence[str], through_ms: int) -> Late:
    """Return event time and ``received_at`` of all that came late for devices, as far as it is listed."""
    sql = f"""SELECT device_id, epoch_ms(event_time) AS event_ms, epoch_ms(received_at) AS received_ms FROM judgements
        WHERE {LATE} AND list_contains(?, device_id) AND epoch_ms(received_at) <= ? AND event_time IS NOT NULL"""
    found: dict[str, list[tuple[int, int]]] = {device_id: [] for device_id in device_ids}
    for row in tables.query(home, sql, [list(device_ids), through_ms]):
        found[row["device_id"]].append((row["event_ms"], row["received_ms"]))
    return found


def _forgotten_before(home: Home) -> int | None:
    """Return from which ``received_at`` on all that came late is listed; None where all ever is."""
    from_ms = oldest_kept_ms(home, CAME_LATE)
    return oldest_kept_ms(home, "late") if from_ms is None else from_ms or None  # one number stood for both at first


def _amended_before(home: Home, device_ids: Sequence[str], at_ms: int) -> set[str]:
    """Return the devices of which an amendment says something older: what came late for them may be neither listed nor kept."""
    kinds = ", ".join(f"'{kind}'" for kind in AMENDMENTS)
    sql = f"""SELECT DISTINCT device_id FROM judgements
        WHERE kind IN ({kinds}) AND list_contains(?, device_id) AND epoch_ms(event_time) < ?"""
    return {row["device_id"] for row in tables.query(home, sql, [list(device_ids), at_ms])}


def _too_old(kept_ms: int, late: Sequence[tuple[int, int]], beginnings: Sequence[Beginning]) -> str:
    gone = f"messages from before {format_instant(kept_ms)} are gone (keep_messages)"
    if not beginnings:
        return f"{gone}, and there is no snapshot from which bronze is whole: take one regularly (./fleet state snapshot)"

    def kept_from(some: Sequence[Beginning]) -> list[tuple[int, int]]:
        return [one for one in late if all(beginning.beyond([one]) is not None for beginning in some)]

    event_ms, received_ms = min(kept_from(beginnings) or kept_from(beginnings[-1:]))
    at = format_instant(received_ms)
    came = (
        f"at {at} reaches back to {format_instant(event_ms)}" if event_ms else f"until {at} is no longer listed whole (keep_late)"
    )
    return (
        f"what came late for it {came}, where no snapshot that is kept can begin, and {gone}; "
        f"that later ones can, run ./fleet amend until nothing is left, then ./fleet state snapshot"
    )
