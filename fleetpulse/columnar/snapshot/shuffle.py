"""The rows of a snapshot on their way into a generation: parcels of rows by key group, and beside them what is said of all.

Rule 1: a parcel is bytes: who carries it sees few, and no row; one pass over the rows gives parcels and fingerprint.
Rule 2: what all groups share, and what is pending, is told beside the parcels, and is in none.
Rule 3: rows are gathered until there are enough of them to be divided; never are all in memory.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.codec.arrow import from_bytes, to_bytes
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.jit.world import Int64s
from fleetpulse.columnar.snapshot.checksum import Fingerprint, added, fingerprint
from fleetpulse.columnar.snapshot.rows import GROUP, OWN_ROW, PENDING, SNAPSHOT_SCHEMA, the_world
from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import EVERYONE

SUMS: Final = "sums"  # beside the parts of a snapshot: fingerprints, as JSON
PARCEL_SCHEMA: Final = pa.schema(
    [
        ("place", pa.int32()),  # of a parcel: its key group; otherwise the one that it was in
        ("rows", pa.binary()),  # of a parcel
        ("part", pa.string()),  # of what is told beside: the part of the snapshot, or `SUMS`
        ("content", pa.string()),  # likewise
    ]
)
ENOUGH: Final = 100_000
_BESIDE: Final = pa.array([GROUP, PENDING], pa.string())


def parcels(batches: Iterable[pa.RecordBatch], key_groups: int | None, enough: int = ENOUGH) -> Iterator[pa.RecordBatch]:
    """Divide rows by the key group that they will be in, and sum them up.

    Args:
        batches: columns of `SNAPSHOT_SCHEMA`.
        key_groups: how many there will be; None makes no parcels, and only sums up.
        enough: how many rows are gathered before they are divided.

    Returns:
        Batches of `PARCEL_SCHEMA`.
    """
    gathered: list[pa.RecordBatch] = []
    sums: Fingerprint = {}
    for batch in batches:
        beside = _is_beside(batch)
        yield from _told(batch.filter(beside))
        rows = batch.filter(pc.invert(beside)) if pc.any(beside).as_py() else batch
        sums = added((sums, fingerprint(rows)))
        if key_groups is None or not rows.num_rows:
            continue
        places = rows["device_hash"].to_numpy() % key_groups
        if (places == places[0]).all():  # as a group's rows are that stays what it was
            yield _parcel(int(places[0]), rows)
            continue
        gathered.append(rows)
        if sum(one.num_rows for one in gathered) >= enough:
            yield from _divided(gathered, key_groups)
            gathered = []
    if key_groups is not None and gathered:
        yield from _divided(gathered, key_groups)
    yield _batch([None], [None], [SUMS], [json.dumps(sums)])


def rows_of(parcels: Iterable[bytes]) -> pa.Table:
    """Return the rows of some parcels: columns of `SNAPSHOT_SCHEMA`."""
    return pa.Table.from_batches([whole(from_bytes(one)) for one in parcels], SNAPSHOT_SCHEMA)


def whole(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return some columns of `SNAPSHOT_SCHEMA` as all of them: what is not there is null."""
    there = set(rows.schema.names)
    columns = [
        rows[field.name].cast(field.type) if field.name in there else pa.nulls(rows.num_rows, field.type)
        for field in SNAPSHOT_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SNAPSHOT_SCHEMA)


@dataclass(frozen=True, slots=True)
class Account:
    """What is said of the rows of a snapshot as a whole.

    Attributes:
        sums: fingerprint of devices, and of all that waits for one of them.
        world: coverage, frontier and policies, see `rows.the_world`.
        waiting: what waits in every key group, as JSON, in order.
        pending: what is judged and to be said, as JSON.
    """

    sums: Fingerprint
    world: str
    waiting: tuple[str, ...]
    pending: tuple[str, ...]


def account(told: Iterable[tuple[int | None, str, str]]) -> Account:
    """Return what is told of rows beside the parcels.

    Args:
        told: place, part and content of what has no rows.

    Raises:
        FleetError: the groups have not come equally far, or what waits in every one of them is not the same.
    """
    known = list(told)
    sums = added({part: (count, hashes) for part, (count, hashes) in json.loads(content).items()}
                 for _, part, content in known if part == SUMS)  # fmt: skip
    pending = [content for _, part, content in known if part == PENDING]
    return Account(sums, the_world(content for _, part, content in known if part == GROUP), _of_all(known), tuple(pending))


def _of_all(told: Sequence[tuple[int | None, str, str]]) -> tuple[str, ...]:
    """Return what waits in every key group, as JSON, in order.

    Raises:
        FleetError: it is not the same in all of them.
    """
    waiting: dict[int | None, list[str]] = {place: [] for place, part, _ in told if part == GROUP}
    for place, part, content in told:
        if part == OWN_ROW:
            waiting.setdefault(place, []).append(content)
    different = {tuple(sorted(rows)) for rows in waiting.values()}
    if len(different) != 1:
        raise FleetError(
            f"what concerns everybody waits in every key group of a snapshot alike; got {len(different)} different ones; it is "
            f"damaged, or was put together of several: take another",
            code="snapshot-damaged",
        )
    return different.pop()


def _is_beside(batch: pa.RecordBatch) -> pa.BooleanArray:
    of_all = pc.and_(pc.equal(batch["part"], OWN_ROW), pc.equal(batch["device_id"], EVERYONE))
    return pc.or_(pc.is_in(batch["part"], value_set=_BESIDE), of_all)


def _told(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if rows.num_rows:
        yield _batch(rows["key_group"], [None] * rows.num_rows, rows["part"], rows["content"])


def _divided(gathered: list[pa.RecordBatch], key_groups: int) -> Iterator[pa.RecordBatch]:
    rows = pa.concat_batches(gathered)
    places: Int64s = rows["device_hash"].to_numpy() % key_groups
    order = np.argsort(places, kind="stable")
    rows, places = rows.take(pa.array(order)), places[order]
    edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
    for begin, end in pairwise(edges):
        yield _parcel(int(places[begin]), rows.slice(begin, end - begin))


def _parcel(place: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a parcel, without the columns that say nothing."""
    told = [name for name in rows.schema.names if rows[name].null_count < rows.num_rows]
    return _batch([place], [to_bytes(rows.select(told))], [None], [None])


def _batch(*columns: Any) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) if isinstance(column, list) else column.cast(field.type)
              for column, field in zip(columns, PARCEL_SCHEMA, strict=True)]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=PARCEL_SCHEMA)
