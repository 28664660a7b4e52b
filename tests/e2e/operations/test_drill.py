"""Command drill over a small recording: all state operations, and no changed verdict."""

from pathlib import Path

import pytest

from streaming.simulator.scenario import Scenario
from tests.support.fleet_command import await_none_left, begin
from tests.support.histories.histories import START
from tests.support.histories.recordings import record

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(3600)]
DRILL_S = 3000.0  # two runs and six operations take about two minutes on an idle machine
STEPS = [
    "snapshot",
    "migrate from stored form 4 to 6",
    "repartition 4 to 7",
    "rescale 8 to 13 key groups",
    "roll back",
    "bootstrap from the snapshot",
]


def test_a_drill_runs_all_state_operations_and_changes_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(tmp_path / "fleet.ndjson.gz", Scenario(3, 8, START, history_ms=120 * 60_000))
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    running = begin("drill", str(recording))
    try:
        output, _ = running.communicate(timeout=DRILL_S)
    finally:
        running.kill()
    assert running.returncode == 0, output
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("step ")] == [f"step {n} of 6: {step}" for n, step in enumerate(STEPS, 1)]
    parts = [line.split(" of ")[0] for line in lines if line.startswith("part ") and " of 7: " in line]
    assert list(dict.fromkeys(parts)) == [f"part {n}" for n in range(1, 8)], "on a busy machine, a part also reports its progress"
    made = [int(line.split()[1]) for line in lines if line.startswith("generation ") and " is current; " in line]
    assert made == [2, 3, 4, 5, 6], "each operation except the snapshot makes a generation"
    assert lines[-1].startswith("the drill passed: 6 operations, ") and lines[-1].endswith(" judgements, no difference")
    assert int(lines[-1].split()[5].replace(",", "")) > 20
    assert not list(folder.glob("fleet-drill-*")), "both homes are removed"
    await_none_left(folder)
