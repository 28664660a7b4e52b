"""Crash recovery of amend: a killed and repeated run has the results of an undisturbed run."""

import json
import signal
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from batch.amend import AmendRequest, amend_home
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.amend_progress import read_amend_progress
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.paths import ROOT
from fleetpulse.reports.device_judgements import judgements_by_device
from fleetpulse.reports.history.replay_origin import DONE
from tests.support.histories.histories import row, tick
from tests.support.histories.histories import signal as heartbeat
from tests.support.homes.amended import DEPLOYMENT, RULES, agrees_with_definition, correction_rows
from tests.support.homes.homes import JudgedHome, empty

pytestmark = pytest.mark.unit
# Writes, in order, of an amend before the job has judged the correction, and of the next amend.
ROUNDS: Final = (("append_of", "spool", "append_of", "write_amend_progress"), ("write_amend_progress", "append_of"))
IN_DEFAULT: Final = ((0, 2, "after"), (1, 1, "before"))  # between two writes that belong together
CHILD = """
import os, signal, sys
from pathlib import Path
import batch.amend as job
from fleetpulse.io.home.home import Home

at, after, calls = int(sys.argv[2]), sys.argv[3] == "after", 0

def killing(name, original):
    def call(*arguments):
        global calls
        is_target, calls = calls == at, calls + 1
        print(name, flush=True)
        if is_target and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*arguments)
        if is_target:
            os.kill(os.getpid(), signal.SIGKILL)
    return call

for module, name in ((job.tables, "append_of"), (job, "spool"), (job, "write_amend_progress")):
    setattr(module, name, killing(name, getattr(module, name)))
job.amend_home(Home(Path(sys.argv[1])), job.AmendRequest())
"""


def _judged_home(home: Path) -> JudgedHome:
    """Judge two devices with late messages; the correction of one of them takes effect in the past."""
    judged = JudgedHome(empty(home, DEPLOYMENT))
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
    judged.land_and_judge(policy, heartbeat(10), tick(100))
    judged.land_and_judge(heartbeat(40, received_s=110), heartbeat(90, received_s=110), tick(120))
    judged.land_and_judge(heartbeat(130, "e"), heartbeat(150, "e"), heartbeat(140, "e", received_s=155), tick(156))
    return judged


def _judge_correction(judged: JudgedHome) -> None:
    """Let the job judge the correction rows."""
    judged.land_and_judge(*correction_rows(judged.home, 157), tick(300))


def _outcome(home: Home) -> dict[str, Any]:
    """Return all results of an amend."""
    judgements: dict[str, Counter[Judgement]] = {
        device_id: Counter(judged) for device_id, judged in judgements_by_device(home, ["d", "e"]).items()
    }
    commands = [json.loads(path.read_text()) for path in home.commands.glob("*.json")]
    return {
        "judgements": judgements,
        "commands": commands,
        "processed_ms": tables.landed(home, JUDGEMENTS, DONE),
        "progress": read_amend_progress(home),
    }


def _amend_in_process(home: Home, write_no: int, moment: str) -> tuple[int, tuple[str, ...]]:
    """Amend in a process that is killed at a write; return its return code and the writes it reached."""
    command = [sys.executable, "-W", "error", "-c", CHILD, str(home.path), str(write_no), moment]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in process.stderr, process.stderr
    return process.returncode, tuple(process.stdout.split())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each round without a kill."""
    judged = _judged_home(tmp_path_factory.mktemp("undisturbed") / "home")
    outcomes: list[dict[str, Any]] = []
    for number, writes in enumerate(ROUNDS):
        if number:
            _judge_correction(judged)
        assert _amend_in_process(judged.home, len(writes), "before") == (0, writes), "every write is a kill point"
        outcomes.append(_outcome(judged.home))
    return outcomes


@pytest.mark.parametrize(
    ("round_no", "write_no", "moment"),
    [
        pytest.param(number, write_no, moment, marks=() if (number, write_no, moment) in IN_DEFAULT else pytest.mark.extended)
        for number, writes in enumerate(ROUNDS)
        for write_no, moment in product(range(len(writes)), ("before", "after"))
    ],
)
def test_amend_killed_at_any_write_and_repeated_emits_each_judgement_once(
    tmp_path: Path, undisturbed: list[dict[str, Any]], round_no: int, write_no: int, moment: str
) -> None:
    judged = _judged_home(tmp_path / "home")
    home = judged.home
    for number, expected in enumerate(undisturbed):
        if number:
            _judge_correction(judged)
        if number == round_no:
            assert _amend_in_process(home, write_no, moment) == (-signal.SIGKILL, ROUNDS[number][: write_no + 1])
        amend_home(home, AmendRequest())
        assert _outcome(home) == expected
        assert agrees_with_definition(home) and agrees_with_definition(home, "e")
    assert amend_home(home, AmendRequest()) == []
    amended = [one for one in judgements_by_device(home, ["d"])["d"] if one.amendment_no is not None]
    assert sorted(one.amendment_no or 0 for one in amended) == list(range(1, len(amended) + 1))
    assert JudgementKind.RETRACT in {one.kind for one in amended}
