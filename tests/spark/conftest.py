"""One session for all."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from fleetpulse.io.spark import spark_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = spark_session("fleetpulse-tests", local_dir=tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()
