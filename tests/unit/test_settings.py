"""Settings: environment first, file second, all faults at once."""

from pathlib import Path

import pytest

from cli.common.session_size import session_resources_of
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import SparkResources, settings
from fleetpulse.settings import load_settings
from tests.support.refusals import refused


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text('allowed_lateness = "5m"\nreconnect_grace = "1m"\n')
    monkeypatch.setenv("FLEET_ALLOWED_LATENESS", "7m")
    settings = load_settings(tmp_path)
    assert (settings.allowed_lateness, settings.reconnect_grace, settings.canary_interval) == (420_000, 60_000, 5_000)
    assert settings.deployment() == Deployment(420_000, 300_000)
    assert settings.deployment(1_000) == Deployment(1_000, 300_000)


def test_a_jitter_belongs_to_the_deployment_and_is_off_by_default(tmp_path: Path) -> None:
    assert load_settings(tmp_path).verdict_jitter == 0
    (tmp_path / "settings.toml").write_text('verdict_jitter = "10m"\n')
    assert load_settings(tmp_path).deployment() == Deployment(60_000, 300_000, 600_000)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('batch_every = "1m"', "batch_every: a duration of at most 10s; got '1m'"),
        ('canary_interval = "0s"', "canary_interval: a duration of at least 500ms; got '0s'"),
        ("restarts = 2000", "restarts: Input should be less than or equal to 1000; got 2000"),
    ],
)
def test_the_bound_of_a_duration_is_told_as_a_duration(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(line)
    with refused("settings-faulty", match=said):
        load_settings(tmp_path)


@pytest.mark.parametrize(("given", "why"), [('"2d"', "delayed by at most 1d"), ('"-5m"', "a duration is"), ("600", "written as")])
def test_a_jitter_that_is_none_is_refused_with_the_reason(given: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f"verdict_jitter = {given}\n")
    with refused("settings-faulty", match=f"verdict_jitter: .*{why}"):
        load_settings(tmp_path)


def test_a_home_keeps_its_deployment_where_nobody_asks(tmp_path: Path) -> None:
    assert load_settings(tmp_path).deployment() is None


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('allowed_lateness = "10ms"\nmax_clock_lead = 5\nlatenes = "1m"\n')
    with refused("settings-faulty") as caught:
        load_settings(tmp_path)
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("by", ["file", "environment"])
def test_the_hdfs_backed_state_store_is_refused_with_the_reason(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "file":
        (tmp_path / "settings.toml").write_text('state_store = "hdfs"\n')
    else:
        monkeypatch.setenv("FLEET_STATE_STORE", "hdfs")
    with refused("settings-faulty"):
        load_settings(tmp_path)


@pytest.mark.parametrize("given", ["always", "1s", "2m"])
def test_the_broker_syncs_always_or_after_a_duration(given: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f'broker_sync = "{given}"\n')
    assert load_settings(tmp_path).broker_sync == given


def test_another_word_for_when_the_broker_syncs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('broker_sync = "never"\n')
    with refused("settings-faulty"):
        load_settings(tmp_path)


def test_rocksdb_is_the_state_store(tmp_path: Path) -> None:
    assert load_settings(tmp_path).state_store == "rocksdb"


def test_a_home_says_how_much_of_the_machine_a_session_takes(tmp_path: Path) -> None:
    assert session_resources_of(Home(tmp_path)) == SparkResources(2, "1g")
    (tmp_path / "settings.toml").write_text('cores = 8\nheap = "6g"\n')
    wanted = settings(tmp_path, session_resources_of(Home(tmp_path)))
    named = ("spark.master", "spark.sql.shuffle.partitions", "spark.driver.memory")
    assert [wanted[name] for name in named] == ["local[8]", "8", "6g"]


@pytest.mark.parametrize("given", ["6", "6G", "511m", "0g", "6gb", "-1g"])
def test_a_heap_that_java_would_not_take_or_that_is_too_small_is_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f'heap = "{given}"\ncores = 0\n')
    with refused("settings-faulty", match=f"heap: .*at least 512m.*got '{given}'") as caught:
        load_settings(tmp_path)
    assert "cores" in str(caught.value)
