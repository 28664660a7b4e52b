"""Processes killed at random under load: nothing is lost, and nothing is left behind."""

import json
import signal
import sys
from pathlib import Path

import pytest

from cli.chaos.ledger import FAULTS
from cli.chaos.targets import KillKind
from tests.support.fleet_command import await_none_left, begin, fleet

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(1800),
]  # a slow machine waits for two cold starts of the job
PATIENCE_S = 1500


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where chaos makes its homes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_two_rounds_of_kills_lose_nothing_and_repeat_nothing(homes: Path) -> None:
    running = begin("chaos", "--rounds", "2", "--seed", "5", "--pause", "2", "--rate", "100", "--json")
    said, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, said
    *lines, total = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert {line["kill"] for line in lines} == {victim.value for victim in KillKind}
    for line in lines:
        assert line["kills"] == 2
        assert not any(line[fault] for fault in FAULTS), line
    assert total["acknowledged"] > 1_000, "there was hardly any load"
    assert total["quarantined"]
    assert total["late"]
    assert total["duplicate"]
    assert total["transitions"] > 50
    assert total["reconnects"] > 20
    await_none_left(homes)
    assert not list(homes.glob("fleet-chaos-*")), "the home is removed"


@pytest.mark.skipif(sys.platform != "linux", reason="TMPDIR and signals as Linux has them")
def test_ctrl_c_stops_all_that_was_started(homes: Path) -> None:
    running = begin("chaos", "--seed", "5", "--only", "landing", "--pause", "0.5")
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("round 2"):
            break
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, said
    await_none_left(homes)
    assert not list(homes.glob("fleet-chaos-*")), "the home is removed"


@pytest.mark.parametrize("words", [("--only", "device"), ("--rounds", "0"), ("--rate", "0"), ("--devices", "1")])
def test_misuse_is_said(words: tuple[str, str]) -> None:
    done = fleet("chaos", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
