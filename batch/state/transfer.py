"""The rows of a snapshot on their way into a generation, and whether all of them have arrived.

Rule 1: where rows come from is read once: one pass packs them by key group and sums them up.
Rule 2: two generations are the same where their sums are, and what all their groups share; rows are brought together only
to name those that differ.
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
from fleetpulse.columnar.snapshot.rows import COMPARED_PARTS, seed, shared_rows
from fleetpulse.columnar.snapshot.shuffle import Account, account, rows_of
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.generations import Generation
from fleetpulse.io.lifecycle.state_reader import Rows

_SEEDS: Final = "key_group int, block binary, chunks array<struct<number: bigint, rows: binary>>"
_PLACE: Final = "key_group"  # of a row, which is not part of what it says
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class TransferredRows:
    """Rows that were packed, or summed up.

    Attributes:
        rows: as they were.
        account: what is said of all of them.
        parcels: columns of `columnar.parcels.PARCEL_SCHEMA`; None where they were only summed up.
    """

    rows: Rows
    account: Account
    parcels: DataFrame | None = None


@contextmanager
def pack_by_key_group(rows: Rows, key_groups: int) -> Iterator[TransferredRows]:
    """Pack rows by key group and sum them up; the parcels are on the disk as long as it is entered.

    Raises:
        FleetError: the groups that they are of have not come equally far.
    """
    parcels = rows.parcels(key_groups).persist(StorageLevel.DISK_ONLY)
    try:
        yield TransferredRows(rows, _accounted(parcels), parcels)
    finally:
        parcels.unpersist()


def with_checksum(rows: Rows) -> TransferredRows:
    """Sum rows up.

    Raises:
        FleetError: the groups that they are of have not come equally far.
    """
    return TransferredRows(rows, _accounted(rows.parcels(None)))


def _accounted(parcels: DataFrame) -> Account:
    told = parcels.filter(F.col("rows").isNull()).select("place", "part", "content").collect()
    return account((row.place, row.part, row.content) for row in told)


def seeds(spark: SparkSession, given: TransferredRows, key_groups: int, form: int, deployment: Deployment) -> DataFrame:
    """Return the key groups that rows make, see `Begin.groups`.

    Args:
        spark: the session.
        given: the rows, packed for so many key groups.
        key_groups: how many.
        form: the stored form to write.
        deployment: lateness, clock lead and jitter.
    """
    assert given.parcels is not None, "what was only summed up begins nothing"
    world, of_all = given.account.world, shared_rows(given.account.waiting)
    rows = given.parcels.filter(F.col("rows").isNotNull()).select("place", "rows")
    empty = spark.range(key_groups).select(F.col("id").cast("int").alias("place"))

    def grown(key: tuple[pa.Scalar, ...], table: pa.Table) -> pa.Table:
        mine = rows_of(table["rows"].drop_null().to_pylist())
        return seed(key[0].as_py(), mine, of_all, world, deployment, form)

    return rows.unionByName(empty, allowMissingColumns=True).groupBy("place").applyInArrow(grown, _SEEDS)


def compare(before: TransferredRows, after: TransferredRows, made: Generation) -> None:
    """See that a generation that was made says the same of all devices as the one before, and has the same waiting.

    Raises:
        FleetError: it does not; it names some that differ.
    """
    was, now = before.account, after.account
    if (was.sums, was.world, was.waiting) == (now.sums, now.world, now.waiting):
        return
    lost, more = _only_in(before.rows.each, after.rows.each), _only_in(after.rows.each, before.rows.each)
    raise FleetError(
        f"generation {made.number} is not what the running one is, and is discarded: {_of_all(was, now)}"
        f"{_counted(was.sums)} before, {_counted(now.sums)} after; lost or changed: {', '.join(lost) or 'none'}; "
        f"new or changed: {', '.join(more) or 'none'}; nothing has changed",
        code="generation-differs",
    )


def _of_all(was: Account, now: Account) -> str:
    """Say in what two generations differ that all their groups share; nothing where they do not."""
    differs = {"how far it is, gaps or policies": was.world != now.world, "rows for everybody": was.waiting != now.waiting}
    found = " and ".join(name for name, differing in differs.items() if differing)
    return f"it differs in what all key groups share ({found}); " if found else ""


def _only_in(rows: DataFrame, others: DataFrame) -> list[str]:
    """Name some devices of which rows say what others do not."""
    told = [name for name in rows.columns if name != _PLACE]
    of_devices = F.col("part").isin(*COMPARED_PARTS)
    only = rows.filter(of_devices).select(told).exceptAll(others.filter(of_devices).select(told))
    return [row.device_id for row in only.select("device_id").distinct().limit(_SHOWN).collect()]


def _counted(of: Fingerprint) -> str:
    return " and ".join(f"{count:,} {part}s" for part, (count, _) in sorted(of.items())) or "nothing"
