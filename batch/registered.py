"""Devices from a list, as the rows of a snapshot: what a generation begins with that has heard none of them yet."""

import json
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from fleetpulse.columnar.seeds import seeds
from fleetpulse.columnar.snapshots import DEVICE, GROUP, taken, the_world
from fleetpulse.columnar.standing import world_from_plain
from fleetpulse.core.replay import Deployment
from fleetpulse.io.stored_state import SNAPSHOT_COLUMNS

_DEVICES_A_PIECE: Final = 8_000


def rows_of_devices(spark: SparkSession, state: DataFrame, listed: pa.Table, deployment: Deployment) -> DataFrame:
    """Return the rows of a snapshot with other devices: what waits, gaps and policies stay.

    Args:
        spark: the session.
        state: rows of a snapshot.
        listed: columns of `columnar.seeds.REGISTERED_SCHEMA`.
        deployment: lateness, clock lead and jitter.

    Raises:
        FleetError: the list has faults, see `columnar.seeds`.
    """
    world = the_world(row.content for row in state.filter(F.col("part") == GROUP).select("content").collect())
    listening, policies = world_from_plain(json.loads(world))
    pieces = seeds(listed, listening, policies, 1 + len(listed) // _DEVICES_A_PIECE)
    devices = spark.createDataFrame(pieces.select(["key_group", "block"])).mapInArrow(
        _taker(listening.newest_ms, deployment), SNAPSHOT_COLUMNS
    )
    return state.filter(F.col("part") != DEVICE).unionByName(devices.filter(F.col("part") == DEVICE))


def _taker(newest_ms: int, deployment: Deployment) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for group, block in zip(batch["key_group"].to_pylist(), batch["block"].to_pylist(), strict=True):
                yield from taken(group, block, {}, newest_ms, deployment)

    return take
