"""Registered devices as what a new checkpoint begins with."""

from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from fleetpulse.columnar.snapshot.bootstrap import LIMIT_FIELDS, REGISTERED_SCHEMA, seeds
from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.shards import Shards


def initial_state(
    spark: SparkSession, registered: pa.Table | Path, shards: Shards, policies: Policies, key_groups: int
) -> DataFrame:
    """Return key groups for ``initialState``: columns key_group int, block binary, a row a key group.

    Batch 0, and so what is brought in, waits for the first row of bronze: in a silent fleet, for a tick.

    Args:
        spark: the session.
        registered: the devices, columns of `REGISTERED_SCHEMA`; or the folder of a Delta table of them.
        shards: coverage and frontier, see `Shards.judged_through`.
        policies: those in force.
        key_groups: of the checkpoint.

    Raises:
        FleetError: the table cannot be brought in, see `columnar.seeds`.
    """
    if isinstance(registered, Path):
        stored = spark.read.format("delta").load(str(registered))
        wanted = [*REGISTERED_SCHEMA.names, *(field.name for field in LIMIT_FIELDS)]
        registered = stored.select(*(name for name in wanted if name in stored.columns)).toArrow()
    return spark.createDataFrame(seeds(registered, shards, policies, key_groups))
