"""Devices from a list, as the rows of a snapshot: what a generation begins with that has heard none of them yet."""

import json
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from fleetpulse.columnar.codec.world_json import world_from_plain
from fleetpulse.columnar.snapshot.bootstrap import seeds, sound
from fleetpulse.columnar.snapshot.rows import DEVICE, GROUP, taken, the_world
from fleetpulse.core.device import EvaluationContext
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.io.lifecycle.state_reader import SNAPSHOT_COLUMNS

_DEVICES_A_PIECE: Final = 8_000


def devices_at(listed: Callable[[int | None], pa.Table], frontier_ms: int | None) -> pa.Table:
    """Return the devices of a list, where a generation can begin with them.

    Args:
        listed: returns columns of `columnar.seeds.REGISTERED_SCHEMA` as they are at a frontier.
        frontier_ms: up to which they are judged, epoch milliseconds.

    Raises:
        FleetError: there are none, or the list has faults, see `columnar.seeds`.
    """
    devices = listed(frontier_ms)
    if not len(devices):
        raise FleetError(
            "a generation begins with the devices of a list; got a list without any; nothing has changed", code="list-empty"
        )
    return sound(devices, frontier_ms)


def rows_of_devices(
    spark: SparkSession,
    state: DataFrame,
    listed: Callable[[int | None], pa.Table],
    known: EvaluationContext,
    deployment: Deployment,
) -> DataFrame:
    """Return the rows of a snapshot with other devices: what waits, gaps and policies stay.

    Their lives begin right behind the frontier, so that no number is given again that was given in a life before; silence
    counts from their registration on.

    Args:
        spark: the session.
        state: rows of a snapshot.
        listed: see `devices_at`.
        known: when we listened, and all policies, from the first row on: what the state knows of them begins at its frontier.
        deployment: lateness, clock lead and jitter.

    Raises:
        FleetError: see `devices_at`.
    """
    world = the_world(row.content for row in state.filter(F.col("part") == GROUP).select("content").collect())
    shards, kept = world_from_plain(json.loads(world))
    devices = devices_at(listed, shards.least_frontier_ms)
    frontier_ms = shards.frontier_ms
    assert frontier_ms is not None, "a list is refused before the first row"
    pieces = seeds(devices, shards.covering(known.shards), kept.with_past(known.policies), 1 + len(devices) // _DEVICES_A_PIECE)
    blocks = spark.createDataFrame(pieces.select(["key_group", "block"]))
    rows = blocks.mapInArrow(_taker(shards.newest_ms, deployment), SNAPSHOT_COLUMNS).filter(F.col("part") == DEVICE)
    rows = rows.withColumn("life", F.timestamp_millis(F.lit(frontier_ms + 1)))
    return state.filter(F.col("part") != DEVICE).unionByName(rows)


def _taker(newest_ms: int, deployment: Deployment) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for group, block in zip(batch["key_group"].to_pylist(), batch["block"].to_pylist(), strict=True):
                yield from taken(group, block, {}, newest_ms, deployment)

    return take
