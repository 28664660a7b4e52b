"""State verbs on a running, a killed, a stopped and a moved home: verdicts and results of streams stay correct."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from fleetpulse.core.presence.identities import topic_of
from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.commands import COMMAND
from fleetpulse.core.streams.names import StreamName
from fleetpulse.io.checkpoints.checkpoint import committed_batches, judged_up_to, position_after
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.home.command_spool import spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import read_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import snapshots
from tests.support.fleet_command import await_none_left, begin, fleet, kill_at
from tests.support.histories.definition import require_equal_to_definition
from tests.support.histories.stream_agreement import begin_ms, is_in_a_batch, position_ms, require_streams_agree
from tests.support.wait import PATIENCE_S, await_that

SILENCE_MS, ANSWER_MS = 30_000, 10_000
SETTINGS = """allowed_lateness = "20s"
reconnect_grace = "10s"
streams = ["sessions", "vitals", "commands"]
streams_every = "4s"
session_silence = "30s"
command_timeout = "10s"
"""
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


def _send_commands(home: Home, wave: int) -> int:
    """Send a command to each of some devices; return their number."""
    known = tables.query(
        home, "SELECT DISTINCT device_id, site FROM messages WHERE kind = 'telemetry' LIMIT 6", tables=["messages"]
    )
    body = {"op": COMMAND, "name": "set", "payload": {"wave": wave}}
    content = [(one, {**body, "id": f"{wave}-{number}"}) for number, one in enumerate(known)]
    spool(home, [(topic_of(one["device_id"], Kind.CONTROL, one["site"]), sent) for one, sent in content])
    return len(content)


def _await_streams(home: Home, more_ms: int) -> None:
    """Wait until each stream has run a batch whose watermark lies some time after now."""
    target = wall_clock_ms() + more_ms
    await_that(lambda: min(position_ms(home, name) for name in StreamName) >= target, what="the streams")


def _kill_the_job_in_a_batch_of_a_stream(home: Home) -> None:
    pid = read_status(home.run("lifecycle"))["pid"]
    await_that(lambda: is_in_a_batch(home), what="a batch of a stream", pause_s=0.02)
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: read_status(home.run("lifecycle")).get("pid") not in (pid, None), what="the job after its kill")


def test_state_verbs_beside_a_running_fleet_keep_its_verdicts_correct(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "settings.toml").write_text(SETTINGS)
    policy = tmp_path / "policy.toml"
    policy.write_text('[vitals.battery]\nwindow = "20s"\n[vitals.temperature]\nwindow = "1m"\nslide = "20s"\n')
    running = begin("up", "--home", str(home), "--devices", "20", "--no-airflow", "--no-page", "--port", "0")
    try:
        await_that(lambda: Home(home).exists() and judged_up_to(Home(home).checkpoint), what="the first batch", by=running)
        assert fleet("policy", "apply", str(policy), "--home", str(home)).returncode == 0
        _await_batches(Home(home), 2)
        sent = _send_commands(Home(home), 1)
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
        await_that(lambda: all(position_ms(Home(home), name) for name in StreamName), what="the first batches of all streams")
        since_ms = begin_ms(Home(home))
        sent += _send_commands(Home(home), 2)
        _kill_the_job_in_a_batch_of_a_stream(Home(home))
        sent += _send_commands(Home(home), 3)
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
    _await_streams(Home(moved), SILENCE_MS + 80_000)  # so that silence before the move has been covered, and has settled
    running.terminate()
    output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, output
    require_equal_to_definition(Home(moved))
    await_none_left(moved)
    compared = require_streams_agree(
        Home(moved), since_ms, SILENCE_MS, ANSWER_MS, {"battery": (20_000, 20_000), "temperature": (60_000, 20_000)}
    )
    assert compared["commands"] >= 2 * sent > 0, "each command has the row pending, and another one"
    assert compared["sessions"] and compared["vitals"]
