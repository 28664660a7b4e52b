"""Spark standalone cluster on the loopback, and its drivers.

Where possible, each part and the drivers run as on separate hosts (see `foreign_host`): they share only
the installation and the folder `SparkCluster.shared`.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleetpulse.io.spark.cluster import PORTS
from fleetpulse.io.spark.standalone import StandaloneCluster
from fleetpulse.paths import ROOT
from tests.support.foreign_host import NO_HOME, ForeignHost, Unavailable
from tests.support.processes import register_process
from tests.support.wait import PATIENCE_S

FIRST_PORT = 20_000  # first port of drivers and executors


@dataclass(frozen=True, slots=True)
class SparkCluster:
    """Running cluster, and the host of its drivers.

    Attributes:
        parts: master and workers.
        shared: folder that all hosts share, for homes.
        driver: folder of the drivers' host, for temporary files.
        host: maker of processes as on other hosts; None if it is unavailable.
        unavailable: the reason for that; empty if ``host`` is set.
    """

    parts: StandaloneCluster
    shared: Path
    driver: Path
    host: ForeignHost | None
    unavailable: str

    def share(self, folder: Path) -> None:
        """Make the user of the cluster the owner of a shared folder and of all files below it."""
        if self.host is not None:
            self.host.give(folder)

    def settings(self) -> Mapping[str, str]:
        """Return the environment that makes the commands use the cluster."""
        chosen = {**self.parts.settings(), "spark_port": FIRST_PORT}
        return {f"FLEET_{name.upper()}": str(value) for name, value in chosen.items()}

    def ports(self, kind: int, process: psutil.Process) -> set[int]:
        """Return the ports of a kind on which a process listens: drivers (0), their blocks (1), executors' blocks (2)."""
        each = PORTS // 3
        taken = {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        return taken & {*range(FIRST_PORT + kind * each, FIRST_PORT + (kind + 1) * each)}

    def run_driver(
        self, command: Sequence[str], environment: Mapping[str, str], limit_s: float = PATIENCE_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the driver's host to its end."""
        started = self.start_driver(command, environment, subprocess.PIPE)
        output, errors = started.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(command, started.returncode, output, errors)

    def start_driver(
        self, command: Sequence[str], environment: Mapping[str, str], errors: int = subprocess.STDOUT
    ) -> "subprocess.Popen[str]":
        """Start a command on the driver's host."""
        places = {"HOME": str(self.driver), "TMPDIR": str(self.driver / "tmp"), "FLEET_STARTS": str(self.driver / "starts")}
        whole = {**os.environ, **environment, **places, "PYTHONPATH": str(ROOT)}
        if self.host is not None:
            command = self.host.command(command, [self.driver, self.shared], ROOT)
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=whole, cwd=ROOT)
        return register_process(started)


@contextmanager
def spark_cluster(place: Path) -> Iterator[SparkCluster]:
    """Run a cluster of two workers.

    Args:
        place: new folder for the files of all hosts.
    """
    shared, driver, parts = place / "shared", place / "driver", place / "parts"
    for folder in (shared, driver / "tmp", parts):
        folder.mkdir(parents=True)
    host, reason = None, ""
    try:
        host = ForeignHost(place)
    except Unavailable as error:
        reason = str(error)

    def launcher(command: Sequence[str], own: Path) -> Sequence[str]:
        if host is None:
            return command
        for folder in (shared, driver, own, parts / "conf"):
            host.give(folder)
        return host.command(command, [own, parts / "conf", shared], Path("/"))

    try:
        with StandaloneCluster(parts, shared / "secret", launcher=launcher, home=NO_HOME) as cluster:
            yield SparkCluster(cluster, shared, driver, host, reason)
    finally:
        if (counted := os.environ.get("FLEET_STARTS")) and (driver / "starts").exists():
            with Path(counted).open("a") as starts:
                starts.write((driver / "starts").read_text())
