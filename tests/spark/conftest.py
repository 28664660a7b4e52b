"""Spark session that all tests of a process share.

It runs on two local cores, or on the cluster that the environment names: tests/e2e/cluster runs some
of these tests there.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bench.peers.scala_jar import compiled
from cli.dev.jvm_lease import LEASES_JVMS
from fleetpulse.io.spark.session import SparkResources, spark_session
from fleetpulse.settings import load_settings


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(LEASES_JVMS, raising=False)
        session = _session(folder)
    yield session
    session.stop()


def _session(folder: Path) -> SparkSession:
    if "FLEET_SPARK_MASTER" in os.environ:
        return spark_session("fleetpulse-tests", local_dir=folder, size=SparkResources.of(folder, load_settings(folder)))
    # The benchmark's peers run in the same JVM. Behind all other classes, they leave the class archive valid.
    os.environ["SPARK_DIST_CLASSPATH"] = str(compiled())
    return spark_session("fleetpulse-tests", local_dir=folder)
