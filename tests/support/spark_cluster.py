"""Spark clusters on the loopback, and their drivers: a standalone cluster, and executors in pods.

Where possible, each part and the drivers run as on separate hosts (see `foreign_host`): they share only
the installation and the folder `Hosts.shared`.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleetpulse.core.rows import Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.cluster import PORTS
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.spark.standalone import EXECUTOR_MEMORY, StandaloneCluster
from fleetpulse.io.system.secret_files import write_secret
from fleetpulse.io.tables import tables
from fleetpulse.paths import ROOT, cache_dir
from tests.support.fleet_command import fleet_command
from tests.support.foreign_host import NO_HOME, ForeignHost, Unavailable
from tests.support.histories.streams import DEPLOYMENT, history, land
from tests.support.kubernetes_api import FakeKubernetes
from tests.support.processes import register_process
from tests.support.wait import PATIENCE_S, await_that

FIRST_PORT = 20_000  # first port of drivers and executors
NAMESPACE, DRIVER_POD, IMAGE = "fleetpulse", "lifecycle-0", "registry.example/fleetpulse:0.1.0"
TEMPLATE = ROOT / "infra" / "kubernetes" / "executors" / "executor.yaml"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Host of the drivers, and those of the other parts.

    Attributes:
        shared: folder that all hosts share, for homes.
        driver: folder of the drivers' host, for temporary files.
        host: maker of processes as on other hosts; None if it is unavailable.
        unavailable: the reason for that; empty if ``host`` is set.
    """

    shared: Path
    driver: Path
    host: ForeignHost | None
    unavailable: str

    def share(self, folder: Path) -> None:
        """Make the user of the cluster the owner of a shared folder and of all files below it."""
        if self.host is not None:
            self.host.give(folder)

    def launch(self, command: Sequence[str], own: Path, configuration: Sequence[Path] = ()) -> Sequence[str]:
        """Return the command line that runs a part on a host of its own, with its own folder."""
        if self.host is None:
            return command
        for folder in (self.shared, self.driver, own, *configuration):
            self.host.give(folder)
        return self.host.command(command, [own, *configuration, self.shared], Path("/"))

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


@dataclass(frozen=True, slots=True)
class SparkCluster(Hosts):
    """Running standalone cluster.

    Attributes:
        parts: master and workers.
    """

    parts: StandaloneCluster

    def settings(self) -> Mapping[str, str]:
        """Return the environment that makes the commands use the cluster."""
        return _environment({**self.parts.settings(), "spark_port": FIRST_PORT})


@dataclass(frozen=True, slots=True)
class PodCluster(Hosts):
    """Running fake Kubernetes.

    Attributes:
        kubernetes: API server and kubelet.
        secret: path of the secret, which all pods mount.
        template: template of the pods of executors.
    """

    kubernetes: FakeKubernetes
    secret: Path
    template: Path

    def settings(self) -> Mapping[str, str]:
        """Return the environment that makes the commands use the cluster."""
        chosen: dict[str, str | int] = {
            "spark_master": f"k8s://{self.kubernetes.address}",
            "spark_key": str(self.secret),
            "spark_port": FIRST_PORT,
            "driver_host": "127.0.0.1",
            "driver_pod": DRIVER_POD,
            "executors": 2,
            "executor_memory": EXECUTOR_MEMORY,
            "executor_overhead": EXECUTOR_MEMORY,
            "executor_image": IMAGE,
            "executor_namespace": NAMESPACE,
            "executor_template": str(self.template),
        }
        return _environment(chosen)


def _environment(chosen: Mapping[str, str | int]) -> dict[str, str]:
    return {f"FLEET_{name.upper()}": str(value) for name, value in chosen.items()}


def _hosts(place: Path) -> Hosts:
    """Make the folders of all hosts below a new folder."""
    shared, driver = place / "shared", place / "driver"
    for folder in (shared, driver / "tmp", place / "parts"):
        folder.mkdir(parents=True)
    try:
        host = ForeignHost(place)
        host.give(driver)
        return Hosts(shared, driver, host, "")
    except Unavailable as error:
        return Hosts(shared, driver, None, str(error))


@contextmanager
def _counting_starts(driver: Path) -> Iterator[None]:
    """Count the Spark sessions of drivers, which have a file of their own, with those of the tests."""
    try:
        yield
    finally:
        if (counted := os.environ.get("FLEET_STARTS")) and (driver / "starts").exists():
            with Path(counted).open("a") as starts:
                starts.write((driver / "starts").read_text())


@contextmanager
def spark_cluster(place: Path) -> Iterator[SparkCluster]:
    """Run a standalone cluster of two workers.

    Args:
        place: new folder for the files of all hosts.
    """
    hosts, parts = _hosts(place), place / "parts"

    def launcher(command: Sequence[str], own: Path) -> Sequence[str]:
        return hosts.launch(command, own, [parts / "conf"])

    with (
        _counting_starts(hosts.driver),
        StandaloneCluster(parts, hosts.shared / "secret", launcher=launcher, home=NO_HOME) as cluster,
    ):
        yield SparkCluster(hosts.shared, hosts.driver, hosts.host, hosts.unavailable, cluster)


def localized(manifest: str, shared: Path) -> str:
    """Return a manifest with paths of this machine in place of those of the pods."""
    paths = {"/opt/fleetpulse": ROOT, "/etc/fleetpulse/secrets": shared / "secrets", "/var/lib/fleetpulse": shared}
    for path, own in paths.items():
        assert path in manifest
        manifest = manifest.replace(path, str(own))
    return manifest


@contextmanager
def pod_cluster(place: Path) -> Iterator[PodCluster]:
    """Run a fake Kubernetes with a pod for drivers, whose processes the tests start themselves.

    The template is that of the manifests, with the paths of this machine.

    Args:
        place: new folder for the files of all hosts.
    """
    hosts = _hosts(place)
    secret, template = hosts.shared / "secrets" / "spark_key", hosts.shared / "executor.yaml"
    secret.parent.mkdir(mode=0o700)
    write_secret(secret, f"{secrets.token_hex(32)}\n")
    text = localized(TEMPLATE.read_text(), hosts.shared)
    template.write_text(text)
    hosts.share(hosts.shared)
    image = {
        "FLEET_CACHE": str(cache_dir().absolute()),
        "FLEET_PYTHON": sys.executable,
        "HOME": str(NO_HOME),
        "JAVA_HOME": str(find_java()),
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1",  # executors run briefly
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
        **{name: value for name in ("NUMBA_CACHE_DIR",) if (value := os.environ.get(name))},
    }
    with _counting_starts(hosts.driver), FakeKubernetes(place / "parts", image, hosts.launch) as kubernetes:
        template_map = {"metadata": {"name": "fleetpulse-executor"}, "data": {template.name: text}}
        kubernetes.objects.put("configmaps", NAMESPACE, {"apiVersion": "v1", "kind": "ConfigMap", **template_map})
        kubernetes.objects.put(
            "pods",
            NAMESPACE,
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": DRIVER_POD}, "status": {"phase": "Running"}},
        )
        yield PodCluster(hosts.shared, hosts.driver, hosts.host, hosts.unavailable, kubernetes, secret, template)


def has_judged(home: Home, received_at_ms: int) -> bool:
    """Return whether the job has judged all rows received up to an instant."""
    return (judged_ms(home.checkpoint) or 0) >= received_at_ms


def start_job(cluster: "SparkCluster | PodCluster") -> tuple[Home, list[Row], int, subprocess.Popen[str]]:
    """Start a job on a cluster, and wait until it has judged the first half of a history.

    Returns:
        Home of the job, rows of the history, number of rows that have landed, and the job.
    """
    home, rows = Home(cluster.shared / "home"), history(7)
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    cut = len(rows) // 2
    land(home, rows[:cut], 1)
    cluster.share(home.path)
    job = cluster.start_driver(fleet_command("job", "lifecycle", "--home", str(home.path)), cluster.settings())
    await_that(lambda: has_judged(home, rows[cut - 1].received_at_ms), what="the first batch", by=job)
    return home, rows, cut, job
