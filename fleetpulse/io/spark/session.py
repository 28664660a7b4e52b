"""The Spark session: local, bound to the loopback, everything that it writes in one folder."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from fleetpulse.core.tables import INDEXED_COLUMNS
from fleetpulse.io.spark.cds_archive import class_archive, using
from fleetpulse.io.spark.jars import jars_of_spark, resolve_jars, spark_home
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.spark.scratch import TEMPORARY
from fleetpulse.paths import LOG4J

_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# Spark's usual one starts a process for each file's permissions; both write aside and rename.
_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
# Python workers keep a batch's memory for the next one: to hand it back, and get it cleared again, takes a tenth of it.
_ALLOCATOR: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
_JVM: Final = (
    "-XX:+UseParallelGC",  # blocks are humongous objects to G1, each of which may start a marking of the heap
    "-XX:GCTimeRatio=19",  # the heap grows where collecting it takes a twentieth of the time, not a hundredth: 300 MB less
    "-XX:CompileThresholdScaling=4",  # what runs once a batch is not worth compiling; what runs for each row still is
    "-Duser.timezone=UTC",
)
OPTIONS: Final = "spark.driver.extraJavaOptions"
_FOLDER: Final = "spark.fleetpulse.folder"


@dataclass(frozen=True, slots=True)
class SparkResources:
    """What a session may take of the machine.

    Attributes:
        cores: threads, and shuffle partitions.
        memory: heap of the JVM, as Java writes it; Python's workers take theirs beside it.
    """

    cores: int = 2
    memory: str = "1g"


def settings(local_dir: Path, size: SparkResources) -> dict[str, str]:
    """Return the settings of a session, each with its reason."""
    state = "spark.sql.streaming.stateStore"
    return {
        "spark.master": f"local[{size.cores}]",
        "spark.driver.memory": size.memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",  # a port that nobody asked for
        "spark.ui.showConsoleProgress": "false",
        _FOLDER: str(local_dir),  # for files of ours that are to go with the session, however it ends
        "spark.sql.warehouse.dir": str(local_dir / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",  # Hive's would leave a Derby database where the person stands
        # spark.jars would copy them, and serve them over a socket to executors that do not exist.
        "spark.driver.extraClassPath": os.pathsep.join(str(jar) for jar in resolve_jars()),
        # As URI: the project's folder may have a space in its name, and these options are split at spaces.
        OPTIONS: " ".join([*_JVM, f"-Dlog4j2.configurationFile={LOG4J.as_uri()}", _temporary(local_dir)]),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",  # small logs: 50 tasks to read one are 49 too many
        "spark.databricks.delta.snapshotCache.storageLevel": "NONE",  # a version's state is read once
        # Statistics of a row's first columns are worth their cost: what is looked for is a device, a site or a time.
        "spark.databricks.delta.properties.defaults.dataSkippingNumIndexedCols": str(INDEXED_COLUMNS),
        "spark.sql.shuffle.partitions": str(size.cores),  # fixed with a checkpoint's first batch
        "spark.shuffle.compress": "false",  # blocks are compressed where they are packed
        # A batch with its Delta tables takes more than the default's hundred classes: each batch compiled five of them anew.
        "spark.sql.codegen.cache.maxEntries": "1000",
        "spark.sql.streaming.numRecentProgressUpdates": "50",  # they are asked for every few seconds
        "spark.sql.adaptive.enabled": "false",  # a stateful query cannot use it, and planning it costs
        f"{state}.providerClass": _ROCKSDB,  # transformWithState needs it
        f"{state}.rocksdb.changelogCheckpointing.enabled": "true",  # a commit writes what changed, not the store
        f"{state}.encodingFormat": "avro",  # unsaferow cannot evolve, and cannot be switched later
        f"{state}.rowChecksum.enabled": "true",  # damaged state is an error, not a verdict
        "spark.sql.streaming.minBatchesToRetain": "20",  # enough to look back, and not the default's hundred
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
        "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "true",  # spares Python a conversion to rows
        # It is a variable of some workers' environment and not of others', and each environment has a daemon of its own.
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
        "spark.python.daemon.module": "fleetpulse.io.lifecycle.python_daemon",  # it imports once what each worker needs
        "spark.python.authenticate.socketTimeout": "180s",  # busy machines start Python workers slowly
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # a number; the default's twelve bytes are dear to write
        **{f"spark.executorEnv.{name}": value for name, value in _ALLOCATOR.items()},
    }


def _temporary(local_dir: Path) -> str:
    """Return the option for the JVM's temporary files: a JVM that is killed leaves its native libraries there, 15 MB."""
    path = str(local_dir / TEMPORARY).replace("\\", "\\\\").replace('"', '\\"')
    return f'"-Djava.io.tmpdir={path}"'


def folder_of(spark: SparkSession) -> Path:
    """Return where a session may write what it can lose."""
    return Path(str(spark.conf.get(_FOLDER)))


def _count_start(app_name: str) -> None:
    """Write down that this process starts a session, where FLEET_STARTS names a file: the tests have a budget of them."""
    if (path := os.environ.get("FLEET_STARTS")) and SparkSession.getActiveSession() is None:
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()} {app_name}\n")


def spark_session(
    app_name: str, *, local_dir: Path, size: SparkResources = SparkResources(), extra: Mapping[str, str] | None = None
) -> SparkSession:
    """Start a session, or return the one that this process has.

    Args:
        app_name: shown in logs.
        local_dir: where Spark may write what it can lose.
        size: what it may take of the machine.
        extra: further settings, which win.

    Raises:
        FleetError: Java or the JARs cannot be had.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable  # PATH's python3 is another one
    os.environ["SPARK_HOME"] = str(spark_home())  # another Spark of this machine is not the pinned one
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["TZ"] = "UTC"
    local_dir = local_dir.resolve()
    (local_dir / TEMPORARY).mkdir(parents=True, exist_ok=True)
    # Wins over spark.local.dir, which would print a warning that it may be overridden by just this.
    os.environ["SPARK_LOCAL_DIRS"] = str(local_dir / "local")
    builder = SparkSession.builder.appName(app_name)
    usual = settings(local_dir, size)
    if archive := class_archive(java, jars_of_spark()):
        usual[OPTIONS] += f" {using(archive)}"
    for name, value in {**usual, **(extra or {})}.items():
        builder = builder.config(name, value)
    _count_start(app_name)
    session = builder.getOrCreate()
    _ = session.streams.active  # state is read with the help of an endpoint that is there from the first look at queries on
    return session
