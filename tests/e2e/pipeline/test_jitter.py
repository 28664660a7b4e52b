"""Verdict jitter: a snapshot and a stop of the job first write the delayed verdicts."""

from pathlib import Path

import pytest

from fleetpulse.core.rows import FLUSH
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.snapshots import shown_snapshot
from fleetpulse.reports import judgements, messages
from tests.support.fleet_command import await_none_left, begin, fleet
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]
_DUE_MS = 5_000 + 1_000  # silence after which a device is offline, and the lateness


def _register(home: Path, *names: str) -> None:
    """Register devices that never speak, and wait until the job has judged past their deadline."""
    path = home / "devices.csv"
    path.write_text("device_id\n" + "".join(f"{name}\n" for name in names))
    done = fleet("device", "import", str(path), "--home", str(home))
    assert done.returncode == 0, done.stderr

    def is_past() -> bool:
        registered = [one.received_at_ms for one in messages.rows(Home(home)) if one.device_id in names]
        reached = judged_up_to(Home(home).checkpoint)
        return len(registered) == len(names) and reached is not None and reached[1] > max(registered) + _DUE_MS

    await_that(is_past, what="the deadline of devices that never speak")


def _offline(home: Path) -> set[str]:
    return {one["device_id"] for one in judgements.transitions(Home(home)) if one["trigger"] == "silence"}


def _flushes(home: Path) -> int:
    return sum(one.contents().get("op") == FLUSH for one in messages.rows(Home(home)))


def test_delayed_verdicts_are_written_before_a_snapshot_and_before_a_stop(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "settings.toml").write_text('verdict_jitter = "24h"\nallowed_lateness = "1s"\n')
    policy = tmp_path / "policy.toml"
    policy.write_text('[rules]\ntimeout = "5s"\n')
    first, second = {f"pump-{number}" for number in range(8)}, {f"valve-{number}" for number in range(8)}
    running = begin("up", "--home", str(home), "--no-sim", "--no-airflow", "--no-page", "--port", "0", "--policy", str(policy))
    try:
        await_that(lambda: Home(home).exists() and judged_up_to(Home(home).checkpoint), what="the first batch", by=running)
        _register(home, *first)
        assert _offline(home) == set(), "their verdicts are delayed for hours"
        done = fleet("state", "snapshot", "--home", str(home))
        assert done.returncode == 0, done.stderr
        assert _offline(home) == first
        taken = shown_snapshot(Home(home))
        assert taken is not None and taken.devices == len(first)
        _register(home, *second)
        assert _offline(home) == first
        done = fleet("stream", "stop", "--home", str(home))
        assert done.returncode == 0, done.stderr
        assert "not flushed" not in done.stderr
        assert _offline(home) == first | second
        assert _flushes(home) == 2
        done = fleet("state", "snapshot", "--home", str(home))
        assert done.returncode == 0, done.stderr
        assert "verdicts were not flushed: the lifecycle job is stopped" in done.stderr
        assert _flushes(home) == 2, "no job was running to judge another flush"
    finally:
        running.terminate()
        output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, output
    await_none_left(home)
