"""Pool of warm JVMs: a driver of Spark that a test starts leases one instead of starting its own.

A JVM that has run a driver before has loaded and compiled Spark's classes. The pool is a process of
the test runner; it ends, with its JVMs, when its standard input closes. A test that needs a JVM of its
own removes the variable `LEASES_JVMS`.

Rule: a lease ends in one of two ways. If the driver has stopped its context, another driver with the
same options may lease the JVM. Otherwise the driver was killed, and the pool kills the JVM, as it
would have ended with its driver.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from py4j.clientserver import ClientServer, JavaParameters, PythonParameters

from cli.dev import jvm_lease
from cli.dev.jvm_lease import CONNECTION, LEASES, LEASES_JVMS, SOCKET
from fleetpulse.paths import ROOT

# Bash reads this file before each script.
_BASH: Final = """\
if [[ $0 == */bin/spark-class && ${{1-}} == org.apache.spark.deploy.SparkSubmit && -n ${{{connection}-}} ]]; then
    exec {python} -ISE {lease} "$0" "$@"
fi
"""
# Settings that the JVM reads when it starts. All other ones reach it with the context of each driver.
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_AT_START: Final = ("spark.driver.memory", "spark.driver.extraClassPath", _JAVA_OPTIONS)
_TEMPORARY: Final = "-Djava.io.tmpdir="
# Variables that Python workers, which the JVM starts, may read. Others do not distinguish JVMs.
_READ_BY_WORKERS: Final = (
    "PYTHON",
    "PYSPARK_",
    "NUMBA_",
    "SPARK_",
    "HADOOP_",
    "JAVA_HOME",
    "AWS_",
    "HOME",
    "TMPDIR",
    "FLEET_CACHE",
)
_OF_ONE_DRIVER: Final = "SPARK_LOCAL_DIRS"
_MAX_IDLE: Final = 3
_MAX_LEASES: Final = 25  # so that the leaks of many drivers do not add up
_CHECKED_S: Final = 20.0
_ENDS_S: Final = 60.0  # timeout for the pool to end its JVMs


@dataclass
class Jvm:
    """JVM of the pool.

    Attributes:
        process: its process.
        key: options and variables with which it was started.
        place: folder of its temporary files.
        output: descriptor that receives its output; None discards it.
        port: port of PySpark's gateway.
        secret: secret of the gateway.
        leases: number of drivers that have leased it.
        lock: lock of `output`.
    """

    process: "subprocess.Popen[bytes]"
    key: str
    place: Path
    output: int | None
    port: int = 0
    secret: str = ""
    leases: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def redirect(self, output: int | None) -> None:
        """Write further output to a descriptor, and close the previous one."""
        with self.lock:
            if self.output is not None:
                os.close(self.output)
            self.output = output

    def copy_output(self) -> None:
        """Copy the output to the present descriptor until the JVM ends."""
        assert self.process.stdout is not None
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            with self.lock, suppress(OSError):  # the reader has ended
                if self.output is not None:
                    os.write(self.output, chunk)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the JVM and its Python workers; 0 if it has ended."""
        if self.process.poll() is not None:
            return 0.0
        try:
            whole = psutil.Process(self.process.pid)
            return sum(sum(one.cpu_times()[:4]) for one in (whole, *whole.children(recursive=True)))
        except psutil.Error:
            return 0.0

    def clear(self) -> bool:
        """Remove what a stopped context has left; return whether there is no active context."""
        gateway = ClientServer(JavaParameters(port=self.port, auth_token=self.secret), PythonParameters(port=0, eager_load=False))
        try:
            java: Any = gateway.jvm
            spark = java.org.apache.spark
            if not _singleton(spark, "SparkContext").getActive().isEmpty():
                return False
            _singleton(spark.sql.execution.streaming.state, "StateStore").stop()
            _singleton(spark.sql.delta, "DeltaLog").clearCache()
        finally:
            gateway.close()
        for left in self.place.glob("local/*"):
            shutil.rmtree(left)  # copies of state: the next driver must read it from the checkpoint
        return True

    def kill(self) -> None:
        """Kill the JVM and its Python workers."""
        if self.process.poll() is None:  # otherwise another process may have its id
            with suppress(psutil.NoSuchProcess):
                whole = psutil.Process(self.process.pid)
                for one in [whole, *whole.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
            self.process.wait(_CHECKED_S)
        self.redirect(None)


def _singleton(package: Any, name: str) -> Any:
    """Return an object of Scala; those of its methods that are private to Spark have no other name in Java."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def _record(environment: Mapping[str, str], cpu_s: float) -> None:
    """Append the CPU seconds of a lease to the file of the part that started the driver; `tests.support.reporting` reads it."""
    if starts := environment.get("FLEET_STARTS"):
        with suppress(OSError), Path(starts).with_name(LEASES).open("a") as file:
            file.write(f"{max(0.0, cpu_s):.2f}\n")


def _key(settings: Mapping[str, str], environment: Mapping[str, str]) -> str:
    read = {name: value for name, value in environment.items() if name.startswith(_READ_BY_WORKERS) and name != _OF_ONE_DRIVER}
    path = dict.fromkeys(environment.get("PYTHONPATH", "").split(os.pathsep))
    variables = {**read, "PYTHONPATH": os.pathsep.join(path)}
    return json.dumps([settings, variables], sort_keys=True)


def _settings(command: Sequence[str]) -> dict[str, str]:
    """Return the settings of a command line that a JVM reads at its start, without the folder of temporary files."""
    given = [one.partition("=") for one in command]
    settings = {name: value for name, _, value in given if name in _AT_START}
    options = shlex.split(settings.get(_JAVA_OPTIONS, ""))
    return {**settings, _JAVA_OPTIONS: shlex.join(one for one in options if not one.startswith(_TEMPORARY))}


class Pool:
    """Pool of JVMs that drivers lease through a socket.

    Args:
        folder: folder for the temporary files of the JVMs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: list[Jvm] = []
        self._all: list[Jvm] = []
        self._lock = threading.Lock()
        self._checks = ThreadPoolExecutor()

    def serve(self, server: socket.socket) -> None:
        """Accept drivers until the socket is closed."""
        while True:
            try:
                driver, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(driver,), daemon=True).start()

    def _serve(self, driver: socket.socket) -> None:
        with driver:
            header, outputs, _, _ = socket.recv_fds(driver, 4, 1)
            if not outputs:  # the driver was killed
                return
            with driver.makefile("rb") as reader:
                content = reader.read(size := int.from_bytes(header, "big"))
                if len(content) < size:
                    os.close(outputs[0])
                    return
                request = json.loads(content)
                jvm = self._lease(request["command"], request["environment"], outputs[0])
                if jvm is None:
                    return
                before_s = jvm.cpu_s()
                with suppress(OSError):  # the driver has ended
                    driver.sendall(json.dumps({"port": jvm.port, "secret": jvm.secret}).encode() + b"\n")
                    reader.read()
        _record(request["environment"], jvm.cpu_s() - before_s)
        self._take_back(jvm)

    def _lease(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> Jvm | None:
        settings = _settings(command)
        key = _key(settings, environment)
        with self._lock:
            jvm = next((one for one in self._idle if one.key == key and one.process.poll() is None), None)
            if jvm:
                self._idle.remove(jvm)
        if jvm is not None:
            jvm.redirect(output)
        else:
            jvm = self._start(command[0], settings, environment, key, output)
        if jvm is not None:
            jvm.leases += 1
        return jvm

    def _start(
        self, script: str, settings: Mapping[str, str], environment: Mapping[str, str], key: str, output: int
    ) -> Jvm | None:
        """Start a JVM; return None if it ends at once."""
        place = Path(tempfile.mkdtemp(dir=self._folder))
        (place / "tmp").mkdir()
        given = {**settings, _JAVA_OPTIONS: f"{settings[_JAVA_OPTIONS]} {_TEMPORARY}{place / 'tmp'}"}
        arguments = [one for name, value in given.items() for one in ("--conf", f"{name}={value}")]
        connection = place / "connection"
        own = {CONNECTION: str(connection), "SPARK_LOCAL_DIRS": str(place / "local")}
        process = subprocess.Popen(
            [script, "org.apache.spark.deploy.SparkSubmit", *arguments, "pyspark-shell"],
            stdin=subprocess.PIPE,  # the JVM ends when it is closed
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in {**environment, **own}.items() if name not in {LEASES_JVMS, SOCKET}},
            start_new_session=True,
        )
        jvm = Jvm(process, key, place, output)
        copying = threading.Thread(target=jvm.copy_output, daemon=True)
        copying.start()
        with self._lock:
            self._all.append(jvm)
        while not connection.exists():
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            copying.join(_CHECKED_S)
            jvm.redirect(None)
            return None
        content = connection.read_bytes()
        jvm.port, jvm.secret = int.from_bytes(content[:4], "big"), content[8:].decode()
        return jvm

    def _take_back(self, jvm: Jvm) -> None:
        jvm.redirect(None)
        usable = False
        with suppress(Exception):  # whatever the reason: the JVM is not used again
            usable = jvm.leases < _MAX_LEASES and self._checks.submit(jvm.clear).result(_CHECKED_S)
        surplus: list[Jvm] = []
        with self._lock:
            if usable:
                self._idle.append(jvm)
                surplus = self._idle[:-_MAX_IDLE]
                del self._idle[:-_MAX_IDLE]
            else:
                surplus = [jvm]
        for one in surplus:
            one.kill()

    def end(self) -> None:
        """Kill all JVMs."""
        with self._lock:
            started, self._idle = [*self._all], []
        for one in started:
            one.kill()


@contextmanager
def pool_of_jvms(folder: Path) -> Iterator[dict[str, str]]:
    """Run a pool in a process of its own.

    Args:
        folder: folder for its socket.

    Yields:
        Variables with which a process leases JVMs; none if the pool cannot start, for a reason that it prints. Then each
        driver starts its own JVM.
    """
    path, script = folder / "pool", folder / "bash_env.sh"
    lease, python = shlex.quote(str(jvm_lease.__file__)), shlex.quote(sys.executable)
    script.write_text(_BASH.format(connection=CONNECTION, python=python, lease=lease))
    command = [sys.executable, "-P", "-m", __name__, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield {LEASES_JVMS: str(script), SOCKET: str(path)} if process.stdout.readline() else {}
        finally:
            process.stdin.close()
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its JVMs end, too: their standard inputs close
                process.wait()


def main(path: Path) -> None:
    """Run a pool until standard input closes.

    Args:
        path: path of its socket.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fleet-jvms-", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(str(path))
        server.listen()
        pool = Pool(Path(folder))
        threading.Thread(target=pool.serve, args=(server,), daemon=True).start()
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        try:
            sys.stdin.buffer.read()
        finally:
            pool.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
