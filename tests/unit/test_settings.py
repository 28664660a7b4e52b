"""Settings: environment variables override the file, and all faults are reported at once."""

from pathlib import Path

import pytest

from cli.common.session_size import session_resources_of
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import SparkResources, settings
from fleetpulse.settings import load_settings, size_mb
from tests.support.refusals import refused


def test_environment_variables_override_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text('allowed_lateness = "5m"\nreconnect_grace = "1m"\n')
    monkeypatch.setenv("FLEET_ALLOWED_LATENESS", "7m")
    settings = load_settings(tmp_path)
    assert (settings.allowed_lateness, settings.reconnect_grace, settings.canary_interval) == (420_000, 60_000, 5_000)
    assert settings.deployment() == Deployment(420_000, 300_000)
    assert settings.deployment(1_000) == Deployment(1_000, 300_000)


SECRET = '[kafka]\nbootstrap.servers = "a:1"\ntopics = "x"\nsasl.jaas.config = "hush-hush"\n'


def test_settings_with_a_secret_that_other_users_can_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(SECRET)
    tmp_path.chmod(0o755)
    for mode in (0o644, 0o640, 0o604):
        file.chmod(mode)
        with refused("secret-exposed", match=r"kafka.sasl.jaas.config.*chmod 600") as caught:
            load_settings(tmp_path)
        assert "hush" not in str(caught.value)
    file.chmod(0o600)
    assert "hush-hush" in load_settings(tmp_path).kafka.values()
    file.chmod(0o644)
    tmp_path.chmod(0o700)
    assert load_settings(tmp_path).kafka, "nobody else can enter the folder"
    tmp_path.chmod(0o755)
    file.write_text("cores = 3\n")
    assert load_settings(tmp_path).cores == 3, "settings without a secret may be public"


@pytest.mark.parametrize("value", ["63m", "501g", "8", "8t"])
def test_store_of_the_broker_has_bounds(value: str, tmp_path: Path) -> None:
    assert size_mb(load_settings(tmp_path).broker_store) == 8_192
    (tmp_path / "settings.toml").write_text(f'broker_store = "{value}"\n')
    with refused("settings-faulty", match="64m to 500g"):
        load_settings(tmp_path)


def test_verdict_jitter_is_part_of_the_deployment_and_off_by_default(tmp_path: Path) -> None:
    assert load_settings(tmp_path).verdict_jitter == 0
    (tmp_path / "settings.toml").write_text('verdict_jitter = "10m"\n')
    assert load_settings(tmp_path).deployment() == Deployment(60_000, 300_000, 600_000)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('batch_every = "1m"', "batch_every: a duration of at most 10s; got '1m'"),
        ('canary_interval = "0s"', "canary_interval: a duration of at least 500ms; got '0s'"),
        ('discovery_prefix = "fleet/x"', 'must not be below "fleet"'),
        ("restarts = 2000", "restarts: Input should be less than or equal to 1000; got 2000"),
    ],
)
def test_bounds_of_durations_are_reported_as_durations(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(line)
    with refused("settings-faulty", match=message):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("value", "reason"), [('"2d"', "delayed by at most 1d"), ('"-5m"', "a duration must be"), ("600", "written as")]
)
def test_invalid_verdict_jitter_is_refused_with_the_reason(value: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f"verdict_jitter = {value}\n")
    with refused("settings-faulty", match=f"verdict_jitter: .*{reason}"):
        load_settings(tmp_path)


def test_settings_without_a_deployment_setting_give_no_deployment(tmp_path: Path) -> None:
    assert load_settings(tmp_path).deployment() is None


def test_all_faulty_settings_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('allowed_lateness = "10ms"\nmax_clock_lead = 5\nlatenes = "1m"\n')
    with refused("settings-faulty") as caught:
        load_settings(tmp_path)
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_hdfs_backed_state_store_is_refused_with_the_reason(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "file":
        (tmp_path / "settings.toml").write_text('state_store = "hdfs"\n')
    else:
        monkeypatch.setenv("FLEET_STATE_STORE", "hdfs")
    with refused("settings-faulty"):
        load_settings(tmp_path)


@pytest.mark.parametrize("value", ["always", "1s", "2m"])
def test_broker_sync_is_always_or_a_duration(value: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f'broker_sync = "{value}"\n')
    assert load_settings(tmp_path).broker_sync == value


def test_other_values_of_broker_sync_are_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('broker_sync = "never"\n')
    with refused("settings-faulty"):
        load_settings(tmp_path)


def test_rocksdb_is_the_state_store(tmp_path: Path) -> None:
    assert load_settings(tmp_path).state_store == "rocksdb"


def test_cores_and_heap_of_a_home_size_its_spark_session(tmp_path: Path) -> None:
    assert session_resources_of(Home(tmp_path)) == SparkResources(2, "1g")
    (tmp_path / "settings.toml").write_text('cores = 8\nheap = "6g"\n')
    configuration = settings(tmp_path, session_resources_of(Home(tmp_path)))
    names = ("spark.master", "spark.sql.shuffle.partitions", "spark.driver.memory")
    assert [configuration[name] for name in names] == ["local[8]", "8", "6g"]


@pytest.mark.parametrize("value", ["6", "6G", "511m", "0g", "6gb", "-1g"])
def test_heap_sizes_that_java_rejects_or_that_are_too_small_are_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f'heap = "{value}"\ncores = 0\n')
    with refused("settings-faulty", match=f"heap: .*at least 512m.*got '{value}'") as caught:
        load_settings(tmp_path)
    assert "cores" in str(caught.value)


def test_names_of_the_http_server_are_host_names_without_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text('serve_hosts = ["fleet.example.com", "10.0.0.7"]\n')
    assert load_settings(tmp_path).serve_hosts == ("fleet.example.com", "10.0.0.7")
    for wrong in ("*", "fleet.example.com:8090", "https://fleet.example.com", "", "Fleet"):
        (tmp_path / "settings.toml").write_text(f'serve_hosts = ["{wrong}"]\n')
        with refused("settings-faulty", match="without a port"):
            load_settings(tmp_path)
    (tmp_path / "settings.toml").unlink()
    monkeypatch.setenv("FLEET_SERVE_HOSTS", '["fleet.example.com"]')
    assert load_settings(tmp_path).serve_hosts == ("fleet.example.com",)


def test_files_of_the_http_server_may_be_in_the_folder_of_a_new_home(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('serve_certificate = "page.pem"\nserve_key = "page.key"\n')
    assert load_settings(tmp_path).files() == ["page.pem", "page.key"]
