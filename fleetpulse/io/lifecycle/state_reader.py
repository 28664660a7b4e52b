"""The lifecycle job's state as a table, read through Spark's own reader: of a stopped job, or beside a running one.

Rule: one batch is named, and all is read as it was after it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from fleetpulse.columnar.codec.world_json import world_from_plain
from fleetpulse.columnar.snapshot.rows import SNAPSHOT_SCHEMA, head_of, taken
from fleetpulse.columnar.snapshot.shuffle import PARCEL_SCHEMA, parcels, whole
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.snapshots import files_of

VARIABLES: Final = ("group", "waiting", "digests")
_SQL: Final = {
    pa.string(): "string",
    pa.int64(): "long",
    pa.int32(): "int",
    pa.binary(): "binary",
    pa.timestamp("us", tz="UTC"): "timestamp",
}
SNAPSHOT_COLUMNS: Final = ", ".join(f"{field.name} {_SQL[field.type]}" for field in SNAPSHOT_SCHEMA)
PARCELS: Final = ", ".join(f"{field.name} {_SQL[field.type]}" for field in PARCEL_SCHEMA)


_PART: Final = re.compile(r"/part=(\w+)/[^/]+$")
_HEADS_SCHEMA: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("key_group", pa.int32()),
        ("block_bytes", pa.int64()),
        ("waiting_bytes", pa.int64()),
        ("timer", pa.int64()),
        ("head", pa.string()),
    ]
)


def _reader(spark: SparkSession, checkpoint: Path, batch: int) -> Any:
    return spark.read.format("statestore").option("path", str(checkpoint)).option("batchId", batch)


def state_rows(spark: SparkSession, checkpoint: Path, batch: int, variable: str) -> DataFrame:
    """Return one state variable after a batch, as Spark's reader has it."""
    return _reader(spark, checkpoint, batch).option("stateVarName", variable).load()


def timers(spark: SparkSession, checkpoint: Path, batch: int) -> DataFrame:
    """Return the timers that stood after a batch, as Spark's reader has them."""
    return _reader(spark, checkpoint, batch).option("readRegisteredTimers", True).load()


def key_groups(spark: SparkSession, checkpoint: Path, batch: int) -> DataFrame:
    """Return the key groups after a batch: partition, key_group, block, and chunks of what waits (number, rows)."""
    groups = state_rows(spark, checkpoint, batch, "group")
    groups = groups.select(F.col("partition_id").alias("partition"), "key.key_group", "value.block", "value.timer")
    waiting = state_rows(spark, checkpoint, batch, "waiting")
    chunk = F.struct(F.col("user_map_key.number").alias("number"), F.col("user_map_value.rows").alias("rows"))
    waiting = waiting.groupBy("key.key_group").agg(F.collect_list(chunk).alias("chunks"))
    return groups.join(waiting, "key_group", "left").select("partition", "key_group", "block", "timer", "chunks")


@dataclass(frozen=True, slots=True)
class GroupStand:
    """A key group without its devices: what is written at the head of its stored form.

    Attributes:
        partition: of the state.
        key_group: its number.
        form: version of its stored form.
        block_bytes: size of its devices.
        waiting_bytes: size of what waits.
        devices: how many.
        modes: devices by mode, as last said.
        waiting: messages whose time has not come.
        timer_ms: when its timer stands, epoch milliseconds.
        world: coverage, frontier and policies, see `columnar.standing`.
    """

    partition: int
    key_group: int
    form: int
    block_bytes: int
    waiting_bytes: int
    devices: int
    modes: Mapping[str, int]
    waiting: int
    timer_ms: int | None
    world: Mapping[str, Any]


_HEADS: Final = "partition int, key_group int, block_bytes long, waiting_bytes long, timer long, head string"


def overview(spark: SparkSession, checkpoint: Path, batch: int) -> list[GroupStand]:
    """Return what the key groups are like after a batch, by number, without reading their devices."""
    found = key_groups(spark, checkpoint, batch).mapInArrow(_heads, _HEADS).collect()
    groups: list[GroupStand] = []
    for one in sorted(found, key=lambda row: row.key_group):
        known = json.loads(one.head)
        waiting = sum(chunk[3] for chunk in known["waiting"]["chunks"])
        modes = json.loads(known["counts"] or "{}")
        groups.append(
            GroupStand(
                one.partition,
                one.key_group,
                known["version"],
                one.block_bytes,
                one.waiting_bytes,
                known["count"],
                modes,
                waiting,
                one.timer,
                known,
            )
        )
    return groups


def frontier_of(groups: Sequence[GroupStand], newest_ms: int | None, deployment: Deployment) -> int | None:
    """Return the frontier up to which is judged once all groups have come to the newest row, epoch milliseconds."""
    if newest_ms is None or not groups:
        return None
    return world_from_plain(groups[0].world)[0].read(newest_ms, deployment.allowed_lateness_ms).frontier_ms


def _heads(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = batch.to_pylist()
        columns = {
            "partition": [one["partition"] for one in rows],
            "key_group": [one["key_group"] for one in rows],
            "block_bytes": [len(one["block"]) for one in rows],
            "waiting_bytes": [sum(len(chunk["rows"]) for chunk in one["chunks"] or ()) for one in rows],
            "timer": [one["timer"] for one in rows],
            "head": [json.dumps(head_of(one["block"])) for one in rows],
        }
        yield pa.RecordBatch.from_pydict(columns, schema=_HEADS_SCHEMA)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a snapshot, to be looked into or to be carried.

    Attributes:
        each: a row each, columns of `DEVICE_SNAPSHOTS`; the JVM makes rows of its own of them.
        parcels: gives them by key group, see `columnar.parcels.parcels`; the JVM only carries bytes.
    """

    each: DataFrame
    parcels: Callable[[int | None], DataFrame]


def state_as_rows(spark: SparkSession, checkpoint: Path, stand: CheckpointPosition, deployment: Deployment) -> Rows:
    """Return the state as the rows of a snapshot.

    Args:
        spark: the session.
        checkpoint: of the job.
        stand: the batch, see `checkpoint.stand`.
        deployment: lateness, clock lead and jitter.
    """
    groups = key_groups(spark, checkpoint, stand.batch).select("key_group", "block", "chunks")
    take = _taker(stand.newest_ms or 0, deployment)

    def carried(places: int | None) -> DataFrame:
        return groups.mapInArrow(lambda batches: parcels(take(batches), places), PARCELS)

    return Rows(groups.mapInArrow(take, SNAPSHOT_COLUMNS), carried)


def rows_as_given(rows: DataFrame) -> Rows:
    """Return rows of a snapshot that were read or chosen."""

    def carried(places: int | None) -> DataFrame:
        return rows.select(SNAPSHOT_SCHEMA.names).mapInArrow(lambda batches: parcels(batches, places), PARCELS)

    return Rows(rows, carried)


def read_snapshot(spark: SparkSession, home: Home, version: int) -> Rows:
    """Return a snapshot's rows.

    Raises:
        FleetError: its files are gone.
    """
    path = home.table(DEVICE_SNAPSHOTS.name)
    try:
        rows = spark.read.format("delta").option("versionAsOf", version).load(str(path)).select(SNAPSHOT_SCHEMA.names)
        rows.limit(1).collect()
        files = [str(file) for file in files_of(path, version)]
    except (PySparkException, DeltaError) as error:
        raise _unreadable(home, version, _fault_of(home, version, str(error)) or str(error)) from None

    def carried(places: int | None) -> DataFrame:
        numbers = spark.range(0, len(files), 1, max(len(files), 1))
        return numbers.mapInArrow(lambda batches: parcels(_read(files, batches), places), PARCELS)

    return Rows(rows, carried)


@contextmanager
def reporting_corruption_of_snapshot(home: Home, version: int) -> Iterator[None]:
    """Do something with a snapshot's rows; where it fails and the snapshot's files are damaged, the error says that.

    The files are looked through only then: to read a snapshot twice each time would cost more than all else that is planned.

    Args:
        home: the home.
        version: of the snapshot.

    Raises:
        FleetError: a file of the snapshot cannot be read.
    """
    try:
        yield
    except (PySparkException, Py4JError, FleetError) as error:
        failed = error.__cause__ if isinstance(error, FleetError) else error
        by_spark = isinstance(failed, (PySparkException, Py4JError))
        if not by_spark or (fault := _fault_of(home, version, str(failed))) is None:
            raise
        raise _unreadable(home, version, fault) from error


def _unreadable(home: Home, version: int, why: str) -> FleetError:
    return FleetError(
        f"snapshot version {version} cannot be read: {why.splitlines()[0][:300]}; name another with --version; "
        f"./fleet state snapshots --home {home.path} lists them",
        code="snapshot-unreadable",
    )


def _fault_of(home: Home, version: int, told: str) -> str | None:
    """Read all of a snapshot's files, and return what is wrong with the first that is damaged; None where all are whole.

    One that Spark names in what it ``told`` is damaged, though it can be read here: Spark compares checksums as well.
    """
    path: Path | None = None
    try:
        for path in files_of(home.table(DEVICE_SNAPSHOTS.name), version):
            if path.name in told:
                return told
            with pq.ParquetFile(path) as file:
                for _ in file.iter_batches(use_threads=False):
                    pass
    except (OSError, pa.ArrowException, DeltaError) as error:
        return str(error) if path is None else f"file {path.name}: {error}"
    return None


def _read(files: list[str], numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read a snapshot's files by their numbers; each lies in the folder of its part, and may not say it again."""
    for number in (one for batch in numbers for one in batch["id"].to_pylist()):
        path = files[number]
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            part = _PART.search(path)
            for batch in file.iter_batches(use_threads=False):
                if "part" not in batch.schema.names and part is not None:
                    batch = batch.append_column("part", pa.repeat(pa.scalar(part[1]), batch.num_rows))
                yield whole(batch)


def _taker(newest_ms: int, deployment: Deployment) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for one in range(batch.num_rows):
                chunks = {chunk["number"]: chunk["rows"] for chunk in batch["chunks"][one].as_py() or ()}
                yield from taken(batch["key_group"][one].as_py(), batch["block"][one].as_py(), chunks, newest_ms, deployment)

    return take
