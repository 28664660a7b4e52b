"""Warm JVMs of a test run: which driver leases which JVM, and which JVMs end."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cli.dev import jvm_lease
from cli.dev.jvm_lease import CONNECTION, LEASES, LEASES_JVMS, SOCKET
from cli.dev.jvm_pool import Jvm, Pool, pool_of_jvms
from tests.support.wait import await_that

pytestmark = pytest.mark.unit
# In place of Spark's script: a "JVM" that reports port 258, and its process id as the secret.
SPARK_CLASS = """#!/usr/bin/env bash
echo "started with $*"
[[ $* == *ends-at-once* ]] && exit 1
printf '\\0\\0\\1\\2\\0\\0\\0\\10%08d' $$ > "$_PYSPARK_DRIVER_CONN_INFO_PATH.new"
mv "$_PYSPARK_DRIVER_CONN_INFO_PATH.new" "$_PYSPARK_DRIVER_CONN_INFO_PATH"
exec cat
"""
SUBMIT = "org.apache.spark.deploy.SparkSubmit"


class Driver:
    """Driver that leases a JVM, or starts one.

    Args:
        place: folder for its files.
        script: path in place of Spark's ``spark-class``.
        pool: path of the pool's socket.
        settings: its settings of Spark.
    """

    def __init__(self, place: Path, script: Path, pool: Path, *settings: str) -> None:
        place.mkdir()
        self._connection = place / "connection"
        arguments = [word for one in settings for word in ("--conf", one)]
        self.process = subprocess.Popen(
            [sys.executable, "-ISE", jvm_lease.__file__, str(script), SUBMIT, *arguments, "pyspark-shell"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                CONNECTION: str(self._connection),
                SOCKET: str(pool),
                LEASES_JVMS: "",
                "FLEET_STARTS": str(place / "starts"),
            },
        )

    def jvm(self) -> int:
        """Return the process id of its JVM."""
        await_that(self._connection.exists, what="the connection")
        content = self._connection.read_bytes()
        assert content[:8] == b"\0\0\1\2\0\0\0\x08"
        return int(content[8:])

    @property
    def leases(self) -> Path:
        """File with the CPU seconds of its lease."""
        return self._connection.with_name(LEASES)

    def end(self) -> str:
        """End as a driver does; return the output of its JVM."""
        return self.process.communicate(timeout=30)[0]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "spark-class"
    path.parent.mkdir()
    path.write_text(SPARK_CLASS)
    path.chmod(0o755)
    return path


@pytest.fixture
def is_stopped(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Return whether contexts are stopped when a lease ends, to be changed by a test."""
    answer = {"stopped": True}
    monkeypatch.setattr(Jvm, "clear", lambda self: answer["stopped"])
    return answer


@pytest.fixture
def driver(tmp_path: Path, script: Path) -> Iterator[Callable[..., Driver]]:
    (tmp_path / "jvms").mkdir()
    path, started = tmp_path / "pool", list[Driver]()
    pool = Pool(tmp_path / "jvms")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        threading.Thread(target=pool.serve, args=(server,), daemon=True).start()

        def start(*settings: str) -> Driver:
            started.append(Driver(tmp_path / f"driver-{len(started)}", script, path, *settings))
            return started[-1]

        yield start
        for one in started:
            one.end()
        pool.end()


def _await_end(jvm: int) -> None:
    await_that(lambda: not psutil.pid_exists(jvm), what="the end of the JVM")


def test_a_driver_leases_the_jvm_of_an_earlier_one_with_the_same_options(
    driver: Callable[..., Driver], is_stopped: dict[str, bool]
) -> None:
    first = driver("spark.driver.memory=1g", "spark.app.name=first")
    jvm = first.jvm()
    beside = driver("spark.driver.memory=1g")
    assert beside.jvm() != jvm, "a JVM has one driver at a time"
    assert "started with" in first.end()
    assert 0 <= float(await_that(lambda: first.leases.exists() and first.leases.read_text(), what="its CPU time")) < 10
    await_that(lambda: _idle(driver, jvm), what="the JVM of the first driver")
    assert driver("spark.driver.memory=2g").jvm() not in {jvm, beside.jvm()}


def _idle(driver: Callable[..., Driver], jvm: int) -> bool:
    """Return whether a further driver leases this JVM."""
    further = driver("spark.driver.memory=1g", "spark.app.name=second")
    found = further.jvm() == jvm
    further.end()
    return found


def test_the_jvm_of_a_killed_driver_ends(driver: Callable[..., Driver], is_stopped: dict[str, bool]) -> None:
    killed = driver()
    jvm, is_stopped["stopped"] = killed.jvm(), False
    killed.process.kill()
    _await_end(jvm)


def test_a_jvm_that_ends_at_once_is_reported_to_its_driver_with_its_output(driver: Callable[..., Driver]) -> None:
    failed = driver("spark.driver.extraJavaOptions=-Dends-at-once")
    assert "ends-at-once" in failed.end()
    assert failed.process.returncode == 1


def test_without_a_pool_a_driver_starts_its_own_jvm(tmp_path: Path, script: Path) -> None:
    own = Driver(tmp_path / "own", script, tmp_path / "no pool")
    assert own.jvm() == own.process.pid
    own.end()


@pytest.mark.parametrize(
    "setting", ["spark.master=spark://localhost:7077", "spark.driver.extraJavaOptions=-XX:ArchiveClassesAtExit=new"]
)
def test_on_a_cluster_or_for_an_archive_of_classes_a_driver_starts_its_own_jvm(
    setting: str, driver: Callable[..., Driver]
) -> None:
    own = driver(setting)
    assert own.jvm() == own.process.pid
    assert own.end() == f"started with {SUBMIT} --conf {setting} pyspark-shell\n"


def test_bash_starts_a_lease_in_place_of_a_jvm_and_the_pool_ends_its_jvms(tmp_path: Path, script: Path) -> None:
    connection = tmp_path / "connection"
    with pool_of_jvms(tmp_path) as variables:
        environment = {**os.environ, **variables, CONNECTION: str(connection)}
        with subprocess.Popen([script, SUBMIT, "pyspark-shell"], stdin=subprocess.PIPE, env=environment) as lease:
            await_that(connection.exists, what="the connection")
            jvm = int(connection.read_bytes()[8:])
            assert jvm != lease.pid and psutil.pid_exists(jvm)
            assert "cat" in psutil.Process(jvm).name()
    _await_end(jvm)


def test_without_a_socket_each_driver_starts_its_own_jvm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / ("too-long" * 20)
    place.mkdir()
    with pool_of_jvms(place) as variables:
        assert variables == {}
    assert "path too long" in capfd.readouterr().err


def test_the_folder_of_temporary_files_is_that_of_the_jvm_wherever_its_option_stands(
    driver: Callable[..., Driver], is_stopped: dict[str, bool], tmp_path: Path
) -> None:
    options = "spark.driver.extraJavaOptions=-Dkept=yes -Djava.io.tmpdir=/of/the/driver"
    with_options = driver(options, "spark.driver.extraClassPath=/some.jar")
    with_options.jvm()
    started = with_options.end()
    assert f"--conf spark.driver.extraJavaOptions=-Dkept=yes -Djava.io.tmpdir={tmp_path}/jvms/" in started
    assert "--conf spark.driver.extraClassPath=/some.jar " in started and "/of/the/driver" not in started
