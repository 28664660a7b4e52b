"""Inspection of a checkpoint and of the next start: the same facts as JSON and as text."""

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
    """Create three batches, of which two have files; bronze versions 1 to 3 are unread."""
    for number in range(1, 4):
        land(home, [signal(number)], number)
        commit_batch(home.checkpoint, number, number * 1_000)
    for folder in ("offsets", "commits"):
        (home.checkpoint / folder / "1").unlink()
    return home


def _facts(home: Home, batch: int | None = None, now_ms: int = 0) -> dict[str, Any]:
    """Return the facts as a program reads them."""
    return json.loads(json.dumps(checkpoint_facts(home, position_after(home.checkpoint, batch), now_ms)))


def _text(home: Home, capsys: pytest.CaptureFixture[str], now_ms: int = 0) -> str:
    """Return the facts as text for people."""
    show_inspected({**_facts(home, now_ms=now_ms), "groups": []})
    return capsys.readouterr().out


def test_inspection_reports_the_watermark_and_the_available_batches(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert (_facts(home)["watermark_ms"], _facts(home, 2)["watermark_ms"]) == (3_000, 2_000)
    assert _facts(home)["batches"] == {"oldest": 2, "newest": 3}
    text = _text(home, capsys)
    assert "1970-01-01T00:00:03.000Z" in text and "batches 2 to 3: choose one with --at-batch" in text


def test_checkpoint_without_judged_rows_has_no_watermark(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    commit_batch(home.checkpoint, 4, 0)
    assert _facts(home)["watermark_ms"] is None
    assert "watermark    -" in _text(home, capsys)


def test_inspection_reports_the_age_of_the_newest_snapshot(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert _facts(home)["snapshots"] == [] and "none yet" in _text(home, capsys)
    take_snapshot(home)
    now_ms = (snapshots(home)[0].at_ms or 0) + 3_723_500
    assert _facts(home, now_ms=now_ms)["snapshots"][0]["age_ms"] == 3_723_500
    assert "version 1, 1h2m3s old, of " in _text(home, capsys, now_ms)


def test_inspection_identifies_a_snapshot_of_a_newer_version(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    take_snapshot(home, form=9, more=1)
    now_ms = snapshots(home)[0].at_ms or 0
    assert _facts(home, now_ms=now_ms)["snapshots"][0]["form"] == 9
    assert "by another version of fleetpulse (form 9)" in _text(home, capsys, now_ms)


def test_inspection_counts_the_files_of_the_state_by_kind(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home.checkpoint / "state" / "0" / "0"
    folder.mkdir(parents=True)
    for name, size in (("1.zip", 10), ("2.zip", 20), ("a.sst", 30), (".2.zip.crc", 40)):
        (folder / name).write_bytes(b"x" * size)
    assert _facts(home)["files"] == {"count": 3, "bytes": 60, "kinds": {"zip": 2, "sst": 1}}
    assert "3 files, 60 bytes (2 zip, 1 sst)" in _text(home, capsys)


def test_next_start_is_reported_independently_of_the_inspected_batch(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    unread = {"version": 1, "versions": 3}
    assert _facts(home)["next"].items() >= unread.items() and _facts(home, 2)["next"] == _facts(home)["next"]
    assert "continues with bronze version 1; 3 versions are unread" in _text(home, capsys)
    commit_batch(home.checkpoint, 4, 4_000, committed=False)
    assert "repeats batch 4, which was started but not committed, and continues with bronze version 1" in _text(home, capsys)


def test_inspection_reports_obstacles_to_the_next_start(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert _facts(home)["next"]["held"] is None and _facts(home)["next"]["desired"]["state"] == "running"
    held = Generation(2, 3, 4, "rescale", {"generation": 1}, 1, HELD, {"beside": 1})
    save_generations(home.lifecycle, load_generations(home.lifecycle).with_one(home.generation()).with_one(held))
    set_desired(home, STOPPED, "ann [at night]")
    next_start = _facts(home)["next"]
    assert next_start["held"] == {"generation": 2, "made_by": "rescale"}
    assert (next_start["desired"]["state"], next_start["desired"]["by"]) == ("stopped", "ann [at night]")
    text = _text(home, capsys)
    assert "the job is stopped by ann [at night] since" in text
    assert "generation 2, made by rescale, is held: ./fleet state switch 2, or discard 2" in text
