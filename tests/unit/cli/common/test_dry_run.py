"""A dry run is refused where the verb would be, in the same words, and changes nothing."""

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


def _done(home: Home, *words: str) -> Result:
    return CliRunner().invoke(app, ["state", *words, "--home", str(home.path)])


def _refused(home: Home, *words: str) -> str:
    done = _done(home, *words)
    assert isinstance(done.exception, FleetError), done.output
    return str(done.exception)


def _hold(home: Home) -> None:
    """Let generation 2 wait to be given the work."""
    held = Generation(2, 3, 4, "rescale", {"generation": 1}, 1, HELD, {"beside": 1})
    save_generations(home.lifecycle, load_generations(home.lifecycle).with_one(home.generation()).with_one(held))


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_dry_run_is_refused_while_a_generation_is_held(home: Home, words: Sequence[str]) -> None:
    assert _done(home, *words, "--dry-run").exit_code == 0
    _hold(home)
    assert "generation 2, made by rescale, is held" in _refused(home, *words, "--dry-run")
    assert _refused(home, *words, "--dry-run") == _refused(home, *words)


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_dry_run_is_refused_while_another_has_the_state(home: Home, words: Sequence[str]) -> None:
    with home.state_held("the lifecycle job"):
        dry = _refused(home, *words, "--dry-run")
        assert "is in use by the lifecycle job" in dry and "./fleet stream stop" in dry
        assert dry == _refused(home, *words)
    assert _done(home, *words, "--dry-run").exit_code == 0


def test_what_would_be_done_once_the_job_is_stopped_is_said_while_it_runs(home: Home) -> None:
    with home.state_held("the lifecycle job"):
        done = _done(home, "rescale", "--key-groups", "3", "--dry-run", "--once-stopped")
        assert done.exit_code == 0 and "the next: 3 key groups" in done.output
    _hold(home)
    assert "is held" in _refused(home, "rescale", "--key-groups", "3", "--dry-run", "--once-stopped")


@pytest.mark.parametrize(
    ("given", "why"), [([], "add --dry-run"), (["--canary", "--dry-run"], "a canary runs beside the running job")]
)
def test_once_stopped_is_for_a_dry_run_of_what_needs_the_job_stopped(home: Home, given: list[str], why: str) -> None:
    done = _done(home, "migrate", "--form", "4", "--once-stopped", *given)
    assert isinstance(done.exception, Misuse) and why in str(done.exception)


def test_a_dry_run_of_a_canary_describes_the_canary_and_is_refused_where_that_is(home: Home) -> None:
    words = ("migrate", "--form", "4", "--canary", "--for", "90s")
    assert "--canary needs the running lifecycle job, and none runs" in _refused(home, *words, "--dry-run")
    with served(home, Service.LIFECYCLE), home.state_held("the lifecycle job"):
        done = _done(home, *words, "--dry-run")
        assert done.exit_code == 0 and "would run a canary of stored form 4 beside it for 90 s" in done.output
        _hold(home)
        assert "generation 2, made by rescale, is held" in _refused(home, *words, "--dry-run")
    assert len(list(home.lifecycle.glob("gen-*"))) == 1


def test_a_dry_run_of_a_discard_removes_nothing(home: Home) -> None:
    assert "generation 2 is not held" in _refused(home, "discard", "2", "--dry-run")
    _hold(home)
    done = _done(home, "discard", "2", "--dry-run")
    assert done.exit_code == 0 and "generation 2, made by rescale, would be removed" in done.output
    assert load_generations(home.lifecycle).held() is not None
    assert _done(home, "discard", "2").exit_code == 0
    assert load_generations(home.lifecycle).held() is None


LISTED = "device_id,site,registered_at\npump-1,oslo,2023-11-14T12:00:00Z\n"


@pytest.fixture
def judged(tmp_path: Path) -> Home:
    """A home that has judged up to START and a hundred seconds, but for its lateness."""
    home = empty(tmp_path / "judged", Deployment(allowed_lateness_ms=1_000))
    land(home, [signal(0), tick(100)], 1)
    commit_batch(home.checkpoint, 0, START + 99_999)
    return home


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("device_id,site,registered_at\n", "the list is empty; nothing has changed"),
        (LISTED + "pump-1,bergen,2023-11-14T13:00:00Z\n", 'each device must be listed once; got "pump-1" 2 times'),
        ("device_id,site\npump-1,oslo\n", "has the columns device_id, .*; absent: registered_at"),
        (LISTED + ",oslo,2023-11-14T12:00:00Z\n", "every device has a device_id; 1 have none"),
        (LISTED + "pump-2,oslo,2999-01-01T00:00:00Z\n", '1 are registered later, "pump-2" among them'),
    ],
    ids=["empty", "twice", "no column", "no id", "too late"],
)
def test_a_dry_run_of_a_bootstrap_looks_at_the_list_as_the_verb_does(judged: Home, content: str, why: str) -> None:
    path = judged.path / "list.csv"
    path.write_text(content)
    words = ("bootstrap", "--devices", str(path))
    dry = _refused(judged, *words, "--dry-run")
    assert re.search(why, dry) and dry == _refused(judged, *words)
    assert load_generations(judged.lifecycle).newest() == 1


def test_a_dry_run_of_a_bootstrap_says_how_many_devices_it_would_begin_with(judged: Home) -> None:
    path = judged.path / "list.csv"
    at = [format_instant(START + ms) for ms in (0, 99_000)]  # the frontier itself is early enough
    path.write_text("device_id,site,registered_at\n" + "".join(f"d{number},oslo,{one}\n" for number, one in enumerate(at)))
    done = _done(judged, "bootstrap", "--devices", str(path), "--dry-run")
    assert done.exit_code == 0 and f"2 devices of {path}; bronze is read from version 1" in done.output
    path.write_text(f"device_id,site,registered_at\nd,oslo,{format_instant(START + 99_001)}\n")
    assert "1 are registered later" in _refused(judged, "bootstrap", "--devices", str(path), "--dry-run")


def test_a_dry_run_of_a_bootstrap_from_the_registry_counts_what_is_in_effect_at_the_frontier(judged: Home) -> None:
    words = ("bootstrap", "--registry", "--dry-run")
    assert "has no devices; add some" in _refused(judged, *words)
    entries = [row(at, f"{name}/registry", op="add") for at, name in ((1, "a"), (2, "b"), (99.5, "later"))]
    tables.append(judged, DEVICES, tables.to_table(DEVICES, registry_entries(entries)), "test", 1)
    done = _done(judged, *words)
    assert done.exit_code == 0 and "2 devices of the registry; bronze is read from version 1" in done.output


def test_what_a_batch_has_begun_with_counts_as_judged_in_a_dry_run(judged: Home) -> None:
    land(judged, [tick(200)], 2)
    path = judged.path / "list.csv"
    path.write_text(f"device_id,site,registered_at\nd,oslo,{format_instant(START + 150_000)}\n")
    words = ("bootstrap", "--devices", str(path), "--dry-run")
    assert "1 are registered later" in _refused(judged, *words)
    commit_batch(judged.checkpoint, 1, START + 99_999, committed=False)
    assert _done(judged, *words).exit_code == 0
