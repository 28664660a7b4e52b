"""Checkpoint ownership: a checkpoint of another home, or ahead of bronze, is refused."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.generations import checkpoint_of
from fleetpulse.io.home.checkpoint_ownership import mark_own, marked_with, require_own
from fleetpulse.io.home.home import Home
from tests.support.histories.histories import signal
from tests.support.homes.homes import commit_batch, empty, land
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment())]


@pytest.fixture
def home(home: Home) -> Home:
    commit_batch(home.checkpoint, 0, 5_000)
    return home


def _write_batch_up_to(home: Home, batch: int, version: int, *, committed: bool = True) -> None:
    """Write the newest batch of the checkpoint, which ends at a version of bronze."""
    commit_batch(home.checkpoint, batch, 5_000, committed=committed)
    path = home.checkpoint / "offsets" / str(batch)
    path.write_text(path.read_text().replace('{"version": 1}', json.dumps({"version": version})))


def _without_id(home: Home) -> Home:
    """Remove the id from the record of a home, as in older versions; return the home."""
    record = home.record()
    del record["id"]
    (home.path / "home.json").write_text(json.dumps(record))
    return home


@pytest.mark.parametrize("committed", [True, False])
def test_a_checkpoint_ahead_of_bronze_is_refused(home: Home, committed: bool) -> None:
    land(home, [signal(1)], 1)
    _write_batch_up_to(home, 1, 2, committed=committed)  # bronze's newest version is 1
    require_own(home, 1)
    _write_batch_up_to(home, 2, 3, committed=committed)
    with refused("checkpoint-ahead-of-bronze"):
        require_own(home, 1)


@pytest.mark.parametrize(
    "arguments", [["rescale", "--key-groups", "3", "--dry-run"], ["repartition", "3", "--dry-run"], ["snapshot", "--dry-run"]]
)
def test_state_commands_refuse_a_checkpoint_ahead_of_bronze(home: Home, arguments: list[str]) -> None:
    _write_batch_up_to(home, 1, 99_999)
    done = CliRunner().invoke(app, ["state", *arguments, "--home", str(home.path)])
    assert isinstance(done.exception, FleetError) and "found 99999" in str(done.exception)


def test_missing_checkpoint_is_accepted_as_own(home: Home) -> None:
    require_own(home, 7)


def test_a_checkpoint_that_was_started_in_another_home_is_refused(home: Home, tmp_path: Path) -> None:
    mark_own(home, 1)
    require_own(home, 1)
    other = empty(tmp_path / "other", Deployment())
    shutil.copytree(home.checkpoint, other.checkpoint)
    assert home.id() != other.id()
    with refused("checkpoint-foreign", match=f"expected id {other.id()}, found {home.id()}; restore"):
        require_own(other, 1)
    mark_own(other, 1)
    assert marked_with(other.checkpoint) == home.id(), "an existing mark is kept"


def test_a_home_that_is_copied_or_moved_keeps_its_checkpoints(home: Home, tmp_path: Path) -> None:
    mark_own(home, 1)
    shutil.copytree(home.path, tmp_path / "copy")
    require_own(Home(tmp_path / "copy"), 1)


def test_home_without_an_id_is_accepted_and_gets_one(home: Home) -> None:
    require_own(home, 1)
    _without_id(home)
    mark_own(home, 1)
    assert home.id() is None and marked_with(home.checkpoint) is None
    require_own(home, 1)
    home.prepare(None)
    named = home.id()
    assert named is not None
    mark_own(home, 1)
    assert marked_with(home.checkpoint) == named
    home.prepare(None)
    home.divide({"north": ["oslo"]})
    home.remember("a recording", {"lines": 1})
    assert home.id() == named, "the id is created once"


def test_generation_is_marked_before_spark_creates_its_checkpoint(home: Home) -> None:
    mark_own(home, 2)
    assert marked_with(checkpoint_of(home.lifecycle, 2)) == home.id()


def test_damaged_mark_is_refused(home: Home) -> None:
    (home.checkpoint / "home-id.json").write_text("{")
    with refused("checkpoint-mark-damaged"):
        require_own(home, 1)
