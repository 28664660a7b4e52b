"""Spark session that all tests of a process share."""

import os
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from bench.peers.scala_jar import compiled
from fleetpulse.io.spark.jars import resolve_jars
from fleetpulse.io.spark.session import spark_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    classes = os.pathsep.join(map(str, [*resolve_jars(), compiled()]))  # the benchmark's peers run in the same JVM
    extra = {"spark.driver.extraClassPath": classes}
    session = spark_session("fleetpulse-tests", local_dir=tmp_path_factory.mktemp("spark"), extra=extra)
    yield session
    session.stop()
