"""Spark session: local, bound to the loopback, with one folder for all its files."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from fleetpulse.core.tables import INDEXED_COLUMNS
from fleetpulse.io.spark.cds_archive import class_archive, use_options
from fleetpulse.io.spark.jars import jars_of_spark, resolve_jars, spark_home
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.spark.scratch import TEMPORARY
from fleetpulse.paths import LOG4J

_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# Spark's default starts a process to set the permissions of each file; both write aside and rename.
_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
# Python workers keep the memory of a batch for the next one. Returning it to the system and getting
# it back zeroed would take a tenth of the batch's time.
_ALLOCATOR: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the maximum of glibc
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
_JVM: Final = (
    "-XX:+UseParallelGC",  # G1 treats blocks as humongous objects, each of which may start a heap marking
    "-XX:GCTimeRatio=19",  # grow the heap if GC takes a twentieth of the time, not a hundredth: saves 300 MB
    "-XX:CompileThresholdScaling=4",  # compile code that runs for each row, but not code that runs once a batch
    "-Duser.timezone=UTC",
)
JAVA_OPTIONS_KEY: Final = "spark.driver.extraJavaOptions"
_FOLDER: Final = "spark.fleetpulse.folder"


@dataclass(frozen=True, slots=True)
class SparkResources:
    """Resources of a session.

    Attributes:
        cores: number of threads and of shuffle partitions.
        memory: heap size of the JVM in Java's notation; Python workers use additional memory.
    """

    cores: int = 2
    memory: str = "1g"


def settings(local_dir: Path, size: SparkResources) -> dict[str, str]:
    """Return the Spark settings of a session."""
    state = "spark.sql.streaming.stateStore"
    return {
        "spark.master": f"local[{size.cores}]",
        "spark.driver.memory": size.memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",  # opens no port
        "spark.ui.showConsoleProgress": "false",
        _FOLDER: str(local_dir),  # for fleetpulse's files that are removed with the session
        "spark.sql.warehouse.dir": str(local_dir / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",  # Hive's would create a Derby database in the current folder
        # spark.jars would copy the JARs and serve them over a socket to nonexistent executors.
        "spark.driver.extraClassPath": os.pathsep.join(str(jar) for jar in resolve_jars()),
        # A URI, because these options are split at spaces and the folder's name may contain one.
        JAVA_OPTIONS_KEY: " ".join([*_JVM, f"-Dlog4j2.configurationFile={LOG4J.as_uri()}", _temporary(local_dir)]),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",  # the logs are small: one task instead of 50
        "spark.databricks.delta.snapshotCache.storageLevel": "NONE",  # the state of a version is read once
        # Statistics are only worth their cost for the first columns: device, site and time.
        "spark.databricks.delta.properties.defaults.dataSkippingNumIndexedCols": str(INDEXED_COLUMNS),
        "spark.default.parallelism": str(size.cores),  # tasks that read bronze; a cluster counts the executors of the moment
        "spark.sql.shuffle.partitions": str(size.cores),  # fixed by the first batch of a checkpoint
        "spark.shuffle.compress": "false",  # blocks are already compressed
        # A batch needs more generated classes than the default of 100: each batch recompiled five.
        "spark.sql.codegen.cache.maxEntries": "1000",
        "spark.sql.streaming.numRecentProgressUpdates": "50",  # the job polls them every few seconds
        "spark.sql.adaptive.enabled": "false",  # no use for a stateful query, and its planning takes time
        f"{state}.providerClass": _ROCKSDB,  # required by transformWithState
        f"{state}.rocksdb.changelogCheckpointing.enabled": "true",  # a commit writes only the changes
        f"{state}.encodingFormat": "avro",  # unsaferow has no schema evolution and cannot be changed later
        f"{state}.rowChecksum.enabled": "true",  # damaged state is an error and cannot cause a verdict
        "spark.sql.streaming.minBatchesToRetain": "20",  # enough to read earlier state; the default is 100
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
        "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "true",  # avoids a conversion to rows in Python
        # Only some workers would have this variable, and each distinct environment needs a daemon.
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
        "spark.python.daemon.module": "fleetpulse.io.lifecycle.python_daemon",  # imports the workers' modules once
        "spark.python.authenticate.socketTimeout": "180s",  # busy machines start Python workers slowly
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # a number: cheaper to write than the default
        **{f"spark.executorEnv.{name}": value for name, value in _ALLOCATOR.items()},
    }


def _temporary(local_dir: Path) -> str:
    """Return the JVM option for the folder of temporary files.

    A killed JVM leaves its native libraries there (15 MB).
    """
    path = str(local_dir / TEMPORARY).replace("\\", "\\\\").replace('"', '\\"')
    return f'"-Djava.io.tmpdir={path}"'


def folder_of(spark: SparkSession) -> Path:
    """Return the folder for files that a session can lose."""
    return Path(str(spark.conf.get(_FOLDER)))


def _count_start(app_name: str) -> None:
    """Append this start to the file in FLEET_STARTS, if set; tests limit the starts."""
    if (path := os.environ.get("FLEET_STARTS")) and SparkSession.getActiveSession() is None:
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()} {app_name}\n")


def spark_session(
    app_name: str, *, local_dir: Path, size: SparkResources = SparkResources(), extra: Mapping[str, str] | None = None
) -> SparkSession:
    """Start a session, or return the existing session of this process.

    Args:
        app_name: name for the logs.
        local_dir: folder for files that Spark can lose.
        size: cores and memory of the session.
        extra: further settings, which take precedence.

    Raises:
        FleetError: Java or a JAR is missing and cannot be downloaded.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable  # python3 on PATH may be another one
    os.environ["SPARK_HOME"] = str(spark_home())  # the machine may have another Spark than the pinned one
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["TZ"] = "UTC"
    local_dir = local_dir.resolve()
    (local_dir / TEMPORARY).mkdir(parents=True, exist_ok=True)
    # Takes precedence over spark.local.dir, which would print a warning about this variable.
    os.environ["SPARK_LOCAL_DIRS"] = str(local_dir / "local")
    builder = SparkSession.builder.appName(app_name)
    usual = settings(local_dir, size)
    if archive := class_archive(java, jars_of_spark()):
        usual[JAVA_OPTIONS_KEY] += f" {use_options(archive)}"
    for name, value in {**usual, **(extra or {})}.items():
        builder = builder.config(name, value)
    _count_start(app_name)
    session = builder.getOrCreate()
    _ = session.streams.active  # the first access starts an endpoint that the state reader needs
    return session
