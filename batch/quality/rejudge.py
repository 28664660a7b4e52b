"""Replay of bronze for the suites: from its first row, or from a snapshot.

A snapshot is the origin if the first rows were removed, or if bronze has too many rows.

Rule 1: a snapshot qualifies only if bronze has all rows received after it, and if no state was made
of chosen devices (by a filter on a snapshot, or from a list) since.
Rule 2: judgements before the origin are not verified again; the gate checks a snapshot when it is
taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from batch.backtest import progress_line, unpacked
from batch.common.progress import Paced, ReportProgress, silent
from fleetpulse.columnar.codec.arrow import NO_SIGNALS
from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import drop_broadcast_copies
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.rows import GROUP, OWN_ROW, PENDING, restore_group, shared_context, shared_rows, snapshot_rows
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.rows import EVERYONE
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.generations import CURRENT, PRUNED, RETIRED, Generation, Generations, load_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.bronze import pack, read_bronze
from fleetpulse.io.tables.bronze_slices import BronzePiece, blocks_of, pieces_of, slices_of
from fleetpulse.io.tables.snapshots import SnapshotInfo
from fleetpulse.reports.history.replay_origin import complete_snapshots, removed_below, rows_of_snapshot
from fleetpulse.reports.messages import files_beside

MOST_ROWS: Final = 10_000_000  # most rows of bronze to replay: about ten minutes of a core


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a replay of bronze.

    Attributes:
        snapshot: snapshot to start from; None starts from the first row of bronze.
    """

    snapshot: SnapshotInfo | None = None

    @property
    def newest_ms(self) -> int:
        """Newest ``received_at`` of the origin, epoch milliseconds.

        Rows of exactly this instant that the snapshot does not contain are still replayed.
        """
        return (self.snapshot.newest_ms or 0) if self.snapshot else 0

    @property
    def frontier_ms(self) -> int:
        """Frontier of the origin, epoch milliseconds."""
        return (self.snapshot.frontier_ms or 0) if self.snapshot else 0


def is_whole(home: Home) -> bool:
    """Return whether all judgements follow from bronze alone.

    They do if no row was removed, no state was made of chosen devices, and fleetpulse version 1 judged
    no row.
    """
    chosen = _choices(load_generations(home.lifecycle))
    return not chosen and oldest_kept_ms(home, MESSAGES.name) is None and home.judged_by_version_1_ms() is None


def ever_current(record: Generations) -> Iterator[Generation]:
    """Yield the generations that have been current and so emitted judgements."""
    return (one for one in record.known.values() if one.status in (CURRENT, RETIRED, PRUNED))


def _choices(record: Generations) -> frozenset[int]:
    return frozenset[int]().union(*(record.with_chosen_devices(one.number) for one in ever_current(record)))


def origin_of(
    home: Home, through_ms: int, number: int | None = None, excluded: int | None = None, most_rows: int = MOST_ROWS
) -> Origin | None:
    """Choose the origin of a replay up to an instant.

    This is the first row of bronze if at most `most_rows` rows follow. Otherwise it is the oldest
    snapshot with at most `most_rows` rows after it. It is never the newest snapshot if there is an
    older one: there may be no rows after the newest.

    Args:
        home: the home.
        through_ms: ``received_at`` up to which rows are replayed, epoch milliseconds.
        number: number of the generation under test; None takes the current one.
        excluded: version of a snapshot to exclude, as it is under test itself.
        most_rows: maximum number of rows to replay.

    Returns:
        The origin; None if no origin qualifies: after each snapshot, retention removed rows, or a state
        was made of chosen devices.
    """
    pieces = [piece for piece in pieces_of(home) if piece.first_ms <= through_ms]
    whole = is_whole(home)
    if whole and _rows_behind(pieces, -1) <= most_rows:
        return Origin()
    record, by_version_1_ms = load_generations(home.lifecycle), home.judged_by_version_1_ms()
    chosen = record.with_chosen_devices(record.current if number is None else number)
    known = [
        one.taken
        for one in complete_snapshots(home, removed_below(home), through_ms)
        if one.taken.version != excluded
        and one.newest_ms < through_ms
        and (by_version_1_ms is None or one.newest_ms >= by_version_1_ms)
        and _choices(record) <= chosen
        and one.taken.generation >= max(chosen, default=0)
    ]
    if not known:
        return Origin() if whole else None
    near = sum(_rows_behind(pieces, one.newest_ms or 0) <= most_rows for one in known)
    return Origin(known[max(near, min(2, len(known))) - 1])


def _rows_behind(pieces: Sequence[BronzePiece], newest_ms: int) -> int:
    return sum(piece.rows for piece in pieces if piece.last_ms > newest_ms)


def is_still_complete(home: Home, origin: Origin) -> bool:
    """Return whether bronze still has all rows after an origin."""
    return is_whole(home) if origin.snapshot is None else origin.snapshot.bronze >= removed_below(home)


def replay_bronze(home: Home, newest_ms: int, origin: Origin, report: ReportProgress = silent) -> tuple[pa.Table, pa.Table]:
    """Replay bronze up to a row.

    Args:
        home: the home.
        newest_ms: ``received_at`` of the last row, epoch milliseconds.
        origin: origin of the replay.
        report: callback for progress lines, every few seconds.

    Returns:
        Judgements, with the columns of `JUDGEMENTS`; and devices, with those of `SNAPSHOT_SCHEMA`.

    Raises:
        FleetError: maintenance removed the snapshot, or rows after it, meanwhile.
    """
    deployment, pieces, progress = home.deployment(), pieces_of(home), Paced(report)
    groups, chunks = _restored_groups(home, origin, pieces[0].first_ms)
    batches: list[pa.RecordBatch] = []

    def fold(blocks: pa.RecordBatch | None, through_ms: int) -> None:
        packed = zip(blocks["key_group"].to_pylist(), unpacked(blocks), strict=True) if blocks else _time_alone(len(groups))
        for key_group, (signals, others) in packed:
            pending = chunks[key_group]
            step = groups[key_group].fold(signals, others, through_ms, deployment, pending.__getitem__)
            for number in step.deleted_chunks:
                del pending[number]
            pending.update(step.chunks)
            batches.append(drop_broadcast_copies(key_group, step.judgements))

    if origin.snapshot is not None:
        for rows in _tied(home, origin):
            fold(pack(rows, len(groups), pieces[0].first_ms), origin.newest_ms)
    slices = slices_of([piece for piece in pieces if piece.last_ms > origin.newest_ms])
    slices = [each for each in slices if each.since_ms <= newest_ms]
    for each in slices:
        until_ms = newest_ms + 1 if each.until_ms is None else min(each.until_ms, newest_ms + 1)
        selected = replace(each, since_ms=max(each.since_ms, origin.newest_ms + 1), until_ms=until_ms)
        fold(blocks_of(selected, len(groups), pieces[0].first_ms), min(each.newest_ms, newest_ms))
        progress(partial(progress_line, each, len(slices)))
    fold(None, newest_ms)
    devices = [
        snapshot_rows(key_group, group.to_bytes(), chunks[key_group], newest_ms, deployment)[0]
        for key_group, group in enumerate(groups)
    ]
    judgements = pa.Table.from_batches(batches)
    defined = tables.from_columns(
        JUDGEMENTS, dict(zip(judgements.column_names, judgements.columns, strict=True)), judgements.num_rows
    )
    return defined, pa.Table.from_batches(devices)


def _time_alone(key_groups: int) -> Iterator[tuple[int, tuple[pa.RecordBatch, list[Any]]]]:
    return ((number, (NO_SIGNALS, [])) for number in range(key_groups))


def _restored_groups(home: Home, origin: Origin, first_ms: int) -> tuple[list[KeyGroup], list[dict[int, bytes]]]:
    """Return the key groups at the origin, and the pending chunks of each by number."""
    if origin.snapshot is None:
        groups = [KeyGroup(Shards.begin(first_ms)) for _ in range(home.key_groups())]
        return groups, [{} for _ in groups]
    rows = f"SELECT * FROM {DEVICE_SNAPSHOTS.name} WHERE"
    heads = rows_of_snapshot(home, origin.snapshot, f"{rows} part = '{GROUP}'")
    shared_sql = f"{rows} part = '{OWN_ROW}' AND device_id = '{EVERYONE}' AND key_group = 0"  # equal in all groups
    shared = shared_rows(rows_of_snapshot(home, origin.snapshot, shared_sql)["content"].to_pylist())
    context = shared_context(heads["content"].to_pylist())
    restored: list[KeyGroup] = []
    chunks: list[dict[int, bytes]] = []
    for number in range(origin.snapshot.key_groups):
        group_rows = rows_of_snapshot(
            home, origin.snapshot, f"{rows} key_group = ? AND part NOT IN ('{GROUP}', '{PENDING}')", [number]
        )
        [group] = restore_group(number, group_rows, shared, context, home.deployment(), STORED_FORM).to_pylist()
        restored.append(KeyGroup.from_bytes(group["block"]))
        chunks.append({chunk["number"]: chunk["rows"] for chunk in group["chunks"]})
    return restored, chunks


def _tied(home: Home, origin: Origin) -> Iterator[pa.Table]:
    """Yield the rows that a snapshot lacks although they have the instant of its newest row."""
    assert origin.snapshot is not None, "the caller checks it"
    for path in files_beside(home, origin.snapshot.bronze, origin.newest_ms):
        rows = read_bronze(str(Path(path)))
        received = pc.divide(rows["received_at"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
        if (found := rows.filter(pc.equal(received, origin.newest_ms))).num_rows:
            yield found.combine_chunks()
