"""Commands backtest and rewind over a small recording."""

import gzip
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.times import format_instant
from streaming.simulator.scenario import Scenario, simulate
from tests.support.fleet_command import await_none_left, fleet, rows_of
from tests.support.histories.histories import START

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]  # each step has its own, shorter limit
SPAN_MS = 90 * 60_000


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with 90 minutes of a simulated fleet, replayed from a recording."""
    folder = tmp_path_factory.mktemp("backtest")
    recording = folder / "fleet.ndjson.gz"
    with gzip.open(recording, "wt") as file:
        for sent in takewhile(lambda one: one.received_at_ms < START + SPAN_MS, simulate(Scenario(5, 20, START, SPAN_MS))):
            try:
                payload: Any = json.loads(sent.payload)
            except ValueError:
                continue
            file.write(json.dumps({"received_at_ms": sent.received_at_ms, "topic": sent.topic, "payload": payload}) + "\n")
    for name, timeout in (("long", "20m"), ("short", "1m")):
        (folder / f"{name}.toml").write_text(f'[rules]\ntimeout = "{timeout}"\n')
    done = fleet("replay", str(recording), "--home", str(folder / "home"), "--policy", str(folder / "long.toml"))
    assert done.returncode == 0, done.stderr
    await_none_left(folder / "home")
    return folder / "home"


def _modification_times(home: Path) -> list[int]:
    folders = ("tables", "segments", "checkpoints")
    return sorted(path.stat().st_mtime_ns for name in folders for path in (home / name).rglob("*"))


def test_a_backtest_of_the_policy_in_force_equals_the_job_and_another_differs(home: Path) -> None:
    transitions = rows_of("transitions", "--home", str(home), "--json")
    before = _modification_times(home)
    [same] = rows_of("backtest", "--policy", str(home.parent / "long.toml"), "--home", str(home), "--json")
    assert same["changes"] == {"added": 0, "gone": 0, "moved": 0}
    by_mode = {one["to_mode"]: one["before"] for one in same["by_mode"]}
    assert by_mode == {mode: sum(one["to_mode"] == mode for one in transitions) for mode in by_mode}
    assert sum(by_mode.values()) == len(transitions)
    page = home.parent / "page.html"
    other = ("backtest", "--policy", str(home.parent / "short.toml"), "--home", str(home))
    [figures] = rows_of(*other, "--json", "--html", str(page))
    assert figures["changes"]["added"] > 0
    assert figures["alerts"]["after"] > figures["alerts"]["before"]
    assert f"{figures['changes']['moved']:,}" in page.read_text()
    assert len(rows_of(*other, "--verdicts")) == sum(figures["changes"].values())
    shown = fleet(*other)
    assert shown.returncode == 0, shown.stderr
    assert f"{figures['changes']['added']:,} added" in shown.stdout
    assert _modification_times(home) == before


def test_an_impossible_backtest_is_refused_with_an_error(home: Path) -> None:
    arguments = ("backtest", "--home", str(home), "--policy")
    absent = fleet(*arguments, str(home.parent / "absent.toml"))
    assert (absent.returncode, "cannot be read" in absent.stderr) == (1, True)
    reversed_ = fleet(*arguments, str(home.parent / "short.toml"), "--from", str(START + 2), "--to", str(START + 1))
    assert (reversed_.returncode, "--from lies before --to" in reversed_.stderr) == (2, True)
    early = fleet(*arguments, str(home.parent / "short.toml"), "--from", "2020-01-01T00:00:00Z")
    assert (early.returncode, "is the oldest instant" in early.stderr) == (1, True)


def test_a_rewind_to_the_frontier_shows_the_present_devices(home: Path) -> None:
    now = {one["device_id"]: one["mode"] for one in rows_of("devices", "--home", str(home), "--json")}
    [status] = rows_of("status", "--home", str(home), "--json")
    then = {one["device_id"]: one for one in rows_of("rewind", "--to", status["frontier"], "--home", str(home), "--json")}
    assert {name: one["mode"] for name, one in then.items()} == {name: mode for name, mode in now.items() if mode != "unjudged"}
    device = max(then, key=lambda name: then[name]["transition_no"])
    half = format_instant(START + SPAN_MS // 2)
    life = rows_of("rewind", "--to", half, "--device", device, "--home", str(home), "--json")
    assert life[-1]["until"] is None
    [at_half] = [one for one in rows_of("rewind", "--to", half, "--home", str(home), "--json") if one["device_id"] == device]
    assert (life[-1]["mode"], life[-1]["since"]) == (at_half["mode"], at_half["since"])
    assert rows_of("rewind", "--to", half, "--known", "then", "--home", str(home), "--json") == []
