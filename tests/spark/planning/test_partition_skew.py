"""Partition of a key group: the computed partition is the one that Spark assigns."""

import pytest
from pyspark.sql import SparkSession

from fleetpulse.planning.partition_skew import partition_of

pytestmark = pytest.mark.spark


def test_a_key_group_is_in_its_computed_partition(spark: SparkSession) -> None:
    groups = spark.range(2_000).selectExpr("cast(id as int) as key_group")
    for partitions in (1, 2, 3, 7, 16):
        placed = groups.repartition(partitions, "key_group").selectExpr("key_group", "spark_partition_id() as place").collect()
        assert {row.key_group: row.place for row in placed} == {one: partition_of(one, partitions) for one in range(2_000)}
