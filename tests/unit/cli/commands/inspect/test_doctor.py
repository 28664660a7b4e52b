"""``fleet doctor``: each check has a failing case, and the home stays as it is."""

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from typer.testing import CliRunner

from cli.app import app
from cli.commands.inspect.doctor import Check, CheckState, run_check
from cli.common.packages import require_packages
from cli.supervisor import processes
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import page_held
from fleetpulse.io.spark import java
from fleetpulse.io.spark.session import SparkResources
from fleetpulse.io.system import file_systems
from fleetpulse.io.system.process import write_status
from fleetpulse.web.access import WebRole, grant_token
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
SECRET = "0123456789abcdef" * 4


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home(tmp_path / "home")
    made.prepare(None)
    monkeypatch.setattr("fleetpulse.io.spark.jars.require_jars", lambda **_: None)  # takes half a second, see test_jars
    monkeypatch.setattr("cli.common.packages.require_packages", lambda _: 1)
    monkeypatch.setattr(java, "_version_and_home", lambda _: (17, tmp_path))
    return made


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def examined(home: Home, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code of the command and its results by check."""
    ports = [word for name in ("--port", "--page-port") if name not in options for word in (name, "0")]
    result = CliRunner().invoke(app, ["doctor", "--home", str(home.path), "--airflow-port", "0", "--json", *ports, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, {one["check"]: one for one in map(json.loads, result.stdout.splitlines())}


def files(home: Home) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in home.path.rglob("*")}


def test_all_checks_of_a_sound_home_are_ok_and_change_nothing(home: Home) -> None:
    before = files(home)
    code, found = examined(home)
    assert (code, {name for name, one in found.items() if one["state"] == "failed"}) == (0, set())
    assert found["home"]["found"] == f"{home.path}, not in use"
    assert {name for name, one in found.items() if one["state"] == "skipped"} == {
        "broker port",
        "airflow port",
        "page port",
        "spark master",
        "spark session",
    }
    assert files(home) == before


def test_a_home_need_not_exist(home: Home) -> None:
    shutil.rmtree(home.path)
    assert examined(home)[0] == 0
    assert not home.path.exists()


def test_a_person_gets_one_line_a_check_with_the_remedy(home: Home) -> None:
    (home.path / "settings.toml").write_text('heap = "1x"\n')
    result = CliRunner().invoke(
        app, ["doctor", "--home", str(home.path), "--port", "0", "--airflow-port", "0", "--page-port", "0"]
    )
    assert result.exit_code == 1
    assert "ok      locks" in result.stdout
    assert "failed  settings" in result.stdout and 'write a size such as "4g"' in result.stdout
    assert "skipped secrets        the settings are not valid" in result.stdout


def failing(home: Home, *options: str) -> dict[str, str]:
    """Return the codes of the failed checks by name."""
    code, found = examined(home, *options)
    failures = {name: one["code"] for name, one in found.items() if one["state"] == "failed"}
    assert code == (1 if failures else 0)
    return failures


def test_a_missing_java_fails(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def downloaded(*_: object) -> None:
        raise AssertionError("it must not be downloaded")

    monkeypatch.setattr(java, "_version_and_home", lambda _: (0, None))
    monkeypatch.setattr(java, "_fetch", downloaded)
    assert failing(home) == {"java": "java-missing"}


def test_a_missing_jar_fails(home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(java, "_version_and_home", lambda _: (17, tmp_path))
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    assert failing(home) == {"jars": "jar-missing"}


def test_a_foreign_home_fails(home: Home) -> None:
    (home.path / "home.json").write_text("{}")
    assert failing(home)["home"] == "home-foreign"


def test_a_full_disk_fails(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1_000_000)))
    assert failing(home) == {"disk": "disk-nearly-full"}


def test_a_file_system_that_keeps_objects_fails(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "mount_of", lambda _: file_systems.Mount(Path("/"), "fuse.s3fs", frozenset()))
    assert failing(home) == {"file system": "file-system-unsuitable"}


@pytest.mark.parametrize(
    ("name", "check", "code"),
    [
        ("os.link", "hard links", "hard-links-missing"),
        ("pathlib.Path.rename", "renames", "renames-faulty"),
        ("fcntl.flock", "locks", "locks-faulty"),
        ("os.fsync", "syncs", "syncs-faulty"),
    ],
)
def test_a_file_system_without_a_property_fails(
    name: str, check: str, code: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError("not supported")

    shutil.rmtree(home.path)  # locks and syncs are needed to read a home
    monkeypatch.setattr(name, unsupported)
    assert failing(home) == {check: code}


def test_a_clock_behind_the_newest_file_fails(home: Home) -> None:
    os.utime(home.path / "home.json", (4_000_000_000, 4_000_000_000))
    assert failing(home) == {"clock": "clock-behind"}


def test_a_readable_secret_fails(home: Home) -> None:
    home.canary_key()
    (home.broker / "canary.key").chmod(0o644)
    home.broker.chmod(0o755)
    assert failing(home) == {"secrets": "secret-exposed"}


def test_a_busy_port_fails(home: Home, busy_port: int) -> None:
    assert failing(home, "--port", str(busy_port), "--airflow-port", str(busy_port), "--page-port", str(busy_port)) == {
        "broker port": "port-in-use",
        "airflow port": "port-in-use",
        "page port": "port-in-use",
    }


def test_the_port_of_the_own_page_is_not_busy(home: Home, busy_port: int) -> None:
    write_status(home.run("page"), {"state": "running", "url": f"http://127.0.0.1:{busy_port}"})
    with page_held(home, "fleet serve"):
        code, found = examined(home, "--page-port", str(busy_port))
    assert code == 0
    assert found["page port"]["found"] == f"the home's page (running) is at http://127.0.0.1:{busy_port}"


def test_secrets_of_the_http_server_are_checked(home: Home) -> None:
    grant_token(home, "grafana", WebRole.API_READER, 5)
    (home.path / "web").chmod(0o755)
    (home.path / "web" / "tokens.json").chmod(0o644)
    assert failing(home) == {"secrets": "secret-exposed"}
    (home.path / "web" / "tokens.json").chmod(0o600)
    key = home.path / "page.pem"
    trustme.CA().issue_cert("fleet.example").private_key_and_cert_chain_pem.write_to_path(key)
    home.path.chmod(0o755)
    key.chmod(0o644)
    (home.path / "settings.toml").write_text('serve_certificate = "page.pem"\n')
    assert failing(home) == {"secrets": "secret-exposed"}
    (home.path / "settings.toml").write_text('serve_certificate = "none.pem"\n')
    assert failing(home) == {"settings": "serve-certificate-unreadable"}


def test_a_port_of_the_own_broker_is_not_busy_and_a_silent_broker_fails(home: Home, busy_port: int) -> None:
    from fleetpulse.io.mqtt.address import BrokerAddress, save_address

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        save_address(home.run("broker"), BrokerAddress("127.0.0.1", closed.getsockname()[1], "fleet", "secret"))
        with home.locked("fleet up"):
            assert failing(home, "--port", str(busy_port)) == {"broker port": "broker-refuses"}


def on_a_cluster(home: Home, port: int) -> Path:
    """Write the settings of a cluster whose master listens on a port; return the file of its secret."""
    secret = home.path / "spark.key"
    secret.touch(0o600)
    secret.write_text(SECRET)
    (home.path / "settings.toml").write_text(f'spark_master = "spark://127.0.0.1:{port}"\nspark_key = "spark.key"\n')
    return secret


def test_an_unreachable_master_fails_and_no_session_is_started(home: Home) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        secret = on_a_cluster(home, closed.getsockname()[1])
        _, found = examined(home)
    assert found["spark master"]["code"] == "spark-master-unreachable"
    assert found["spark session"]["found"] == "another check failed: spark master"
    assert SECRET not in json.dumps(found)
    secret.write_text("short")
    assert failing(home, "--quick")["secrets"] == "spark-secret-weak"


def test_executors_that_do_not_share_the_home_fail(home: Home, busy_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_shared(place: Path, size: SparkResources) -> None:
        assert place.parent == home.path and size.cluster is not None
        raise FleetError("the executors do not share the home", code="home-not-shared")

    on_a_cluster(home, busy_port)
    before = files(home)
    monkeypatch.setattr("batch.common.spark_session.try_session", not_shared)
    assert failing(home) == {"spark session": "home-not-shared"}
    assert files(home) == before


def test_a_check_that_blocks_fails_after_its_limit() -> None:
    released = threading.Event()
    found = run_check(Check("mount", lambda: str(released.wait(60)), limit_s=0.01))
    released.set()
    assert (found.state, found.code) == (CheckState.FAILED, "check-timeout")


def test_an_error_of_the_system_is_a_failure_and_a_bug_is_not_hidden() -> None:
    def denied() -> str:
        raise PermissionError(13, "Permission denied", "/srv")

    def bug() -> str:
        raise KeyError("a")

    assert run_check(Check("home", denied)).code == "check-impossible"
    with pytest.raises(KeyError):
        run_check(Check("home", bug))


def test_packages_that_differ_from_the_lock_fail(tmp_path: Path) -> None:
    lock = tmp_path / "runtime.txt"
    lock.write_text("pytest==0.1 \\\n    --hash=sha256:00\nno-such-thing==1.0 ; sys_platform == 'win32' \\\n")
    with refused("packages-differ", match=r"pytest [0-9.]+ instead of 0\.1"):
        require_packages(lock)
    with refused("lock-unreadable"):
        require_packages(tmp_path / "absent.txt")
