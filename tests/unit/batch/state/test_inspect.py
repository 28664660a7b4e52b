"""What is said of a checkpoint and of the next start, for a person and for a program alike."""

import json
from typing import Any

import pytest

from batch.state.inspect import checkpoint_facts
from cli.commands.state.inspect_view import show_inspected
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import HELD, Generation, load_generations, save_generations
from fleetpulse.io.home.desired_state import STOPPED, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.snapshots import snapshots
from tests.support.histories.histories import signal
from tests.support.homes.homes import commit_batch, land, take_snapshot

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment())]


@pytest.fixture
def home(home: Home) -> Home:
    """Three batches of which two are kept; of bronze versions 1 to 3 have not been read."""
    for number in range(1, 4):
        land(home, [signal(number)], number)
        commit_batch(home.checkpoint, number, number * 1_000)
    for folder in ("offsets", "commits"):
        (home.checkpoint / folder / "1").unlink()
    return home


def _looked(home: Home, batch: int | None = None, now_ms: int = 0) -> dict[str, Any]:
    """Return what a program gets."""
    return json.loads(json.dumps(checkpoint_facts(home, position_after(home.checkpoint, batch), now_ms)))


def _told(home: Home, capsys: pytest.CaptureFixture[str], now_ms: int = 0) -> str:
    """Return what a person gets."""
    show_inspected({**_looked(home, now_ms=now_ms), "groups": []})
    return capsys.readouterr().out


def test_the_watermark_and_the_batches_that_can_be_looked_at_are_told(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert (_looked(home)["watermark_ms"], _looked(home, 2)["watermark_ms"]) == (3_000, 2_000)
    assert _looked(home)["batches"] == {"oldest": 2, "newest": 3}
    told = _told(home, capsys)
    assert "1970-01-01T00:00:03.000Z" in told and "batches 2 to 3: choose one with --at-batch" in told


def test_a_checkpoint_that_no_row_has_moved_has_no_watermark(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    commit_batch(home.checkpoint, 4, 0)
    assert _looked(home)["watermark_ms"] is None
    assert "watermark    -" in _told(home, capsys)


def test_the_newest_snapshot_has_an_age(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert _looked(home)["snapshots"] == [] and "none yet" in _told(home, capsys)
    take_snapshot(home)
    now_ms = (snapshots(home)[0].at_ms or 0) + 3_723_500
    assert _looked(home, now_ms=now_ms)["snapshots"][0]["age_ms"] == 3_723_500
    assert "version 1, 1h2m3s old, of " in _told(home, capsys, now_ms)


def test_a_newest_snapshot_of_a_newer_version_is_told_as_that(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    take_snapshot(home, form=9, more=1)
    now_ms = snapshots(home)[0].at_ms or 0
    assert _looked(home, now_ms=now_ms)["snapshots"][0]["form"] == 9
    assert "by another version of fleetpulse (form 9)" in _told(home, capsys, now_ms)


def test_the_files_of_the_state_are_told_to_programs_too(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    place = home.checkpoint / "state" / "0" / "0"
    place.mkdir(parents=True)
    for name, size in (("1.zip", 10), ("2.zip", 20), ("a.sst", 30), (".2.zip.crc", 40)):
        (place / name).write_bytes(b"x" * size)
    assert _looked(home)["files"] == {"count": 3, "bytes": 60, "kinds": {"zip": 2, "sst": 1}}
    assert "3 files, 60 bytes (2 zip, 1 sst)" in _told(home, capsys)


def test_the_next_start_says_what_is_to_be_read_whichever_batch_is_looked_at(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    coming = {"version": 1, "versions": 3}
    assert _looked(home)["next"].items() >= coming.items() and _looked(home, 2)["next"] == _looked(home)["next"]
    assert "continues with bronze version 1; 3 versions are unread" in _told(home, capsys)
    commit_batch(home.checkpoint, 4, 4_000, committed=False)
    assert "repeats batch 4, which was started but not committed, and continues with bronze version 1" in _told(home, capsys)


def test_what_stands_in_the_way_of_the_next_start_is_told(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert _looked(home)["next"]["held"] is None and _looked(home)["next"]["desired"]["what"] == "running"
    held = Generation(2, 3, 4, "rescale", {"generation": 1}, 1, HELD, {"beside": 1})
    save_generations(home.lifecycle, load_generations(home.lifecycle).with_one(home.generation()).with_one(held))
    set_desired(home, STOPPED, "ann [at night]")
    found = _looked(home)["next"]
    assert found["held"] == {"generation": 2, "made_by": "rescale"}
    assert (found["desired"]["what"], found["desired"]["by"]) == ("stopped", "ann [at night]")
    told = _told(home, capsys)
    assert "the job is stopped by ann [at night] since" in told
    assert "generation 2, made by rescale, is held: ./fleet state switch 2, or discard 2" in told
