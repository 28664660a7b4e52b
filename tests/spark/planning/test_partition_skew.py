"""Where Spark puts a key group is where we say, so that what is chosen for balance is balanced."""

import pytest
from pyspark.sql import SparkSession

from fleetpulse.planning.partition_skew import partition_of

pytestmark = pytest.mark.spark


def test_a_key_group_lies_in_the_partition_that_is_worked_out(spark: SparkSession) -> None:
    groups = spark.range(2_000).selectExpr("cast(id as int) as key_group")
    for partitions in (1, 2, 3, 7, 16):
        placed = groups.repartition(partitions, "key_group").selectExpr("key_group", "spark_partition_id() as place").collect()
        assert {row.key_group: row.place for row in placed} == {one: partition_of(one, partitions) for one in range(2_000)}
