"""Standalone cluster on the loopback: master and workers of the pinned Spark, for tests and chaos.

Rule 1: each part has folders and an environment of its own, so that a task that needs those of the
driver fails. On Linux, each worker also has an address of its own: executors at one address read each
other's shuffle files from the disk.
Rule 2: all parts share a secret, which is in files of mode 600 and on no command line.
Rule 3: the parts end with the thread that started them.
"""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from fleetpulse.core.errors import FleetError
from fleetpulse.io.spark.jars import spark_home
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.system.process import command_with_parent_death_signal
from fleetpulse.io.system.secret_files import write_secret

EXECUTOR_MEMORY: Final = "512m"
_WORKER_MEMORY: Final = "768m"  # one executor, and the memory that Spark adds to its heap
_PATIENCE_S: Final = 180.0
_STOP_S: Final = 20.0
_POLL_S: Final = 0.1
_LOOPBACK: Final = "127.0.0.1"
_DAEMON: Final = ("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_STARTED: Final = re.compile(r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")
_EXECUTOR: Final = "org.apache.spark.executor.CoarseGrainedExecutorBackend"

Launcher = Callable[[Sequence[str], Path], Sequence[str]]


def _ending_with_this_thread(command: Sequence[str], _: Path) -> Sequence[str]:
    return command_with_parent_death_signal(command)


class StandaloneCluster:
    """Running cluster; a context manager that ends all of its processes.

    Args:
        place: new folder for the files of the parts.
        secret: path of the secret, which is created.
        workers: number of workers, each with one core and the memory of one executor.
        launcher: function that returns the command line of a part from its command and its folder.
        home: value of HOME of the parts; None for their folders.

    Attributes:
        master: address of the master; empty before the start.
        secret: path of the secret.
        place: folder for the files of the parts.
        configuration: folder of Spark's configuration, below ``place``.
        workers: processes of the workers.
    """

    def __init__(
        self,
        place: Path,
        secret: Path,
        workers: int = 2,
        launcher: Launcher = _ending_with_this_thread,
        home: Path | None = None,
    ) -> None:
        self.master = ""
        self.secret = secret
        self.place = place
        self.configuration = place / "conf"
        self.workers: list[subprocess.Popen[bytes]] = []
        self._count = workers
        self._launcher = launcher
        self._home = home
        self._parts: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Start the master and the workers.

        Raises:
            FleetError: the master has not started within three minutes.
        """
        self.configuration.mkdir(parents=True)
        write_secret(self.secret, f"{secrets.token_hex(32)}\n")
        write_secret(
            self.configuration / "spark-defaults.conf",
            "spark.authenticate true\n"
            f"spark.authenticate.secret {self.secret.read_text().strip()}\n"
            "spark.network.crypto.enabled true\n"
            "spark.network.crypto.cipher AES/GCM/NoPadding\n"
            "spark.master.rest.enabled false\nspark.ui.killEnabled false\n",  # they obey anybody
        )
        (self.configuration / "java-opts").write_text("-XX:TieredStopAtLevel=1\n")  # also for executors: they run briefly
        try:
            self.master = self._await_master(self._start("master", _LOOPBACK, "master.Master"))
            self.workers = [self._start_worker(number) for number in range(self._count)]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End all parts, with their executors."""
        self._stop()

    def settings(self) -> Mapping[str, str | int]:
        """Return the settings of a home that uses the cluster."""
        return {
            "spark_master": self.master,
            "spark_key": str(self.secret),
            "executors": self._count,
            "executor_memory": EXECUTOR_MEMORY,
        }

    def applications(self) -> int:
        """Return the number of applications that have had an executor."""
        return len({path.name for path in self.place.glob("worker-*/work/app-*")})

    def executors(self, worker: int) -> list[psutil.Process]:
        """Return the running executors of a worker, including those that are ending."""
        try:
            return [one for one in psutil.Process(self.workers[worker].pid).children() if _is_executor(one)]
        except psutil.NoSuchProcess:
            return []

    def kill_worker(self, worker: int) -> None:
        """Kill a worker with its executors and their Python processes, as if its host were lost."""
        whole = psutil.Process(self.workers[worker].pid)
        killed = [whole, *whole.children(recursive=True)]
        for process in killed:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(killed, timeout=_STOP_S)

    def restart_worker(self, worker: int) -> None:
        """Start a worker again that was killed."""
        self.workers[worker] = self._start_worker(worker)

    def _start_worker(self, number: int) -> "subprocess.Popen[bytes]":
        work = str(self.place / f"worker-{number}" / "work")
        sizes = ("--cores", "1", "--memory", _WORKER_MEMORY, "--work-dir", work)
        address = f"127.0.0.{number + 2}" if sys.platform == "linux" else _LOOPBACK
        return self._start(f"worker-{number}", address, "worker.Worker", *sizes, self.master)

    def _start(self, name: str, address: str, part: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a part in its own folder; of this process's environment, it gets only ``PATH``."""
        place = self.place / name
        for folder in (place / "tmp", place / "local"):
            folder.mkdir(parents=True, exist_ok=True)
        java, spark = find_java(), spark_home()
        environment = {
            "HOME": str(self._home or place),
            "JAVA_HOME": str(java),
            "LANG": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "SPARK_CONF_DIR": str(self.configuration),
            "SPARK_HOME": str(spark),
            "SPARK_LOCAL_DIRS": str(place / "local"),
            "SPARK_LOCAL_IP": address,
            "SPARK_SCALA_VERSION": "2.13",  # the scripts of Spark set it; without it, no executor starts
            "TMPDIR": str(place / "tmp"),
        }
        classes = os.pathsep.join((str(self.configuration), str(spark / "jars" / "*")))
        options = (*_DAEMON, f"-Djava.io.tmpdir={place / 'tmp'}", "-cp", classes)
        listening = ("--host", address, "--port", "0", "--webui-port", "0")
        command = [str(java / "bin" / "java"), *options, f"org.apache.spark.deploy.{part}", *listening, *arguments]
        with (place / "log").open("ab") as log:
            process = subprocess.Popen(
                self._launcher(command, place),
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                umask=0o077,
                start_new_session=True,  # keeps Ctrl-C from the cluster: the job stops first
            )
        self._parts.append(process)
        return process

    def _await_master(self, process: "subprocess.Popen[bytes]") -> str:
        log, limit_s = self.place / "master" / "log", time.monotonic() + _PATIENCE_S
        while (found := _STARTED.search(log.read_text(errors="replace"))) is None:
            if process.poll() is not None or time.monotonic() > limit_s:
                raise FleetError(
                    f'the Spark master did not start within {_PATIENCE_S:.0f} s; see its log "{log}"', code="spark-master-ended"
                )
            time.sleep(_POLL_S)
        return found[1]

    def _stop(self) -> None:
        for process in reversed(self._parts):
            process.terminate()
        for process in reversed(self._parts):
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_executor(process: psutil.Process) -> bool:
    try:
        return _EXECUTOR in process.cmdline()
    except psutil.Error:
        return False
