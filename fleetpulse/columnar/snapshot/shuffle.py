"""Repartitioning of snapshot rows by key group, for the bootstrap of a generation.

Rule 1: rows of a key group are sent as parcels, which are opaque bytes, so the shuffle moves few
rows. One pass over the rows computes parcels and fingerprint.
Rule 2: rows that all groups share and pending judgements are sent beside the parcels, never in
them.
Rule 3: rows are buffered until there are enough to partition; they are never all in memory.
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
from fleetpulse.columnar.jit.context import Int64s
from fleetpulse.columnar.snapshot.checksum import Fingerprint, added, fingerprint
from fleetpulse.columnar.snapshot.rows import GROUP, OWN_ROW, PENDING, SNAPSHOT_SCHEMA, shared_context
from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import EVERYONE

SUMS: Final = "sums"  # part of the row with the fingerprints as JSON; not a part of a snapshot
PARCEL_SCHEMA: Final = pa.schema(
    [
        ("place", pa.int32()),  # key group of a parcel; of another row, the key group in the snapshot
        ("rows", pa.binary()),  # rows of a parcel; null in another row
        ("part", pa.string()),  # null in a parcel; of another row, the part of the snapshot, or `SUMS`
        ("content", pa.string()),  # null in a parcel; of another row, its JSON content
    ]
)
ENOUGH: Final = 100_000
_UNPARTITIONED_PARTS: Final = pa.array([GROUP, PENDING], pa.string())


def partition_rows(batches: Iterable[pa.RecordBatch], key_groups: int | None, enough: int = ENOUGH) -> Iterator[pa.RecordBatch]:
    """Partition rows by their new key group, and compute their fingerprint.

    Args:
        batches: columns of `SNAPSHOT_SCHEMA`.
        key_groups: new number of key groups; None computes the fingerprint only.
        enough: number of rows to buffer before they are partitioned.

    Returns:
        Batches of `PARCEL_SCHEMA`.
    """
    gathered: list[pa.RecordBatch] = []
    sums: Fingerprint = {}
    for batch in batches:
        is_beside = _is_unpartitioned(batch)
        yield from _unpartitioned(batch.filter(is_beside))
        rows = batch.filter(pc.invert(is_beside)) if pc.any(is_beside).as_py() else batch
        sums = added((sums, fingerprint(rows)))
        if key_groups is None or not rows.num_rows:
            continue
        places = rows["device_hash"].to_numpy() % key_groups
        if (places == places[0]).all():  # always so if the number of key groups is unchanged
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
    """Return the rows of parcels as a table of `SNAPSHOT_SCHEMA`."""
    return pa.Table.from_batches([whole(from_bytes(one)) for one in parcels], SNAPSHOT_SCHEMA)


def whole(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with all columns of `SNAPSHOT_SCHEMA`; missing columns are null."""
    present = set(rows.schema.names)
    columns = [
        rows[field.name].cast(field.type) if field.name in present else pa.nulls(rows.num_rows, field.type)
        for field in SNAPSHOT_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SNAPSHOT_SCHEMA)


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """Facts about a snapshot as a whole.

    Attributes:
        sums: fingerprint of the devices and of their pending rows.
        context: coverage, frontiers and policies, see `rows.shared_context`.
        waiting: rows that are pending in every key group, as JSON, in order.
        pending: judgements that are not emitted yet, as JSON.
    """

    sums: Fingerprint
    context: str
    waiting: tuple[str, ...]
    pending: tuple[str, ...]


def collect_facts(rows: Iterable[tuple[int | None, str, str]]) -> SnapshotFacts:
    """Combine the rows that were sent beside the parcels.

    Args:
        rows: place, part and content of each such row.

    Raises:
        FleetError: the groups differ in coverage, frontiers or policies, or in the rows that are
            pending in every group.
    """
    known = list(rows)
    sums = added({part: (count, hashes) for part, (count, hashes) in json.loads(content).items()}
                 for _, part, content in known if part == SUMS)  # fmt: skip
    pending = [content for _, part, content in known if part == PENDING]
    return SnapshotFacts(
        sums, shared_context(content for _, part, content in known if part == GROUP), _of_all(known), tuple(pending)
    )


def _of_all(facts: Sequence[tuple[int | None, str, str]]) -> tuple[str, ...]:
    """Return the rows that are pending in every key group, as JSON, in order.

    Raises:
        FleetError: the rows are not the same in all groups.
    """
    waiting: dict[int | None, list[str]] = {place: [] for place, part, _ in facts if part == GROUP}
    for place, part, content in facts:
        if part == OWN_ROW:
            waiting.setdefault(place, []).append(content)
    different = {tuple(sorted(rows)) for rows in waiting.values()}
    if len(different) != 1:
        raise FleetError(
            f"rows that concern all devices must be pending in every key group of a snapshot; got {len(different)} different "
            f"sets of them; the snapshot is damaged or mixed from several: use another snapshot",
            code="snapshot-damaged",
        )
    return different.pop()


def _is_unpartitioned(batch: pa.RecordBatch) -> pa.BooleanArray:
    of_all = pc.and_(pc.equal(batch["part"], OWN_ROW), pc.equal(batch["device_id"], EVERYONE))
    return pc.or_(pc.is_in(batch["part"], value_set=_UNPARTITIONED_PARTS), of_all)


def _unpartitioned(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if rows.num_rows:
        yield _batch(rows["key_group"], [None] * rows.num_rows, rows["part"], rows["content"])


def _divided(gathered: list[pa.RecordBatch], key_groups: int) -> Iterator[pa.RecordBatch]:
    rows = pa.concat_batches(gathered)
    places: Int64s = rows["device_hash"].to_numpy() % key_groups
    order = np.argsort(places, kind="stable")
    rows, places = rows.take(pa.array(order)), places[order]
    edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
    for start, end in pairwise(edges):
        yield _parcel(int(places[start]), rows.slice(start, end - start))


def _parcel(place: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a parcel, without the columns that are entirely null."""
    used = [name for name in rows.schema.names if rows[name].null_count < rows.num_rows]
    return _batch([place], [to_bytes(rows.select(used))], [None], [None])


def _batch(*columns: Any) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) if isinstance(column, list) else column.cast(field.type)
              for column, field in zip(columns, PARCEL_SCHEMA, strict=True)]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=PARCEL_SCHEMA)
