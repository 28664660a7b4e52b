"""A dry run is refused where the verb would be, in the same words, and changes nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.replay import Deployment
from fleetpulse.io.generations import HELD, Generation, load_generations, save_generations
from fleetpulse.io.home import Home
from fleetpulse.io.services import Service, served
from tests.homes import commit_batch, empty

pytestmark = pytest.mark.unit
VERBS = (["rescale", "--key-groups", "3"], ["migrate", "--form", "3"], ["repartition", "3"])


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = empty(tmp_path / "home", Deployment())
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
    ("given", "why"), [([], "give --dry-run with it"), (["--canary", "--dry-run"], "a canary runs beside the running job")]
)
def test_once_stopped_is_for_a_dry_run_of_what_needs_the_job_stopped(home: Home, given: list[str], why: str) -> None:
    done = _done(home, "migrate", "--form", "3", "--once-stopped", *given)
    assert isinstance(done.exception, Misuse) and why in str(done.exception)


def test_a_dry_run_of_a_canary_describes_the_canary_and_is_refused_where_that_is(home: Home) -> None:
    words = ("migrate", "--form", "3", "--canary", "--for", "90s")
    assert "a canary runs beside the job, and none runs" in _refused(home, *words, "--dry-run")
    with served(home, Service.LIFECYCLE), home.state_held("the lifecycle job"):
        done = _done(home, *words, "--dry-run")
        assert done.exit_code == 0 and "a canary of stored form 3 is to judge the live input beside it for 90 s" in done.output
        _hold(home)
        assert "generation 2, made by rescale, is held" in _refused(home, *words, "--dry-run")
    assert len(list(home.lifecycle.glob("gen-*"))) == 1


def test_a_dry_run_of_a_discard_removes_nothing(home: Home) -> None:
    assert "generation 2 is not held" in _refused(home, "discard", "2", "--dry-run")
    _hold(home)
    done = _done(home, "discard", "2", "--dry-run")
    assert done.exit_code == 0 and "generation 2, made by rescale, is to be removed" in done.output
    assert load_generations(home.lifecycle).held() is not None
    assert _done(home, "discard", "2").exit_code == 0
    assert load_generations(home.lifecycle).held() is None
