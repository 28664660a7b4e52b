"""Spark standalone cluster on the loopback: a master and workers, as other hosts would run them.

Workers have their own working folders, temporary folders and environment, so that a task that needs
those of the driver fails. Where possible, all parts and the driver run as on hosts of their own (see
`foreign_host`): they share the installation and the folder `SparkCluster.shared` only.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleetpulse.io.spark.cluster import PORTS
from fleetpulse.io.spark.jars import spark_home
from fleetpulse.io.spark.java import find_java
from fleetpulse.paths import ROOT
from tests.support.foreign_host import ForeignHost, unavailable
from tests.support.processes import register_process
from tests.support.wait import PATIENCE_S, await_that

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
        host: maker of processes as on other hosts; None if it is unavailable.
    """

    master: str
    secret: Path
    workers: tuple["subprocess.Popen[str]", ...]
    place: Path
    host: ForeignHost | None

    @property
    def shared(self) -> Path:
        """Folder that all hosts share, for homes."""
        return self.place / "shared"

    def share(self, home: Path) -> None:
        """Give a home in the shared folder, and all that this process has written to it, to the user of the cluster."""
        if self.host is not None:
            self.host.give(home)

    def run_driver(self, command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        """Run a command on the driver's host to its end."""
        started = self.start_driver(command, environment, subprocess.PIPE)
        output, errors = started.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(command, started.returncode, output, errors)

    def start_driver(
        self, command: Sequence[str], environment: Mapping[str, str], errors: int = subprocess.STDOUT
    ) -> "subprocess.Popen[str]":
        """Start a command on the driver's host."""
        folder = self.place / "driver"
        places = {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "FLEET_STARTS": str(folder / "starts")}
        whole = {**os.environ, **environment, **places, "PYTHONPATH": str(ROOT)}
        if self.host is not None:
            command = self.host.command(command, [folder, self.shared], ROOT)
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=whole, cwd=ROOT)
        return register_process(started)

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
    configuration, secret = place / "conf", place / "shared" / "secret"
    for folder in (configuration, secret.parent, place / "driver" / "tmp"):
        folder.mkdir(parents=True)
    host = None if unavailable() else ForeignHost(place)
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
    for folder in (configuration, secret.parent, place / "driver"):
        if host is not None:
            host.give(folder)
    started: list[subprocess.Popen[str]] = []
    try:
        started.append(_start(host, place / "master", configuration, "master.Master"))
        log = place / "master" / "log"
        found = await_that(lambda: _STARTED.search(log.read_text()), limit_s=_PATIENCE_S, what="the master", by=started[0])
        assert found is not None, "await_that returns a true value"
        master = found[1]
        for number in range(workers):
            work = place / f"worker-{number}"
            sizes = ("--cores", "1", "--memory", "768m", "--work-dir", str(work / "work"))
            started.append(_start(host, work, configuration, "worker.Worker", *sizes, master))
        yield SparkCluster(master, secret, tuple(started[1:]), place, host)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        if (counted := os.environ.get("FLEET_STARTS")) and (place / "driver" / "starts").exists():
            with Path(counted).open("a") as starts:
                starts.write((place / "driver" / "starts").read_text())


def _start(host: ForeignHost | None, place: Path, configuration: Path, part: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a part of the cluster in its own folder, with nothing of this process's environment."""
    for folder in (place / "tmp", place / "local"):
        folder.mkdir(parents=True)
    java, spark = find_java(), spark_home()
    environment = {
        "HOME": "/nonexistent",
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
    command = [str(java / "bin" / "java"), *options, f"org.apache.spark.deploy.{part}", *address, *arguments]
    if host is not None:
        host.give(place)
        command = host.command(command, [place, configuration, place.parent / "shared"], Path("/"))
    with (place / "log").open("w") as log:
        return subprocess.Popen(command, cwd="/", env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, umask=0o077)
