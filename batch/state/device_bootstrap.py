"""Snapshot rows for a list of devices, for the bootstrap of a generation."""

import json
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from fleetpulse.columnar.codec.context_json import context_from_plain
from fleetpulse.columnar.snapshot.bootstrap import bootstrap_groups, validated_devices
from fleetpulse.columnar.snapshot.rows import DEVICE, GROUP, shared_context, snapshot_rows
from fleetpulse.core.device import EvaluationContext
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.io.lifecycle.state_reader import SNAPSHOT_COLUMNS

_DEVICES_A_PIECE: Final = 8_000


def devices_at(listed: Callable[[int | None], pa.Table], frontier_ms: int | None) -> pa.Table:
    """Return a list of devices, checked for a bootstrap at a frontier.

    Args:
        listed: function that returns the list at a frontier, with the columns of
            `snapshot.bootstrap.REGISTERED_SCHEMA`.
        frontier_ms: frontier at which the devices are added, epoch milliseconds.

    Raises:
        FleetError: the list is empty, or has faults, see `snapshot.bootstrap.validated_devices`.
    """
    devices = listed(frontier_ms)
    if not len(devices):
        raise FleetError(
            "a bootstrap from a list needs at least one device; the list is empty; nothing has changed", code="list-empty"
        )
    return validated_devices(devices, frontier_ms)


def rows_of_devices(
    spark: SparkSession,
    state: DataFrame,
    listed: Callable[[int | None], pa.Table],
    known: EvaluationContext,
    deployment: Deployment,
) -> DataFrame:
    """Replace the devices of a snapshot; keep pending rows, gaps and policies.

    Each new life starts 1 ms after the frontier, so that no transition number of an earlier life is
    used again. Silence counts from the registration.

    Args:
        spark: Spark session.
        state: rows of a snapshot.
        listed: list of devices, see `devices_at`.
        known: coverage gaps and policies since the first row; the state has them only since its
            frontier.
        deployment: allowed lateness, clock lead and jitter.

    Raises:
        FleetError: see `devices_at`.
    """
    context = shared_context(row.content for row in state.filter(F.col("part") == GROUP).select("content").collect())
    shards, policies = context_from_plain(json.loads(context))
    devices = devices_at(listed, shards.least_frontier_ms)
    frontier_ms = shards.frontier_ms
    assert frontier_ms is not None, "devices_at refuses a list without a frontier"
    pieces = bootstrap_groups(
        devices, shards.covering(known.shards), policies.with_past(known.policies), 1 + len(devices) // _DEVICES_A_PIECE
    )
    blocks = spark.createDataFrame(pieces.select(["key_group", "block"]))
    rows = blocks.mapInArrow(_snapshot_mapper(shards.newest_ms, deployment), SNAPSHOT_COLUMNS).filter(F.col("part") == DEVICE)
    rows = rows.withColumn("life", F.timestamp_millis(F.lit(frontier_ms + 1)))
    return state.filter(F.col("part") != DEVICE).unionByName(rows)


def _snapshot_mapper(newest_ms: int, deployment: Deployment) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for group, block in zip(batch["key_group"].to_pylist(), batch["block"].to_pylist(), strict=True):
                yield from snapshot_rows(group, block, {}, newest_ms, deployment)

    return take
