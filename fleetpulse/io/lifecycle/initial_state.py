"""Initial state of a new checkpoint from registered devices."""

from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from fleetpulse.columnar.snapshot.bootstrap import LIMIT_FIELDS, REGISTERED_SCHEMA, bootstrap_groups
from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.shards import Shards


def initial_state(
    spark: SparkSession, registered: pa.Table | Path, shards: Shards, policies: Policies, key_groups: int
) -> DataFrame:
    """Return key groups for ``initialState``, one row each, columns of `BOOTSTRAP_SCHEMA`.

    Batch 0 loads the initial state. It waits for the first row of bronze, which is a tick if the
    fleet is silent.

    Args:
        spark: Spark session.
        registered: devices with the columns of `REGISTERED_SCHEMA`, or the folder of a Delta table
            with these columns.
        shards: coverage and frontier, see `Shards.judged_through`.
        policies: policies in force.
        key_groups: number of key groups of the checkpoint.

    Raises:
        FleetError: the table of devices is invalid, see `columnar.snapshot.bootstrap`.
    """
    if isinstance(registered, Path):
        stored = spark.read.format("delta").load(str(registered))
        names = [*REGISTERED_SCHEMA.names, *(field.name for field in LIMIT_FIELDS)]
        registered = stored.select(*(name for name in names if name in stored.columns)).toArrow()
    return spark.createDataFrame(bootstrap_groups(registered, shards, policies, key_groups))
