"""Bronze judged again: from its first row, or on from a snapshot where the first rows are gone, or too many.

Rule 1: a snapshot is begun with where bronze has all that was received after it, and where no device has come or gone since by
a choice: some of a snapshot's devices, or a list.
Rule 2: what a look begins with was looked at itself when it was taken; what was said up to there is not said to be right again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from batch.backtest import judged_so_far, unpacked
from batch.common.progress import Paced, Say, silent
from fleetpulse.columnar.codec.arrow import NO_SIGNALS
from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import drop_broadcast_copies
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.rows import GROUP, OWN_ROW, PENDING, seed, shared_rows, taken, the_world
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
from fleetpulse.reports.messages import files_beside
from fleetpulse.reports.replay_origin import removed_below, rows_of_snapshot, whole_behind

MOST_ROWS: Final = 10_000_000  # of bronze that are judged again: some ten minutes of a core


@dataclass(frozen=True, slots=True)
class Origin:
    """Where bronze is judged again from.

    Attributes:
        snapshot: with it; None: with bronze's first row.
    """

    snapshot: SnapshotInfo | None = None

    @property
    def newest_ms(self) -> int:
        """Up to which ``received_at`` nothing is read, epoch milliseconds, but what came after the snapshot in that one."""
        return (self.snapshot.newest_ms or 0) if self.snapshot else 0

    @property
    def frontier_ms(self) -> int:
        """Up to which nothing is judged, epoch milliseconds."""
        return (self.snapshot.frontier_ms or 0) if self.snapshot else 0


def is_whole(home: Home) -> bool:
    """Whether bronze has all that the devices began with.

    Nothing was removed, no state was made of a list of devices, and version 1 has judged nothing of it.
    """
    chosen = _choices(load_generations(home.lifecycle))
    return not chosen and oldest_kept_ms(home, MESSAGES.name) is None and home.judged_by_version_1_ms() is None


def had_work(record: Generations) -> Iterator[Generation]:
    """Yield the generations that said something."""
    return (one for one in record.known.values() if one.status in (CURRENT, RETIRED, PRUNED))


def _choices(record: Generations) -> frozenset[int]:
    return frozenset[int]().union(*(record.choices_in(one.number) for one in had_work(record)))


def origin_of(
    home: Home, through_ms: int, number: int | None = None, but: int | None = None, most_rows: int = MOST_ROWS
) -> Origin | None:
    """Return where what was judged up to an instant can be judged again from.

    The first row of bronze, where no more rows follow than are judged again; else the oldest snapshot of which that is true,
    and in any case none newer than the second newest: what lies behind the newest one may be nothing.

    Args:
        home: the home.
        through_ms: the instant, of ``received_at``, epoch milliseconds.
        number: of the generation that judged; None for the current one.
        but: the version of a snapshot that is itself looked at.
        most_rows: how many are judged again.

    Returns:
        That; None where it cannot be told from any: retention has removed what follows, or some devices were chosen later.
    """
    pieces = [piece for piece in pieces_of(home) if piece.first_ms <= through_ms]
    whole = is_whole(home)
    if whole and _rows_behind(pieces, -1) <= most_rows:
        return Origin()
    record, by_version_1_ms = load_generations(home.lifecycle), home.judged_by_version_1_ms()
    chosen = record.choices_in(record.current if number is None else number)
    known = [
        one.taken
        for one in whole_behind(home, removed_below(home), through_ms)
        if one.taken.version != but
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


def is_there_still(home: Home, origin: Origin) -> bool:
    """Whether nothing was removed meanwhile of what follows an origin."""
    return is_whole(home) if origin.snapshot is None else origin.snapshot.bronze >= removed_below(home)


def judged_again(home: Home, newest_ms: int, origin: Origin, say: Say = silent) -> tuple[pa.Table, pa.Table]:
    """Judge bronze up to a row.

    Args:
        home: the home.
        newest_ms: ``received_at`` of the row.
        origin: from where on.
        say: told every few seconds how far it is.

    Returns:
        Judgements, columns of `JUDGEMENTS`; and devices, columns of `SNAPSHOT_SCHEMA`.

    Raises:
        FleetError: the snapshot, or what followed it, was removed meanwhile.
    """
    deployment, pieces, far = home.deployment(), pieces_of(home), Paced(say)
    groups, chunks = _begun(home, origin, pieces[0].first_ms)
    batches: list[pa.RecordBatch] = []

    def fold(blocks: pa.RecordBatch | None, through_ms: int) -> None:
        packed = zip(blocks["key_group"].to_pylist(), unpacked(blocks), strict=True) if blocks else _time_alone(len(groups))
        for key_group, (signals, others) in packed:
            kept = chunks[key_group]
            step = groups[key_group].fold(signals, others, through_ms, deployment, kept.__getitem__)
            for number in step.gone:
                del kept[number]
            kept.update(step.chunks)
            batches.append(drop_broadcast_copies(key_group, step.judgements))

    if origin.snapshot is not None:
        for rows in _tied(home, origin):
            fold(pack(rows, len(groups), pieces[0].first_ms), origin.newest_ms)
    slices = slices_of([piece for piece in pieces if piece.last_ms > origin.newest_ms])
    slices = [each for each in slices if each.since_ms <= newest_ms]
    for each in slices:
        until_ms = newest_ms + 1 if each.until_ms is None else min(each.until_ms, newest_ms + 1)
        wanted = replace(each, since_ms=max(each.since_ms, origin.newest_ms + 1), until_ms=until_ms)
        fold(blocks_of(wanted, len(groups), pieces[0].first_ms), min(each.newest_ms, newest_ms))
        far(partial(judged_so_far, each, len(slices)))
    fold(None, newest_ms)
    devices = [
        taken(key_group, group.to_bytes(), chunks[key_group], newest_ms, deployment)[0] for key_group, group in enumerate(groups)
    ]
    judgements = pa.Table.from_batches(batches)
    defined = tables.from_columns(
        JUDGEMENTS, dict(zip(judgements.column_names, judgements.columns, strict=True)), judgements.num_rows
    )
    return defined, pa.Table.from_batches(devices)


def _time_alone(key_groups: int) -> Iterator[tuple[int, tuple[pa.RecordBatch, list[Any]]]]:
    return ((number, (NO_SIGNALS, [])) for number in range(key_groups))


def _begun(home: Home, origin: Origin, first_ms: int) -> tuple[list[KeyGroup], list[dict[int, bytes]]]:
    """Return the key groups that are begun with, and what waits in each, by number of the chunk."""
    if origin.snapshot is None:
        groups = [KeyGroup(Shards.begin(first_ms)) for _ in range(home.key_groups())]
        return groups, [{} for _ in groups]
    rows = f"SELECT * FROM {DEVICE_SNAPSHOTS.name} WHERE"
    heads = rows_of_snapshot(home, origin.snapshot, f"{rows} part = '{GROUP}'")
    everybody = f"{rows} part = '{OWN_ROW}' AND device_id = '{EVERYONE}' AND key_group = 0"  # the same in each
    shared = shared_rows(rows_of_snapshot(home, origin.snapshot, everybody)["content"].to_pylist())
    world = the_world(heads["content"].to_pylist())
    begun: list[KeyGroup] = []
    chunks: list[dict[int, bytes]] = []
    for number in range(origin.snapshot.key_groups):
        mine = rows_of_snapshot(home, origin.snapshot, f"{rows} key_group = ? AND part NOT IN ('{GROUP}', '{PENDING}')", [number])
        [made] = seed(number, mine, shared, world, home.deployment(), STORED_FORM).to_pylist()
        begun.append(KeyGroup.from_bytes(made["block"]))
        chunks.append({chunk["number"]: chunk["rows"] for chunk in made["chunks"]})
    return begun, chunks


def _tied(home: Home, origin: Origin) -> Iterator[pa.Table]:
    """Yield what was received in the millisecond of a snapshot's newest row, and after it."""
    assert origin.snapshot is not None, "before the first row there is nothing"
    for path in files_beside(home, origin.snapshot.bronze, origin.newest_ms):
        rows = read_bronze(str(Path(path)))
        received = pc.divide(rows["received_at"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
        if (found := rows.filter(pc.equal(received, origin.newest_ms))).num_rows:
            yield found.combine_chunks()
