"""A whole drill over a small recording, as a person gives the command."""

from pathlib import Path

import pytest

from fleetpulse.core.scenario import Scenario
from tests.support.fleet_command import await_none_left, begin
from tests.support.histories.histories import START
from tests.support.histories.recordings import record

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]
DRILL_S = 1500.0  # two runs and six operations: some two minutes on a machine that does nothing else
STEPS = [
    "snapshot",
    "migrate from stored form 4 to 5",
    "repartition 4 to 7",
    "rescale 8 to 13 key groups",
    "roll back",
    "bootstrap from the snapshot",
]


def test_all_that_can_be_done_to_the_state_is_done_to_a_recording_and_changes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = record(tmp_path / "fleet.ndjson.gz", Scenario(3, 8, START, history_ms=120 * 60_000))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    running = begin("drill", str(recording))
    try:
        said, _ = running.communicate(timeout=DRILL_S)
    finally:
        running.kill()
    assert running.returncode == 0, said
    lines = said.splitlines()
    assert [line for line in lines if line.startswith("step ")] == [f"step {n} of 6: {step}" for n, step in enumerate(STEPS, 1)]
    parts = [line.split(" of ")[0] for line in lines if line.startswith("part ") and " of 7: " in line]
    assert list(dict.fromkeys(parts)) == [f"part {n}" for n in range(1, 8)], "on a busy machine one says how far it is besides"
    made = [int(line.split()[1]) for line in lines if line.startswith("generation ") and " is current; " in line]
    assert made == [2, 3, 4, 5, 6], "each but the snapshot makes one"
    assert lines[-1].startswith("the drill passed: 6 operations, ") and lines[-1].endswith(" judgements, no difference")
    assert int(lines[-1].split()[5].replace(",", "")) > 20
    assert not list(place.glob("fleet-drill-*")), "both homes are removed"
    await_none_left(place)
