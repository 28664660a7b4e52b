"""Chaos under load: random kills lose no message and leave no process."""

import json
import signal
import sys
from pathlib import Path

import pytest

from cli.chaos.ledger import FAULTS
from cli.chaos.targets import OF_CLUSTER, KillKind
from cli.dev.jvm_lease import LEASES_JVMS
from tests.support.fleet_command import await_none_left, begin, fleet

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(3600),
]  # a slow machine waits for two cold starts of the job
PATIENCE_S = 3000


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which chaos creates its homes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(LEASES_JVMS, raising=False)  # chaos kills JVMs
    return tmp_path


def test_two_rounds_of_kills_lose_nothing_and_repeat_nothing(homes: Path) -> None:
    running = begin("chaos", "--rounds", "2", "--seed", "5", "--pause", "2", "--rate", "100", "--json")
    output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, output
    *lines, total = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert {line["kill"] for line in lines} == {victim.value for victim in KillKind if victim not in OF_CLUSTER}
    for line in lines:
        assert line["kills"] == 2
        assert not any(line[fault] for fault in FAULTS), line
    assert total["acknowledged"] > 1_000, "the load was too low"
    assert total["quarantined"]
    assert total["late"]
    assert total["duplicate"]
    assert total["transitions"] > 50
    assert total["reconnects"] > 20
    await_none_left(homes)
    assert not list(homes.glob("fleet-chaos-*")), "the home is removed"


def test_kills_of_executor_worker_and_driver_in_the_middle_of_a_batch_lose_nothing_and_repeat_nothing(homes: Path) -> None:
    kinds = (*OF_CLUSTER, KillKind.LIFECYCLE)
    only = [word for kind in kinds for word in ("--only", kind.value)]
    running = begin("chaos", "--cluster", "--rounds", "1", "--seed", "5", "--pause", "2", "--rate", "100", "--json", *only)
    output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, output
    *lines, total = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert {line["kill"]: line["kills"] for line in lines} == {kind.value: 1 for kind in kinds}
    assert not any(line[fault] for line in lines for fault in FAULTS), lines
    assert total["acknowledged"] > 1_000, "the load was too low"
    await_none_left(homes)
    assert not list(homes.glob("fleet-chaos-*")), "the home is removed"


@pytest.mark.skipif(sys.platform != "linux", reason="needs TMPDIR and signals as on Linux")
def test_ctrl_c_stops_all_processes(homes: Path) -> None:
    running = begin("chaos", "--seed", "5", "--only", "landing", "--pause", "0.5")
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("round 2"):
            break
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, output
    await_none_left(homes)
    assert not list(homes.glob("fleet-chaos-*")), "the home is removed"


@pytest.mark.parametrize(
    "arguments", [("--only", "device"), ("--only", "worker"), ("--rounds", "0"), ("--rate", "0"), ("--devices", "1")]
)
def test_misuse_is_reported(arguments: tuple[str, str]) -> None:
    done = fleet("chaos", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
