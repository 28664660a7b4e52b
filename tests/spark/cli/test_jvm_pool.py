"""Warm JVMs of a test run, with PySpark: a driver leases the JVM of the one before, without its copies of state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.dev.jvm_pool import pool_of_jvms
from fleetpulse.io.spark.jars import own_jars
from fleetpulse.io.spark.java import find_java

pytestmark = pytest.mark.spark
DRIVER = """
import sys
from pathlib import Path

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

java = launch_gateway(SparkConf(loadDefaults=False).set("spark.driver.extraClassPath", sys.argv[1])).jvm
copies = Path(java.System.getenv("SPARK_LOCAL_DIRS"), "fleetpulse-state")
print(java.ProcessHandle.current().pid(), copies.exists())
copies.mkdir(parents=True)
"""


def test_a_jvm_without_an_active_context_is_leased_again(tmp_path: Path) -> None:
    jars = os.pathsep.join(map(str, own_jars()))
    with pool_of_jvms(tmp_path) as variables:
        environment = {**os.environ, **variables, "JAVA_HOME": str(find_java())}
        command = [sys.executable, "-P", "-c", DRIVER, jars]
        first, second = (
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            for _ in range(2)
        )
    assert first == second and first.endswith(" False")
