"""Spark cluster: its settings, its secret, and the check that its executors share the home."""

import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpulse.io.spark.cluster import PORTS, Cluster, cause_in_executor, probe, reach_master, read_secret
from fleetpulse.io.spark.pods import Pods
from fleetpulse.io.spark.session import SparkResources, settings
from fleetpulse.settings import load_settings
from tests.support.refusals import refused

SECRET = "0123456789abcdef" * 4


def write_settings(home: Path, *lines: str) -> None:
    (home / "settings.toml").write_text("\n".join(lines) + "\n")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Return a cluster whose secret is in a private file."""
    secret = tmp_path / "spark.key"
    secret.touch(0o600)
    secret.write_text(f"{SECRET}\n")
    return Cluster("spark://10.0.0.5:7077", secret, "10.0.0.7", 3, 2, "4g")


def test_executors_get_the_classes_options_and_paths_of_the_driver(tmp_path: Path, cluster: Cluster) -> None:
    write_settings(
        tmp_path,
        'spark_master = "spark://10.0.0.5:7077"',
        'driver_host = "10.0.0.7"',
        'spark_key = "spark.key"',
        'executor_memory = "4g"',
        "executors = 3",
        "executor_cores = 2",
        "spark_port = 65488",
    )
    size = SparkResources.of(tmp_path, load_settings(tmp_path))
    assert size == SparkResources(6, "1g", replace(cluster, first_port=65_488))
    found = settings(tmp_path, size)
    assert [found[f"spark.{name}"] for name in ("master", "driver.host", "driver.bindAddress")] == [
        "spark://10.0.0.5:7077",
        "10.0.0.7",
        "10.0.0.7",
    ]
    assert [found[f"spark.{name}"] for name in ("cores.max", "executor.cores", "executor.memory", "sql.shuffle.partitions")] == [
        "6",
        "2",
        "4g",
        "6",
    ]
    settings_of_hadoop, *jars = found["spark.driver.extraClassPath"].split(os.pathsep)
    assert "hadoop-settings" in settings_of_hadoop, "executors have those of their machine"
    assert found["spark.executor.extraClassPath"].split(os.pathsep) == jars
    driver = found["spark.driver.extraJavaOptions"]
    assert driver.startswith(found["spark.executor.extraJavaOptions"]), "the same options, without the driver's own folder"
    assert str(tmp_path) not in found["spark.executor.extraJavaOptions"]
    assert found["spark.executorEnv.PYTHONSAFEPATH"] == "1"
    assert Path(found["spark.executorEnv.PYTHONPATH"], "fleetpulse").is_dir()


def test_a_host_with_sixteen_sessions_and_executors_uses_only_the_ports_from_the_first_one_on(
    tmp_path: Path, cluster: Cluster
) -> None:
    assert not {name for name in settings(tmp_path, SparkResources(6, "1g", cluster)) if name.endswith((".port", "maxRetries"))}
    found = settings(tmp_path, SparkResources(6, "1g", replace(cluster, first_port=20_000)))
    firsts = [int(found[f"spark.{kind}.port"]) for kind in ("driver", "driver.blockManager", "blockManager")]
    tried = [first + retry for first in firsts for retry in range(int(found["spark.port.maxRetries"]) + 1)]
    assert sorted(tried) == [*range(20_000, 20_000 + PORTS)], "no port is of two kinds: a worker and a driver may share a host"
    assert PORTS == 3 * 16


@pytest.mark.parametrize("port", [-1, 80, 65_489])
def test_a_first_port_without_enough_ports_above_it_is_refused(port: int, tmp_path: Path) -> None:
    write_settings(tmp_path, f"spark_port = {port}")
    with refused("settings-faulty", match="the first of 48 ports must be between 1024 and 65488"):
        load_settings(tmp_path)


def test_a_cluster_authenticates_and_encrypts_and_its_secret_is_no_setting_of_the_process(
    tmp_path: Path, cluster: Cluster
) -> None:
    found = settings(tmp_path, SparkResources(6, "1g", cluster))
    assert (found["spark.authenticate"], found["spark.network.crypto.enabled"]) == ("true", "true")
    assert not any(SECRET in value for value in found.values())
    assert read_secret(cluster.secret) == SECRET
    local = settings(tmp_path, SparkResources())
    assert not {name for name in local if name.startswith(("spark.authenticate", "spark.executor."))}
    assert (local["spark.master"], local["spark.driver.host"]) == ("local[2]", "127.0.0.1")


@pytest.mark.parametrize(
    ("master", "reason"),
    [
        ("local-cluster[2,1,1024]", "local-cluster serves Spark's own tests"),
        ("local[4]", "the setting cores"),
        ("yarn", "address of a standalone cluster"),
        ("k8s://10.0.0.5:6443", "k8s://https://kubernetes.default.svc:443"),
        ("k8s://http://10.0.0.5:6443", "k8s://https://kubernetes.default.svc:443"),
        ("k8s://https://user@10.0.0.5", "k8s://https://kubernetes.default.svc:443"),
        ("spark://user@10.0.0.5:7077", "address of a standalone cluster"),
        ("spark://10.0.0.5", "address of a standalone cluster"),
    ],
)
def test_other_masters_are_refused_with_the_reason(master: str, reason: str, tmp_path: Path) -> None:
    write_settings(tmp_path, f'spark_master = "{master}"')
    with refused("settings-faulty", match=reason):
        load_settings(tmp_path)


ON_KUBERNETES = ('spark_master = "k8s://https://10.0.0.5:6443"', 'spark_key = "spark.key"', 'driver_host = "10.0.0.7"')
OF_PODS = ('executor_image = "fleetpulse:1"', 'executor_template = "executor.yaml"', 'executor_namespace = "fleet"')


def test_pods_of_executors_have_the_sizes_of_the_settings_and_the_path_of_the_secret(tmp_path: Path) -> None:
    (tmp_path / "executor.yaml").touch()
    sizes = ("executors = 3", "executor_cores = 2", 'executor_memory = "4g"', 'executor_overhead = "5g"', 'driver_pod = "job-0"')
    write_settings(tmp_path, *ON_KUBERNETES, *OF_PODS, *sizes, "spark_port = 20000")
    size = SparkResources.of(tmp_path, load_settings(tmp_path))
    assert size.cores == 6
    found = settings(tmp_path, size)
    expected = {
        "spark.master": "k8s://https://10.0.0.5:6443",
        "spark.driver.host": "10.0.0.7",
        "spark.driver.port": "20000",
        "spark.blockManager.port": "20032",
        "spark.executor.instances": "3",
        "spark.executor.cores": "2",
        "spark.executor.memory": "4g",
        "spark.executor.memoryOverhead": "5g",
        "spark.authenticate": "true",
        "spark.authenticate.secret.file": str(tmp_path / "spark.key"),
        "spark.network.crypto.enabled": "true",
        "spark.kubernetes.namespace": "fleet",
        "spark.kubernetes.container.image": "fleetpulse:1",
        "spark.kubernetes.executor.podTemplateFile": str(tmp_path / "executor.yaml"),
        "spark.kubernetes.driver.pod.name": "job-0",
    }
    assert expected.items() <= found.items()
    assert "spark.cores.max" not in found and "spark.authenticate.secret" not in found
    assert "spark.executorEnv.NUMBA_CACHE_DIR" not in found, "the image names the folder of its compiled functions"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (("executor_image",), "spark-pods-incomplete"),
        (("executor_template",), "spark-pods-incomplete"),
        (("executor_image", "executor_template"), "spark-template-missing"),
    ],
)
def test_pods_without_an_image_or_a_template_are_refused(given: tuple[str, ...], code: str, tmp_path: Path) -> None:
    write_settings(tmp_path, *ON_KUBERNETES, *(line for line in OF_PODS if line.startswith(given)))
    with refused(code):
        SparkResources.of(tmp_path, load_settings(tmp_path))


def test_an_unreachable_api_server_is_an_error_that_names_it(tmp_path: Path, cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"k8s://http://127.0.0.1:{server.getsockname()[1]}"
        pods = Pods("fleetpulse:1", tmp_path / "executor.yaml")
        assert reach_master(Cluster(address, cluster.secret, pods=pods)) == "127.0.0.1"
    with refused("spark-master-unreachable", match=address):
        reach_master(Cluster(address, cluster.secret, pods=pods))


def test_a_cluster_without_a_secret_is_refused(tmp_path: Path) -> None:
    write_settings(tmp_path, 'spark_master = "spark://10.0.0.5:7077"')
    with refused("spark-secret-missing"):
        SparkResources.of(tmp_path, load_settings(tmp_path))


def test_a_home_that_executors_cannot_open_by_its_path_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    write_settings(home, 'spark_master = "spark://10.0.0.5:7077"', 'spark_key = "spark.key"')
    with refused("home-path-invalid"):
        SparkResources.of(home, load_settings(home))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda file: file.unlink(), "spark-secret-unreadable"),
        (lambda file: file.write_text("short"), "spark-secret-weak"),
        (lambda file: file.write_text(f"{SECRET}\n{SECRET}"), "spark-secret-weak"),
        (lambda file: (file.chmod(0o644), file.parent.chmod(0o755)), "secret-exposed"),
    ],
)
def test_a_weak_or_exposed_secret_is_refused_and_not_printed(
    damage: Callable[[Path], object], code: str, cluster: Cluster
) -> None:
    damage(cluster.secret)
    with refused(code) as caught:
        read_secret(cluster.secret)
    assert SECRET not in str(caught.value)


def test_an_unreachable_master_is_an_error_that_names_it(cluster: Cluster) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        absent = Cluster(f"spark://127.0.0.1:{port},127.0.0.1:99999", cluster.secret)
        with refused("spark-master-unreachable", match=rf"127\.0\.0\.1:{port}.*99999"):
            reach_master(absent)


def test_the_address_of_the_driver_is_the_one_from_which_it_reaches_the_master(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        assert reach_master(Cluster(f"spark://127.0.0.1:{port}", cluster.secret)) == "127.0.0.1"


def test_an_executor_finds_the_faults_of_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "driver").write_text("token")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert probe(tmp_path, "one", "token") is None
        assert (tmp_path / "one").read_text() == "token"
        assert "other content" in (probe(tmp_path, "two", "another token") or "")
        assert "No such file" in (probe(tmp_path / "absent", "three", "token") or "")
    assert "locks are not shared" in (probe(tmp_path, "four", "token") or ""), "nobody holds the lock"


def test_a_file_system_without_hard_links_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no hard links")

    (tmp_path / "driver").write_text("token")
    monkeypatch.setattr("os.link", no_links)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "no hard links" in (probe(tmp_path, "one", "token") or "")


def test_the_cause_in_an_executor_is_the_last_exception_of_its_python_process_not_a_frame_of_a_trace() -> None:
    frames = """
\tat org.apache.spark.util.SparkErrorUtils.tryWithSafeFinally(SparkErrorUtils.scala:86)
\tat org.apache.spark.executor.Executor$TaskRunner.run(Executor.scala:897)
"""
    written = """Job aborted: Lost task 0.3 in stage 0.0: org.apache.spark.SparkException:
Error from python worker:
  Traceback (most recent call last):
    File "daemon.py", line 8, in <module>
  RuntimeError: cannot cache function 'f': no locator available for file 'ordering.py'
  a later warning
PYTHONPATH was:
  /opt/pyspark.zip
org.apache.spark.SparkException: EOFException occurred while reading the port number from the daemon's stdout."""
    cause = "RuntimeError: cannot cache function 'f': no locator available for file 'ordering.py'"
    assert cause_in_executor(RuntimeError(written + frames)) == cause
    assert cause_in_executor(RuntimeError(written.replace("RuntimeError:", "-"))) == "a later warning"
    assert cause_in_executor(RuntimeError(f"java.io.IOError: no file{frames}")) == "java.io.IOError: no file"
    assert cause_in_executor(RuntimeError("lost\n")) == "lost"
