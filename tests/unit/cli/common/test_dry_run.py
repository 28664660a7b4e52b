"""Dry runs of state verbs: they fail with the errors of the verb, and change nothing."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.app import app
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICES
from fleetpulse.core.times import format_instant
from fleetpulse.io.checkpoints.generations import HELD, Generation, load_generations, save_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, served
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, registry_entries, row, signal, tick
from tests.support.homes.homes import commit_batch, empty, land

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment())]
VERBS = (["rescale", "--key-groups", "3"], ["migrate", "--form", "4"], ["repartition", "3"])


@pytest.fixture
def home(home: Home) -> Home:
    commit_batch(home.checkpoint, 0, 5_000)
    return home


def _run(home: Home, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["state", *arguments, "--home", str(home.path)])


def _error(home: Home, *arguments: str) -> str:
    result = _run(home, *arguments)
    assert isinstance(result.exception, FleetError), result.output
    return str(result.exception)


def _hold(home: Home) -> None:
    """Add generation 2, which is held before its switch."""
    held = Generation(2, 3, 4, "rescale", {"generation": 1}, 1, HELD, {"beside": 1})
    save_generations(home.lifecycle, load_generations(home.lifecycle).with_one(home.generation()).with_one(held))


@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_a_dry_run_is_refused_while_a_generation_is_held(home: Home, arguments: Sequence[str]) -> None:
    assert _run(home, *arguments, "--dry-run").exit_code == 0
    _hold(home)
    assert "generation 2, made by rescale, is held" in _error(home, *arguments, "--dry-run")
    assert _error(home, *arguments, "--dry-run") == _error(home, *arguments)


@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: arguments[0])
def test_a_dry_run_is_refused_while_another_process_holds_the_state(home: Home, arguments: Sequence[str]) -> None:
    with home.state_held("the lifecycle job"):
        dry_run_error = _error(home, *arguments, "--dry-run")
        assert "is in use by the lifecycle job" in dry_run_error and "./fleet stream stop" in dry_run_error
        assert dry_run_error == _error(home, *arguments)
    assert _run(home, *arguments, "--dry-run").exit_code == 0


def test_once_stopped_shows_the_plan_while_the_job_runs(home: Home) -> None:
    with home.state_held("the lifecycle job"):
        result = _run(home, "rescale", "--key-groups", "3", "--dry-run", "--once-stopped")
        assert result.exit_code == 0 and "the next: 3 key groups" in result.output
    _hold(home)
    assert "is held" in _error(home, "rescale", "--key-groups", "3", "--dry-run", "--once-stopped")


@pytest.mark.parametrize(
    ("options", "reason"), [([], "add --dry-run"), (["--canary", "--dry-run"], "a canary runs beside the running job")]
)
def test_once_stopped_is_refused_without_a_dry_run_and_with_a_canary(home: Home, options: list[str], reason: str) -> None:
    result = _run(home, "migrate", "--form", "4", "--once-stopped", *options)
    assert isinstance(result.exception, Misuse) and reason in str(result.exception)


def test_a_dry_run_of_a_canary_describes_it_and_fails_with_its_errors(home: Home) -> None:
    arguments = ("migrate", "--form", "4", "--canary", "--for", "90s")
    assert "--canary needs the running lifecycle job, and none runs" in _error(home, *arguments, "--dry-run")
    with served(home, Service.LIFECYCLE), home.state_held("the lifecycle job"):
        result = _run(home, *arguments, "--dry-run")
        assert result.exit_code == 0 and "would run a canary of stored form 4 beside it for 90 s" in result.output
        assert "beside it for 300 s" in _run(home, "migrate", "--form", "4", "--canary", "--dry-run").output
        _hold(home)
        assert "generation 2, made by rescale, is held" in _error(home, *arguments, "--dry-run")
    assert len(list(home.lifecycle.glob("gen-*"))) == 1


def test_a_dry_run_of_a_discard_removes_nothing(home: Home) -> None:
    assert "generation 2 is not held" in _error(home, "discard", "2", "--dry-run")
    _hold(home)
    result = _run(home, "discard", "2", "--dry-run")
    assert result.exit_code == 0 and "generation 2, made by rescale, would be removed" in result.output
    assert load_generations(home.lifecycle).held() is not None
    assert _run(home, "discard", "2").exit_code == 0
    assert load_generations(home.lifecycle).held() is None


LISTED = "device_id,site,registered_at\npump-1,oslo,2023-11-14T12:00:00Z\n"


@pytest.fixture
def judged(tmp_path: Path) -> Home:
    """Return a home whose frontier is 99 s after START: 100 s less the allowed lateness of 1 s."""
    home = empty(tmp_path / "judged", Deployment(allowed_lateness_ms=1_000))
    land(home, [signal(0), tick(100)], 1)
    commit_batch(home.checkpoint, 0, START + 99_999)
    return home


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("device_id,site,registered_at\n", "the list is empty; nothing has changed"),
        (LISTED + "pump-1,bergen,2023-11-14T13:00:00Z\n", 'each device must be listed once; got "pump-1" 2 times'),
        ("device_id,site\npump-1,oslo\n", "has the columns device_id, .*; absent: registered_at"),
        (LISTED + ",oslo,2023-11-14T12:00:00Z\n", "every device has a device_id; 1 have none"),
        (LISTED + "pump-2,oslo,2999-01-01T00:00:00Z\n", '1 are registered later, "pump-2" among them'),
    ],
    ids=["empty", "twice", "no column", "no id", "too late"],
)
def test_a_dry_run_of_a_bootstrap_checks_the_list_as_the_verb_does(judged: Home, content: str, reason: str) -> None:
    path = judged.path / "list.csv"
    path.write_text(content)
    arguments = ("bootstrap", "--devices", str(path))
    dry_run_error = _error(judged, *arguments, "--dry-run")
    assert re.search(reason, dry_run_error) and dry_run_error == _error(judged, *arguments)
    assert load_generations(judged.lifecycle).newest() == 1


def test_a_dry_run_of_a_bootstrap_reports_the_number_of_devices(judged: Home) -> None:
    path = judged.path / "list.csv"
    instants = [format_instant(START + ms) for ms in (0, 99_000)]  # the second is at the frontier, which is early enough
    path.write_text(
        "device_id,site,registered_at\n" + "".join(f"d{number},oslo,{instant}\n" for number, instant in enumerate(instants))
    )
    result = _run(judged, "bootstrap", "--devices", str(path), "--dry-run")
    assert result.exit_code == 0 and f"2 devices of {path}; bronze is read from version 1" in result.output
    path.write_text(f"device_id,site,registered_at\nd,oslo,{format_instant(START + 99_001)}\n")
    assert "1 are registered later" in _error(judged, "bootstrap", "--devices", str(path), "--dry-run")


def test_a_dry_run_of_a_bootstrap_counts_registry_entries_before_the_frontier(judged: Home) -> None:
    arguments = ("bootstrap", "--registry", "--dry-run")
    assert "has no devices; add some" in _error(judged, *arguments)
    entries = [row(at, f"{name}/registry", op="add") for at, name in ((1, "a"), (2, "b"), (99.5, "later"))]
    tables.append(judged, DEVICES, tables.to_table(DEVICES, registry_entries(entries)), "test", 1)
    result = _run(judged, *arguments)
    assert result.exit_code == 0 and "2 devices of the registry; bronze is read from version 1" in result.output


def test_a_dry_run_counts_the_rows_of_an_uncommitted_batch_as_judged(judged: Home) -> None:
    land(judged, [tick(200)], 2)
    path = judged.path / "list.csv"
    path.write_text(f"device_id,site,registered_at\nd,oslo,{format_instant(START + 150_000)}\n")
    arguments = ("bootstrap", "--devices", str(path), "--dry-run")
    assert "1 are registered later" in _error(judged, *arguments)
    commit_batch(judged.checkpoint, 1, START + 99_999, committed=False)
    assert _run(judged, *arguments).exit_code == 0
