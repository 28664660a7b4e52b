"""State verbs on a running, a stopped and a moved home: the verdicts stay correct."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fleetpulse.io.checkpoints.checkpoint import committed_batches, judged_up_to, position_after
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.snapshots import snapshots
from tests.support.fleet_command import await_none_left, begin, fleet, kill_at
from tests.support.histories.definition import require_equal_to_definition
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]


def _state(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fleet("state", *arguments, "--home", str(home))


def _await_batches(home: Home, more: int) -> None:
    """Wait until the current generation has judged ``more`` further batches."""
    target = max(committed_batches(home.checkpoint), default=-1) + more
    await_that(lambda: max(committed_batches(home.checkpoint), default=-1) >= target, what="further batches")


def _run_concurrently(home: Path, *calls: tuple[str, ...]) -> None:
    """Run verbs on a home at the same time; a refused one names the other command, and is repeated."""
    running = [begin(*call, "--home", str(home)) for call in calls]
    for call, one in zip(calls, running, strict=True):
        output, _ = one.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in output
        if one.returncode != 0:
            assert one.returncode == 1 and re.search(r"in use by|still running", output), output
            again = fleet(*call, "--home", str(home))
            assert again.returncode == 0, again.stderr


def test_state_verbs_beside_a_running_fleet_keep_its_verdicts_correct(tmp_path: Path) -> None:
    home = tmp_path / "home"
    running = begin("up", "--home", str(home), "--devices", "20", "--no-airflow", "--no-page", "--port", "0")
    try:
        await_that(lambda: Home(home).exists() and judged_up_to(Home(home).checkpoint), what="the first batch", by=running)
        _await_batches(Home(home), 2)
        done = _state(home, "snapshot")
        assert done.returncode == 0, done.stderr
        [taken] = snapshots(Home(home))
        assert taken.devices > 10
        refused = _state(home, "rescale", "--key-groups", "3")
        assert refused.returncode == 1
        assert "in use by the lifecycle job" in refused.stderr and "./fleet stream stop" in refused.stderr
        done = _state(home, "migrate", "--form", "4", "--canary", "--for", "10s")
        assert done.returncode == 0, done.stderr
        assert "judgements, all equal" in done.stderr
        assert (Home(home).generation().number, Home(home).generation().form) == (2, 4)
        _await_batches(Home(home), 2)
        assert fleet("stream", "stop", "--home", str(home)).returncode == 0
        kill_at("building generation", "state", "rescale", "--key-groups", "3", "--home", str(home))
        assert Home(home).generation().number == 2
        done = _state(home, "rescale", "--key-groups", "3", "--gate")
        assert done.returncode == 0, done.stderr
        assert running.poll() is None, "the run continues without its job"
        assert fleet("stream", "start", "--home", str(home)).returncode == 0
        _await_batches(Home(home), 2)
        assert (Home(home).generation().number, Home(home).key_groups()) == (4, 3)
    finally:
        running.terminate()
        running.communicate(timeout=PATIENCE_S)
    await_none_left(home)
    require_equal_to_definition(Home(home))
    moved = tmp_path / "moved home"
    shutil.move(home, moved)
    _run_concurrently(
        moved, ("state", "rescale", "--key-groups", "5"), ("state", "repartition", "3"), ("state", "snapshot"), ("maintain",)
    )
    assert (Home(moved).key_groups(), position_after(Home(moved).checkpoint).partitions) == (5, 3)
    assert len(snapshots(Home(moved))) == 2
    statuses = [one.status for one in load_generations(Home(moved).lifecycle).known.values()]
    assert statuses.count("current") == 1 and not {"new", "held"} & {*statuses}
    running = begin("up", "--home", str(moved), "--no-sim", "--no-airflow", "--no-page", "--port", "0")
    _await_batches(Home(moved), 1)
    running.terminate()
    output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, output
    require_equal_to_definition(Home(moved))
    await_none_left(moved)
