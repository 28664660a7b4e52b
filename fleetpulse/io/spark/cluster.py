"""Spark cluster: its master, its executors, and the files that they share with the driver.

The master is that of a standalone cluster, or the API server of a Kubernetes, which then runs each
executor in a pod.

Rule 1: a cluster needs a secret. Without one, anybody who reaches the master can run code on it.
The secret is never an argument of a process.
Rule 2: executors find Python, JARs and this project at the paths of the driver, and the home on a
shared file system. `require_shared` checks that before the first task of a session.
Rule 3: every wait has a limit.

Source: docs/adr/0042-spark-cluster-on-a-shared-file-system.md
"""

import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from fleetpulse.core.errors import FleetError, first_line
from fleetpulse.core.operations.secret_files import exposed_secret
from fleetpulse.io.spark.pods import KUBERNETES, Pods

_CONNECT_S: Final = 10.0
_EXECUTORS_S: Final = 120.0  # until the first executor registers; Spark's own limit for a connection is as long
_PODS_S: Final = 600.0  # the same for pods: a node may have to download the image before
_TASKS_S: Final = 600.0  # for the first tasks; an executor may have to compile the kernels before
_POLL_S: Final = 0.1
_LEAST_SECRET_CHARS: Final = 32
_WRITTEN_BY_PYTHON: Final = "Error from python worker:"
_PATH_OF_PYTHON: Final = "PYTHONPATH was:"
_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Misuse|Exit|Interrupt)\b")  # last line of a traceback
_PROBED: Final = "name string, fault string"
_PROBED_SCHEMA: Final = pa.schema([("name", pa.string()), ("fault", pa.string())])
_LOCK, _TOKEN = "lock", "driver"
PORTS: Final = 48  # of a cluster with fixed ports: a third each for drivers, their blocks, and blocks of executors
_PORTS_EACH: Final = PORTS // 3


@dataclass(frozen=True, slots=True)
class Cluster:
    """Spark cluster, and the share of it that a session uses.

    Attributes:
        master: address of the master, such as ``spark://10.0.0.5:7077``, or of the API server of a
            Kubernetes, such as ``k8s://https://kubernetes.default.svc:443``.
        secret: file of the secret that all parts of the cluster share.
        driver_host: address at which executors reach the driver; empty for the local
            address of the driver's connection to the master.
        executors: number of executors.
        executor_cores: CPU cores of an executor.
        executor_memory: heap size of an executor in Java's notation.
        first_port: first of the ports on which drivers and executors listen; 0 for any free ports.
        pods: pods in which Kubernetes runs the executors; None on a standalone cluster.
    """

    master: str
    secret: Path
    driver_host: str = ""
    executors: int = 2
    executor_cores: int = 1
    executor_memory: str = "1g"
    first_port: int = 0
    pods: Pods | None = None

    @property
    def cores(self) -> int:
        """Cores of all executors."""
        return self.executors * self.executor_cores

    def ports(self) -> dict[str, str]:
        """Return Spark's port settings; empty for any free ports.

        A session whose port is taken tries the next one, up to the last of its kind: all sessions of
        a host, and all executors of a worker, share the same ranges.
        """
        if not self.first_port:
            return {}
        kinds = ("spark.driver.port", "spark.driver.blockManager.port", "spark.blockManager.port")
        firsts = {kind: str(self.first_port + number * _PORTS_EACH) for number, kind in enumerate(kinds)}
        return {**firsts, "spark.port.maxRetries": str(_PORTS_EACH - 1)}


def reach_master(cluster: Cluster) -> str:
    """Connect to a master of the cluster; return the address of this machine on that connection.

    Raises:
        FleetError: no master can be reached.
    """
    reasons: list[str] = []
    for master in cluster.master.removeprefix(KUBERNETES).removeprefix("spark://").split(","):
        try:
            with socket.create_connection(_host_and_port(master), timeout=_CONNECT_S) as connection:
                return str(connection.getsockname()[0])
        except (OSError, OverflowError, ValueError) as error:  # the port may be above 65,535
            reasons.append(f"{master}: {error}")
    raise FleetError(
        f"the Spark master cannot be reached ({'; '.join(reasons)}); expected a running master at {cluster.master}; start it, "
        f"or correct the setting spark_master",
        code="spark-master-unreachable",
    )


def _host_and_port(master: str) -> tuple[str, int]:
    if "://" not in master:
        host, _, port = master.rpartition(":")
        return host, int(port)
    address = urlsplit(master)
    return str(address.hostname), address.port or (443 if address.scheme == "https" else 80)


def read_secret(path: Path) -> str:
    """Read the secret of a cluster.

    Raises:
        FleetError: the file is missing, too short, or other users can read it.
    """
    try:
        secret = path.read_text().strip()
        exposed = exposed_secret(
            path, "the secret of the Spark cluster", path.stat(), path.absolute().parent.stat(), os.geteuid()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(
            f'the secret of the Spark cluster cannot be read from "{path}" ({error}); write spark.authenticate.secret of the '
            f"master and the workers into it, or correct the setting spark_key",
            code="spark-secret-unreadable",
        ) from None
    if exposed is not None:
        raise exposed
    if len(secret) < _LEAST_SECRET_CHARS or not secret.isprintable():
        raise FleetError(
            f'the secret of the Spark cluster in "{path}" must be one line of at least {_LEAST_SECRET_CHARS} characters; got '
            f"{len(secret)}; make one with: openssl rand -hex 32",
            code="spark-secret-weak",
        )
    return secret


def await_executor(spark: SparkSession, cluster: Cluster, limit_s: float | None = None) -> None:
    """Wait until an executor has registered at the driver.

    Args:
        spark: session on the cluster.
        cluster: the cluster.
        limit_s: limit in seconds; None for two minutes, or ten if a Kubernetes runs the executors.

    Raises:
        FleetError: none has registered within the limit, or Spark has ended because executors failed.
    """
    limit_s = limit_s or (_PODS_S if cluster.pods else _EXECUTORS_S)
    context: Any = spark.sparkContext._jsc  # noqa: SLF001 - pyspark has no public access to the registered executors
    tracker = context.sc().statusTracker()
    host, deadline = spark.conf.get("spark.driver.host"), time.monotonic() + limit_s
    waited = f"within {limit_s:.0f} s"
    while time.monotonic() < deadline:
        try:
            if len(tracker.getExecutorInfos()) > 1:  # the driver is one of them
                return
        except Py4JError:  # the context has ended, because the master refused the application
            pass
        except OSError:  # the JVM has ended
            waited = "before Spark ended, because several executors had failed"
            break
        time.sleep(_POLL_S)
    hint = (
        cluster.pods.hint()
        if cluster.pods
        else "check that the workers have free cores and memory, that they share the secret, and the settings driver_host, "
        "executors, executor_cores and executor_memory; the logs of the executors are in the workers' folders"
    )
    raise FleetError(
        f"no executor of {cluster.master} registered {waited}; expected {cluster.executors} with "
        f"{cluster.executor_cores} cores and {cluster.executor_memory} each, which reach this process at {host}; {hint}",
        code="spark-executors-missing",
    )


def require_shared(spark: SparkSession, folder: Path, tasks: int) -> None:
    """Check that executors and the driver share the file system of a folder.

    Each task reads a file of the driver, and checks that it cannot take a lock of the driver or
    replace the file by a hard link. It also renames a file, which the driver then reads.

    Args:
        spark: session on a cluster.
        folder: folder of the home.
        tasks: number of tasks; the tasks spread over the executors that have registered.

    Raises:
        FleetError: the executors cannot run the project's tasks, or do not share the folder.
    """
    with TemporaryDirectory(prefix="shared-", dir=folder) as place:
        token = secrets.token_hex(16)
        (Path(place) / _TOKEN).write_text(token)
        with (Path(place) / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            checked = spark.range(0, tasks, 1, tasks).mapInArrow(_prober(place, token), _PROBED)
            try:
                with _cancelled_after(spark, _TASKS_S):
                    found = checked.collect()
            except (PySparkException, Py4JError) as error:
                raise FleetError(
                    f"the executors cannot run the tasks of this project ({cause_in_executor(error)}); expected the same "
                    f"Python, Java, packages and project at the same paths as here; install them on each worker",
                    code="spark-executors-differ",
                ) from error
        faults = {row.fault for row in found if row.fault} or {
            "the driver does not find the files that an executor wrote"
            for row in found
            if not _holds(Path(place) / row.name, token)
        }
    if faults or len(found) != tasks:
        raise FleetError(
            f'the executors do not share "{folder}" with this machine: {min(faults, default="rows of the check are missing")}; '
            f"a home must be on a file system that all hosts share, with hard links and locks (flock), at the same path, and "
            f"processes must run as the same user",
            code="home-not-shared",
        )


@contextmanager
def _cancelled_after(spark: SparkSession, limit_s: float) -> Iterator[None]:
    """Cancel all jobs of a new session when a limit is reached."""
    timer = Timer(limit_s, spark.sparkContext.cancelAllJobs)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _holds(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def _prober(place: str, token: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def probed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for _ in range(batch.num_rows):
                name = secrets.token_hex(8)
                yield pa.record_batch([[name], [probe(Path(place), name, token)]], schema=_PROBED_SCHEMA)

    return probed


def probe(place: Path, name: str, token: str) -> str | None:
    """Check, as an executor does, a folder that the driver prepared; return the fault, if any.

    Args:
        place: folder with the driver's file, and a lock that the driver holds.
        name: name of the file to write.
        token: content of the driver's file, and of the file to write.
    """
    steps = (partial(_require_token, place, token), partial(_require_locked, place), partial(_require_links, place, name))
    try:
        for step in steps:
            if fault := step():
                return f"on {socket.gethostname()}, {fault}"
        fresh = place / f"{name}.new"
        fresh.write_text(token)
        fresh.rename(place / name)
    except OSError as error:
        return f"on {socket.gethostname()}, {error}"
    return None


def _require_token(place: Path, token: str) -> str | None:
    return None if (place / _TOKEN).read_text() == token else "a file of the driver has other content"


def _require_locked(place: Path) -> str | None:
    with (place / _LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
    return "a lock that the driver holds can be taken: locks are not shared"


def _require_links(place: Path, name: str) -> str | None:
    own = place / f"{name}.link"
    own.write_text(name)
    try:
        os.link(own, place / _TOKEN)
    except FileExistsError:
        return None
    return "a hard link replaces a file"


def cause_in_executor(error: Exception) -> str:
    """Return the line of Spark's error that names the cause in an executor, at most 400 characters.

    Spark puts what a Python process wrote before its end between two fixed lines. The remaining lines are
    exceptions of the JVM with their stack traces.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    if _WRITTEN_BY_PYTHON in lines:
        written = lines[lines.index(_WRITTEN_BY_PYTHON) + 1 :]
        written = [line for line in written[: written.index(_PATH_OF_PYTHON) if _PATH_OF_PYTHON in written else None] if line]
        raised = [line for line in written if _RAISED.match(line)]
        found = raised or written
    else:
        found = [line for line in lines if "Error" in line and not line.startswith("at ")]
    return (found[-1] if found else first_line(error))[:400]
