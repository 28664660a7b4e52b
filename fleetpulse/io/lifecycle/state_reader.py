"""State of the lifecycle job as tables, through Spark's state data source.

The job may be stopped or running.

Rule: every read names one batch and returns the state after that batch.
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

from fleetpulse.columnar.codec.context_json import context_from_plain
from fleetpulse.columnar.snapshot.rows import SNAPSHOT_SCHEMA, head_of, snapshot_rows
from fleetpulse.columnar.snapshot.shuffle import PARCEL_SCHEMA, partition_rows, whole
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
    """Return a state variable after a batch, in the columns of Spark's state reader."""
    return _reader(spark, checkpoint, batch).option("stateVarName", variable).load()


def timers(spark: SparkSession, checkpoint: Path, batch: int) -> DataFrame:
    """Return the registered timers after a batch, in the columns of Spark's reader."""
    return _reader(spark, checkpoint, batch).option("readRegisteredTimers", True).load()


def key_groups(spark: SparkSession, checkpoint: Path, batch: int) -> DataFrame:
    """Return the key groups after a batch, with their chunks of pending rows.

    The columns are partition, key_group, block, timer and chunks (number, rows).
    """
    groups = state_rows(spark, checkpoint, batch, "group")
    groups = groups.select(F.col("partition_id").alias("partition"), "key.key_group", "value.block", "value.timer")
    waiting = state_rows(spark, checkpoint, batch, "waiting")
    chunk = F.struct(F.col("user_map_key.number").alias("number"), F.col("user_map_value.rows").alias("rows"))
    waiting = waiting.groupBy("key.key_group").agg(F.collect_list(chunk).alias("chunks"))
    return groups.join(waiting, "key_group", "left").select("partition", "key_group", "block", "timer", "chunks")


@dataclass(frozen=True, slots=True)
class KeyGroupOverview:
    """Overview of a key group, from the header of its stored form.

    Attributes:
        partition: partition of the state.
        key_group: number of the key group.
        form: format version of the stored form.
        block_bytes: size of the devices in bytes.
        waiting_bytes: size of the pending rows in bytes.
        devices: number of devices.
        modes: number of devices by mode, as last emitted in a summary.
        waiting: number of pending messages.
        timer_ms: time of the registered timer, epoch milliseconds; None without a timer.
        context: coverage, frontier and policies, see `columnar.codec.context_json`.
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
    context: Mapping[str, Any]


_HEADS: Final = "partition int, key_group int, block_bytes long, waiting_bytes long, timer long, head string"


def overview(spark: SparkSession, checkpoint: Path, batch: int) -> list[KeyGroupOverview]:
    """Return an overview of each key group after a batch, ordered by number.

    The devices are not decoded.
    """
    found = key_groups(spark, checkpoint, batch).mapInArrow(_heads, _HEADS).collect()
    groups: list[KeyGroupOverview] = []
    for one in sorted(found, key=lambda row: row.key_group):
        known = json.loads(one.head)
        waiting = sum(chunk[3] for chunk in known["waiting"]["chunks"])
        modes = json.loads(known["counts"] or "{}")
        groups.append(
            KeyGroupOverview(
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


def frontier_of(groups: Sequence[KeyGroupOverview], newest_ms: int | None, deployment: Deployment) -> int | None:
    """Return the frontier after all groups judged the newest row, epoch milliseconds."""
    if newest_ms is None or not groups:
        return None
    return context_from_plain(groups[0].context)[0].read(newest_ms, deployment.allowed_lateness_ms).frontier_ms


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
class SnapshotRows:
    """Rows of a snapshot, as a DataFrame to query or as bytes to shuffle.

    Attributes:
        each: DataFrame with the columns of `DEVICE_SNAPSHOTS`, which the JVM decodes row by row.
        parcels: function that returns the rows as bytes by key group, which the JVM does not
            decode, see `columnar.snapshot.shuffle.partition_rows`.
    """

    each: DataFrame
    parcels: Callable[[int | None], DataFrame]


def state_as_rows(spark: SparkSession, checkpoint: Path, position: CheckpointPosition, deployment: Deployment) -> SnapshotRows:
    """Return the state as the rows of a snapshot.

    Args:
        spark: Spark session.
        checkpoint: checkpoint of the job.
        position: position of the checkpoint after the batch, see `checkpoint.position_after`.
        deployment: allowed lateness, clock lead and jitter.
    """
    groups = key_groups(spark, checkpoint, position.batch).select("key_group", "block", "chunks")
    take = _snapshot_mapper(position.newest_ms or 0, deployment)

    def carried(places: int | None) -> DataFrame:
        return groups.mapInArrow(lambda batches: partition_rows(take(batches), places), PARCELS)

    return SnapshotRows(groups.mapInArrow(take, SNAPSHOT_COLUMNS), carried)


def rows_as_given(rows: DataFrame) -> SnapshotRows:
    """Wrap a DataFrame of snapshot rows as `SnapshotRows`."""

    def carried(places: int | None) -> DataFrame:
        return rows.select(SNAPSHOT_SCHEMA.names).mapInArrow(lambda batches: partition_rows(batches, places), PARCELS)

    return SnapshotRows(rows, carried)


def read_snapshot(spark: SparkSession, home: Home, version: int) -> SnapshotRows:
    """Return the rows of a snapshot.

    Raises:
        FleetError: the snapshot cannot be read, for example because its files are missing.
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
        return numbers.mapInArrow(lambda batches: partition_rows(_read(files, batches), places), PARCELS)

    return SnapshotRows(rows, carried)


@contextmanager
def reporting_corruption_of_snapshot(home: Home, version: int) -> Iterator[None]:
    """Replace an error in the context by one that names a damaged snapshot file.

    The files are checked only after an error, because reading each snapshot twice would cost more
    than the rest of the operation.

    Args:
        home: home of the snapshot.
        version: version of the snapshot.

    Raises:
        FleetError: a file of the snapshot is damaged.
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
        f"list the snapshots with: ./fleet state snapshots --home {home.path}",
        code="snapshot-unreadable",
    )


def _fault_of(home: Home, version: int, error_text: str) -> str | None:
    """Return the error of the first damaged file of a snapshot; None without one.

    A file that Spark names in its error ``error_text`` counts as damaged even if it can be read here,
    because Spark also compares checksums.
    """
    path: Path | None = None
    try:
        for path in files_of(home.table(DEVICE_SNAPSHOTS.name), version):
            if path.name in error_text:
                return error_text
            with pq.ParquetFile(path) as file:
                for _ in file.iter_batches(use_threads=False):
                    pass
    except (OSError, pa.ArrowException, DeltaError) as error:
        return str(error) if path is None else f"file {path.name}: {error}"
    return None


def _read(files: list[str], numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read the snapshot files that are selected by their indexes in ``files``.

    A file without the column ``part`` gets it from the name of its folder.
    """
    for number in (one for batch in numbers for one in batch["id"].to_pylist()):
        path = files[number]
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            part = _PART.search(path)
            for batch in file.iter_batches(use_threads=False):
                if "part" not in batch.schema.names and part is not None:
                    batch = batch.append_column("part", pa.repeat(pa.scalar(part[1]), batch.num_rows))
                yield whole(batch)


def _snapshot_mapper(newest_ms: int, deployment: Deployment) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for one in range(batch.num_rows):
                chunks = {chunk["number"]: chunk["rows"] for chunk in batch["chunks"][one].as_py() or ()}
                yield from snapshot_rows(
                    batch["key_group"][one].as_py(), batch["block"][one].as_py(), chunks, newest_ms, deployment
                )

    return take
