"""Facts in memory: the thread that refreshes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT
from tests.support.homes.served import ServedHome

pytestmark = pytest.mark.unit
_LEFT_RUNNING = """
import sys
from pathlib import Path
from fleetpulse.io.home.home import Home
from fleetpulse.web import live
live.REFRESH_S = 0.0
fleet = live.LiveFleet(Home(Path(sys.argv[1])))
fleet.mirror._is_due = lambda now_ms: True  # load again and again
print(fleet.reached().tag)
"""


def test_a_process_ends_although_its_facts_are_being_refreshed(tmp_path: Path) -> None:
    home = ServedHome(tmp_path / "home").home
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LEFT_RUNNING, str(home.path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr, bool(done.stdout)) == (0, "", True)
