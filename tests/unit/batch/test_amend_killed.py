"""An amend that is killed with SIGKILL at any of its writes, and given again, comes to what an undisturbed one comes to."""

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
from fleetpulse.reports.replay_origin import DONE
from tests.support.histories.histories import row, tick
from tests.support.histories.histories import signal as heartbeat
from tests.support.homes.amended import DEPLOYMENT, RULES, agrees_with_definition, correction_rows
from tests.support.homes.homes import JudgedHome, empty

pytestmark = pytest.mark.unit
# What is written, in order, by an amend behind which the job has not judged yet what corrects, and by the next one.
ROUNDS: Final = (("append_of", "spool", "append_of", "write_amend_progress"), ("write_amend_progress", "append_of"))
IN_DEFAULT: Final = ((0, 2, "after"), (1, 1, "before"))  # between two writes that belong together
CHILD = """
import os, signal, sys
from pathlib import Path
import batch.amend as job
from fleetpulse.io.home.home import Home

at, after, calls = int(sys.argv[2]), sys.argv[3] == "after", 0

def killing(name, whole):
    def call(*arguments):
        global calls
        here, calls = calls == at, calls + 1
        print(name, flush=True)
        if here and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(*arguments)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
    return call

for where, name in ((job.tables, "append_of"), (job, "spool"), (job, "write_amend_progress")):
    setattr(where, name, killing(name, getattr(where, name)))
job.amend_home(Home(Path(sys.argv[1])), job.AmendRequest())
"""


def _begun(home: Path) -> JudgedHome:
    """Two devices whose verdicts what came late takes back in part; what corrects one of them takes effect in the past."""
    told = JudgedHome(empty(home, DEPLOYMENT))
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
    told.land_and_judge(policy, heartbeat(10), tick(100))
    told.land_and_judge(heartbeat(40, received_s=110), heartbeat(90, received_s=110), tick(120))
    told.land_and_judge(heartbeat(130, "e"), heartbeat(150, "e"), heartbeat(140, "e", received_s=155), tick(156))
    return told


def _go_on(judged: JudgedHome) -> None:
    """Let the job judge what corrects."""
    judged.land_and_judge(*correction_rows(judged.home, 157), tick(300))


def _outcome(home: Home) -> dict[str, Any]:
    """Return all that an amend leaves behind."""
    said: dict[str, Counter[Judgement]] = {one: Counter(its) for one, its in judgements_by_device(home, ["d", "e"]).items()}
    commands = [json.loads(path.read_text()) for path in home.commands.glob("*.json")]
    return {
        "said": said,
        "commands": commands,
        "done": tables.landed(home, JUDGEMENTS, DONE),
        "reached": read_amend_progress(home),
    }


def _amend_in_a_process(home: Home, at: int, moment: str) -> tuple[int, tuple[str, ...]]:
    """Amend, killed at a write; return the return code, and what it came to write."""
    command = [sys.executable, "-W", "error", "-c", CHILD, str(home.path), str(at), moment]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, tuple(done.stdout.split())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each round leaves behind where nothing is killed."""
    judged = _begun(tmp_path_factory.mktemp("undisturbed") / "home")
    outcomes: list[dict[str, Any]] = []
    for number, writes in enumerate(ROUNDS):
        if number:
            _go_on(judged)
        assert _amend_in_a_process(judged.home, len(writes), "before") == (0, writes), "each write is one that is killed at"
        outcomes.append(_outcome(judged.home))
    return outcomes


@pytest.mark.parametrize(
    ("round_no", "at", "moment"),
    [
        pytest.param(number, at, moment, marks=() if (number, at, moment) in IN_DEFAULT else pytest.mark.extended)
        for number, writes in enumerate(ROUNDS)
        for at, moment in product(range(len(writes)), ("before", "after"))
    ],
)
def test_killed_at_any_write_and_given_again_it_says_everything_once(
    tmp_path: Path, undisturbed: list[dict[str, Any]], round_no: int, at: int, moment: str
) -> None:
    judged = _begun(tmp_path / "home")
    home = judged.home
    for number, wanted in enumerate(undisturbed):
        if number:
            _go_on(judged)
        if number == round_no:
            assert _amend_in_a_process(home, at, moment) == (-signal.SIGKILL, ROUNDS[number][: at + 1])
        amend_home(home, AmendRequest())
        assert _outcome(home) == wanted
        assert agrees_with_definition(home) and agrees_with_definition(home, "e")
    assert amend_home(home, AmendRequest()) == []
    amended = [one for one in judgements_by_device(home, ["d"])["d"] if one.amendment_no is not None]
    assert sorted(one.amendment_no or 0 for one in amended) == list(range(1, len(amended) + 1))
    assert JudgementKind.RETRACT in {one.kind for one in amended}
