"""Spark standalone cluster on the loopback: a master and workers, as other hosts would run them.

Workers have their own working folders, temporary folders and environment, so that a task that needs
those of the driver fails.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleetpulse.io.spark.cluster import PORTS
from fleetpulse.io.spark.jars import spark_home
from fleetpulse.io.spark.java import find_java
from tests.support.wait import await_that

FIRST_PORT = 20_000  # of drivers and executors
_PATIENCE_S = 180
_DAEMON = ("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_STARTED = re.compile(r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")


@dataclass(frozen=True, slots=True)
class SparkCluster:
    """Running cluster.

    Attributes:
        master: address of the master.
        secret: file of the secret.
        workers: processes of the workers.
        place: folder for the files of the master and the workers.
    """

    master: str
    secret: Path
    workers: tuple["subprocess.Popen[str]", ...]
    place: Path

    def settings(self) -> Mapping[str, str]:
        """Return the environment that makes the commands use the cluster."""
        return {
            "FLEET_SPARK_MASTER": self.master,
            "FLEET_SPARK_KEY": str(self.secret),
            "FLEET_EXECUTORS": str(len(self.workers)),
            "FLEET_EXECUTOR_MEMORY": "512m",
            "FLEET_SPARK_PORT": str(FIRST_PORT),
        }

    def applications(self) -> int:
        """Return the number of applications that have had an executor."""
        return len({path.name for path in self.place.glob("worker-*/work/app-*")})

    def executors(self, worker: int) -> list[psutil.Process]:
        """Return the running executors of a worker."""
        return psutil.Process(self.workers[worker].pid).children()

    def ports(self, kind: int, process: psutil.Process) -> set[int]:
        """Return the ports of a kind on which a process listens: drivers, blocks of drivers, blocks of executors."""
        each = PORTS // 3
        taken = {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        return taken & {*range(FIRST_PORT + kind * each, FIRST_PORT + (kind + 1) * each)}

    def kill(self, worker: int) -> None:
        """Kill a worker with its executors and their Python processes."""
        whole = psutil.Process(self.workers[worker].pid)
        killed = [whole, *whole.children(recursive=True)]
        for process in killed:
            process.kill()
        psutil.wait_procs(killed, timeout=20)


@contextmanager
def spark_cluster(place: Path, workers: int = 2) -> Iterator[SparkCluster]:
    """Run a cluster: workers of one core and 768 MB each.

    Args:
        place: folder for the files of the master and the workers.
        workers: number of workers.
    """
    configuration, secret = place / "conf", place / "secret"
    configuration.mkdir(parents=True)
    secret.touch(0o600)
    secret.write_text(f"{secrets.token_hex(32)}\n")
    defaults = configuration / "spark-defaults.conf"
    defaults.touch(0o600)
    defaults.write_text(
        "spark.authenticate true\n"
        f"spark.authenticate.secret {secret.read_text().strip()}\n"
        "spark.network.crypto.enabled true\n"
        "spark.network.crypto.cipher AES/GCM/NoPadding\n"
        "spark.master.rest.enabled false\n"  # it would accept jobs from anybody
    )
    (configuration / "java-opts").write_text("-XX:TieredStopAtLevel=1\n")  # options of executors, too, see tests/conftest.py
    started: list[subprocess.Popen[str]] = []
    try:
        started.append(_start(place / "master", configuration, "master.Master"))
        log = place / "master" / "log"
        found = await_that(lambda: _STARTED.search(log.read_text()), limit_s=_PATIENCE_S, what="the master", by=started[0])
        assert found is not None, "await_that returns a true value"
        master = found[1]
        for number in range(workers):
            work = place / f"worker-{number}"
            sizes = ("--cores", "1", "--memory", "768m", "--work-dir", str(work / "work"))
            started.append(_start(work, configuration, "worker.Worker", *sizes, master))
        yield SparkCluster(master, secret, tuple(started[1:]), place)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _start(place: Path, configuration: Path, part: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a part of the cluster in its own folder, with nothing of this process's environment."""
    for folder in (place / "tmp", place / "local"):
        folder.mkdir(parents=True)
    java, spark = find_java(), spark_home()
    environment = {
        "HOME": str(place),
        "JAVA_HOME": str(java),
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
        "SPARK_CONF_DIR": str(configuration),
        "SPARK_HOME": str(spark),
        "SPARK_LOCAL_DIRS": str(place / "local"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SCALA_VERSION": "2.13",  # the scripts of Spark set it; without it, no executor starts
        "TMPDIR": str(place / "tmp"),
    }
    classes = os.pathsep.join((str(configuration), str(spark / "jars" / "*")))
    options = (*_DAEMON, f"-Djava.io.tmpdir={place / 'tmp'}", "-cp", classes)
    address = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with (place / "log").open("w") as log:
        return subprocess.Popen(
            [str(java / "bin" / "java"), *options, f"org.apache.spark.deploy.{part}", *address, *arguments],
            cwd=place,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
