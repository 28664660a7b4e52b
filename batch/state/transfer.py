"""Transfer of snapshot rows into a generation, and comparison of both sides.

Rule 1: the source is read once: one pass packs its rows by key group and computes checksums.
Rule 2: two generations are equal if their checksums and their shared parts are equal. Single rows
are compared only to name the devices that differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from fleetpulse.columnar.snapshot.checksum import Fingerprint
from fleetpulse.columnar.snapshot.rows import COMPARED_PARTS, restore_group, shared_rows
from fleetpulse.columnar.snapshot.shuffle import SnapshotFacts, collect_facts, rows_of
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.generations import Generation
from fleetpulse.io.lifecycle.state_reader import SnapshotRows

_SEEDS: Final = "key_group int, block binary, chunks array<struct<number: bigint, rows: binary>>"
_PLACE: Final = "key_group"  # column that is left out of comparisons
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class TransferredRows:
    """Rows with their checksums, and optionally packed by key group.

    Attributes:
        rows: original rows.
        account: checksums of the rows, and the parts that all key groups share.
        parcels: packed rows, with the columns of `snapshot.shuffle.PARCEL_SCHEMA`; None if only
            checksums were computed.
    """

    rows: SnapshotRows
    account: SnapshotFacts
    parcels: DataFrame | None = None


@contextmanager
def pack_by_key_group(rows: SnapshotRows, key_groups: int) -> Iterator[TransferredRows]:
    """Pack rows by key group and compute checksums.

    The packed rows stay on disk until the context exits.

    Raises:
        FleetError: the key groups of the rows differ in their shared parts.
    """
    parcels = rows.parcels(key_groups).persist(StorageLevel.DISK_ONLY)
    try:
        yield TransferredRows(rows, _facts_of(parcels), parcels)
    finally:
        parcels.unpersist()


def with_checksum(rows: SnapshotRows) -> TransferredRows:
    """Compute the checksums of rows.

    Raises:
        FleetError: the key groups of the rows differ in their shared parts.
    """
    return TransferredRows(rows, _facts_of(rows.parcels(None)))


def _facts_of(parcels: DataFrame) -> SnapshotFacts:
    fact_rows = parcels.filter(F.col("rows").isNull()).select("place", "part", "content").collect()
    return collect_facts((row.place, row.part, row.content) for row in fact_rows)


def build_key_groups(
    spark: SparkSession, packed: TransferredRows, key_groups: int, form: int, deployment: Deployment
) -> DataFrame:
    """Build key groups from packed rows, see `InitialState.groups`.

    Args:
        spark: Spark session.
        packed: rows, packed for `key_groups` key groups.
        key_groups: number of key groups.
        form: stored form to write.
        deployment: allowed lateness, clock lead and jitter.
    """
    assert packed.parcels is not None, "key groups are built from packed rows only"
    context, of_all = packed.account.context, shared_rows(packed.account.waiting)
    rows = packed.parcels.filter(F.col("rows").isNotNull()).select("place", "rows")
    empty = spark.range(key_groups).select(F.col("id").cast("int").alias("place"))

    def restored(key: tuple[pa.Scalar, ...], table: pa.Table) -> pa.Table:
        group_rows = rows_of(table["rows"].drop_null().to_pylist())
        return restore_group(key[0].as_py(), group_rows, of_all, context, deployment, form)

    return rows.unionByName(empty, allowMissingColumns=True).groupBy("place").applyInArrow(restored, _SEEDS)


def compare(before: TransferredRows, after: TransferredRows, generation: Generation) -> None:
    """Check that a new generation has the devices and pending rows of the running one.

    Raises:
        FleetError: the generations differ; the text names some devices that do.
    """
    was, now = before.account, after.account
    if (was.sums, was.context, was.waiting) == (now.sums, now.context, now.waiting):
        return
    lost, more = _only_in(before.rows.each, after.rows.each), _only_in(after.rows.each, before.rows.each)
    raise FleetError(
        f"generation {generation.number} differs from the running one, and is discarded: {_of_all(was, now)}"
        f"{_counted(was.sums)} before, {_counted(now.sums)} after; lost or changed: {', '.join(lost) or 'none'}; "
        f"new or changed: {', '.join(more) or 'none'}; nothing has changed",
        code="generation-differs",
    )


def _of_all(was: SnapshotFacts, now: SnapshotFacts) -> str:
    """Describe differences in the parts that all key groups share; empty if equal."""
    differs = {"frontier, gaps or policies": was.context != now.context, "rows for all devices": was.waiting != now.waiting}
    found = " and ".join(name for name, differing in differs.items() if differing)
    return f"the parts that all key groups share differ ({found}); " if found else ""


def _only_in(rows: DataFrame, others: DataFrame) -> list[str]:
    """Return the ids of some devices with rows that the other rows do not contain."""
    names = [name for name in rows.columns if name != _PLACE]
    of_devices = F.col("part").isin(*COMPARED_PARTS)
    only = rows.filter(of_devices).select(names).exceptAll(others.filter(of_devices).select(names))
    return [row.device_id for row in only.select("device_id").distinct().limit(_SHOWN).collect()]


def _counted(of: Fingerprint) -> str:
    return " and ".join(f"{count:,} {part}s" for part, (count, _) in sorted(of.items())) or "nothing"
