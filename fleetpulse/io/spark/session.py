"""Spark session with one folder for all its files: local and bound to the loopback, or on a cluster.

Rule: a local session opens no port beyond the loopback. A session on a cluster authenticates and
encrypts all its connections.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from fleetpulse.core.errors import FleetError, first_line
from fleetpulse.core.tables import INDEXED_COLUMNS
from fleetpulse.io.spark.cds_archive import class_archive, use_options
from fleetpulse.io.spark.cluster import Cluster, await_executor, reach_master, read_secret, require_shared
from fleetpulse.io.spark.jars import jars_of_spark, own_jars, resolve_jars, spark_home
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.spark.pods import KUBERNETES, Pods
from fleetpulse.io.spark.scratch import TEMPORARY
from fleetpulse.io.spark.shared_mark import mark_shared
from fleetpulse.paths import LOG4J, PYTHON_WORKER, ROOT, cache_dir

_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# Spark's default starts a process to set the permissions of each file. Both managers rename a
# temporary file when it is complete.
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
LOCAL: Final = "local"  # value of the setting spark_master
_LOOPBACK: Final = "127.0.0.1"
_OF_WORKERS: Final = ("NUMBA_CACHE_DIR",)  # variables that workers have as well; those of pods are in their image
_SECRET_KEY: Final = "spark.authenticate.secret"  # noqa: S105 - the name of a setting


@dataclass(frozen=True, slots=True)
class SparkResources:
    """Resources of a session.

    Attributes:
        cores: number of threads and of shuffle partitions; on a cluster, cores of all executors.
        memory: heap size of the JVM in Java's notation; Python workers use additional memory.
        cluster: cluster that runs the tasks; None runs them in the JVM of the session.
    """

    cores: int = 2
    memory: str = "1g"
    cluster: Cluster | None = None

    @classmethod
    def of(cls, home: Path, chosen: "SparkSettings") -> "SparkResources":
        """Return the resources that the settings of a home give its sessions.

        Raises:
            FleetError: the settings name a cluster but no secret, or a Kubernetes but no image or template,
                or executors could not open the home by its path.
        """
        if chosen.spark_master == LOCAL:
            return cls(chosen.cores, chosen.heap)
        cluster = Cluster(
            chosen.spark_master,
            _secret_of(home, chosen.spark_key),
            chosen.driver_host,
            chosen.executors,
            chosen.executor_cores,
            chosen.executor_memory,
            chosen.spark_port,
            _pods_of(home, chosen) if chosen.spark_master.startswith(KUBERNETES) else None,
        )
        if quote(str(home.resolve())) != str(home.resolve()):
            raise FleetError(
                f'executors cannot open the home "{home.resolve()}": Spark\'s readers of state need a path that is equal to its '
                f"URL; move the home to a path of letters, digits, - _ . and /, or remove the setting spark_master",
                code="home-path-invalid",
            )
        return cls(cluster.cores, chosen.heap, cluster)


class SparkSettings(Protocol):
    """Settings of an installation that size its sessions, see `fleetpulse.settings.Settings`."""

    cores: int
    heap: str
    spark_master: str
    driver_host: str
    executors: int
    executor_cores: int
    executor_memory: str
    spark_key: str
    spark_port: int
    executor_image: str
    executor_template: str
    executor_namespace: str
    executor_overhead: str
    driver_pod: str


def _pods_of(home: Path, chosen: SparkSettings) -> Pods:
    if not chosen.executor_image or not chosen.executor_template:
        missing = "executor_template" if chosen.executor_image else "executor_image"
        raise FleetError(
            f"the setting {missing} is missing; executors in pods need an image with this installation, and a template that "
            f"mounts the home; set executor_image and executor_template, see docs/how-to/kubernetes.md",
            code="spark-pods-incomplete",
        )
    template = (home / Path(chosen.executor_template).expanduser()).absolute()
    if not template.is_file():
        raise FleetError(
            f'the template of the executors\' pods cannot be read from "{template}"; expected a file like '
            f"infra/kubernetes/executors/executor.yaml; correct the setting executor_template",
            code="spark-template-missing",
        )
    return Pods(chosen.executor_image, template, chosen.executor_namespace, chosen.executor_overhead, chosen.driver_pod)


def _secret_of(home: Path, named: str) -> Path:
    if not named:
        raise FleetError(
            "the setting spark_key is missing, and anybody who reaches a Spark master without a secret can run code on its "
            "workers; write spark.authenticate.secret of the cluster into a file, and its name into the setting",
            code="spark-secret-missing",
        )
    return (home / Path(named).expanduser()).absolute()


def settings(local_dir: Path, size: SparkResources) -> dict[str, str]:
    """Return the Spark settings of a session, without the secret of its cluster."""
    state = "spark.sql.streaming.stateStore"
    # A URI, because these options are split at spaces and the folder's name may contain one.
    java_options = " ".join([*_JVM, f"-Dlog4j2.configurationFile={LOG4J.as_uri()}"])
    return {
        "spark.master": f"local[{size.cores}]",
        "spark.driver.memory": size.memory,
        "spark.driver.host": _LOOPBACK,
        "spark.driver.bindAddress": _LOOPBACK,
        "spark.ui.enabled": "false",  # opens no port
        "spark.ui.showConsoleProgress": "false",
        _FOLDER: str(local_dir),  # for fleetpulse's files that are removed with the session
        "spark.sql.warehouse.dir": str(local_dir / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",  # Hive's would create a Derby database in the current folder
        # spark.jars would copy the JARs and serve them over a socket to nonexistent executors.
        "spark.driver.extraClassPath": os.pathsep.join(map(str, own_jars())),
        JAVA_OPTIONS_KEY: f"{java_options} {_temporary(local_dir)}",
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
        "spark.executorEnv.FLEET_PYTHON": sys.executable,  # the interpreter of PYTHON_WORKER
        **{f"spark.executorEnv.{name}": value for name, value in _ALLOCATOR.items()},
        **(_of_cluster(size.cluster, java_options) if size.cluster else {}),
    }


def _of_cluster(cluster: Cluster, java_options: str) -> dict[str, str]:
    """Return the settings that a session on a cluster adds or replaces.

    The folders of temporary files and of local files are those of each worker or pod. Executors get their
    copy of the secret from their worker, or from a file of their pod.
    """
    environment = {
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",  # keeps the working folder of an executor off sys.path
        "FLEET_CACHE": str(cache_dir().absolute()),
        **{name: value for name in _OF_WORKERS if cluster.pods is None and (value := os.environ.get(name))},
    }
    host = cluster.driver_host or reach_master(cluster)
    return {
        "spark.master": cluster.master,
        "spark.driver.host": host,
        "spark.driver.bindAddress": host,
        **cluster.ports(),
        **({"spark.cores.max": str(cluster.cores)} if cluster.pods is None else {}),
        **(cluster.pods.settings(cluster.executors, cluster.secret) if cluster.pods else {}),
        "spark.executor.cores": str(cluster.executor_cores),
        "spark.executor.memory": cluster.executor_memory,
        # spark.jars would copy the JARs to each executor at each start.
        "spark.executor.extraClassPath": os.pathsep.join(map(str, resolve_jars())),
        "spark.executor.extraJavaOptions": java_options,
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.cipher": "AES/GCM/NoPadding",  # the default does not detect changed bytes
        **{f"spark.executorEnv.{name}": value for name, value in environment.items()},
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


@contextmanager
def changed_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session until the context exits."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


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
        local_dir: folder for files that Spark can lose; on a cluster, a folder of the home.
        size: cores and memory of the session.
        extra: further settings, which take precedence.

    Raises:
        FleetError: Java or a JAR is missing and cannot be downloaded. Or a cluster cannot be reached,
            registers no executor within two minutes, or does not share the folder.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java)
    os.environ["PYSPARK_PYTHON"] = str(PYTHON_WORKER)  # runs the interpreter that the settings name
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable  # python3 on PATH may be another one
    os.environ["SPARK_HOME"] = str(spark_home())  # the machine may have another Spark than the pinned one
    os.environ["TZ"] = "UTC"
    local_dir = local_dir.resolve()
    (local_dir / TEMPORARY).mkdir(parents=True, exist_ok=True)
    # Takes precedence over spark.local.dir, which would print a warning about this variable.
    os.environ["SPARK_LOCAL_DIRS"] = str(local_dir / "local")
    builder = SparkSession.builder.appName(app_name)
    usual = settings(local_dir, size)
    if size.cluster is not None:
        usual |= {f"spark.executorEnv.{name}": value for name, value in mark_shared(local_dir).items()}
    os.environ["SPARK_LOCAL_IP"] = usual["spark.driver.host"]
    if archive := class_archive(java, jars_of_spark()):
        usual[JAVA_OPTIONS_KEY] += f" {use_options(archive)}"
    chosen = {**usual, **(extra or {})}
    for name, value in chosen.items():
        builder = builder.config(name, value)
    _count_start(app_name)
    session = builder.getOrCreate() if size.cluster is None else _start_on(size.cluster, builder, chosen, local_dir)
    _ = session.streams.active  # the first access starts an endpoint that the state reader needs
    return session


def _start_on(cluster: Cluster, builder: SparkSession.Builder, chosen: Mapping[str, str], local_dir: Path) -> SparkSession:
    """Start a session on a cluster, and check that its executors can work for it.

    PySpark passes settings to a new JVM on its command line, which other users can read. So the JVM
    starts without the secret, and gets it through PySpark's own connection. For executors in pods, it gets
    the path of the secret only.
    """
    secret = read_secret(cluster.secret)
    if cluster.pods:
        reach_master(cluster)  # Spark would retry for as long as it waits for executors
    configuration = SparkConf(loadDefaults=False).setAll([*chosen.items()])
    SparkContext._ensure_initialized(conf=configuration)  # noqa: SLF001 - pyspark has no public way to start only the JVM
    if cluster.pods is None:
        builder = builder.config(_SECRET_KEY, secret)
    try:
        session = builder.getOrCreate()
    except Py4JError as error:
        expected = (
            f"an API server at which this process may create pods, and a template whose pods start; {cluster.pods.hint()}"
            if cluster.pods
            else "a master of the same Spark with the secret of the setting spark_key, spark.authenticate and "
            "spark.network.crypto.enabled; see the log of the master"
        )
        raise FleetError(
            f"the Spark master {cluster.master} accepts no application ({_cause(error)}); expected {expected}",
            code="spark-master-refuses",
        ) from error
    try:
        await_executor(session, cluster)
        require_shared(session, local_dir, cluster.cores)
    except BaseException:
        with suppress(Py4JError, OSError):  # the JVM has ended
            session.stop()
        raise
    return session


def _cause(error: Exception) -> str:
    causes = [line for line in str(error).splitlines() if line.startswith("Caused by: ")]
    return causes[-1].removeprefix("Caused by: ")[:400] if causes else first_line(error)
