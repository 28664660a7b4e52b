"""Facts in memory: the thread that refreshes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT
from fleetpulse.web.live import LiveFleet
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


def test_a_query_that_cannot_begin_leaves_its_core_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LiveFleet(ServedHome(tmp_path / "home").home)
    monkeypatch.setattr("fleetpulse.web.live.QUERY_S", 0.1)
    monkeypatch.setattr(fleet.mirror, "searchable", lambda: 1 / 0)
    for _ in range((os.cpu_count() or 1) + 1):
        with pytest.raises(ZeroDivisionError):
            fleet.query("SELECT 1")
    monkeypatch.undo()
    assert fleet.query("SELECT 1 AS n") == [{"n": 1}]
