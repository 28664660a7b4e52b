"""Mark of a session: an executor that does not find it runs no Python task."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.io.spark.shared_mark import mark_shared, require_mark
from fleetpulse.paths import ROOT
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def test_an_executor_that_sees_the_folder_of_the_session_may_work(tmp_path: Path) -> None:
    require_mark(mark_shared(tmp_path))
    require_mark({})


def test_an_executor_with_another_or_no_folder_is_refused(tmp_path: Path) -> None:
    before = mark_shared(tmp_path)
    mark_shared(tmp_path)
    with refused("home-not-shared", match="another session"):
        require_mark(before)
    with refused("home-not-shared", match="No such file"):
        require_mark({**before, "FLEET_SHARED_MARK": str(tmp_path / "absent" / "mark")})


def test_the_daemon_of_python_workers_does_not_start_without_the_mark(tmp_path: Path) -> None:
    environment = {**os.environ, **mark_shared(tmp_path), "PYTHONPATH": str(ROOT)}
    (tmp_path / "mark").unlink()
    command = [sys.executable, "-P", "-m", "fleetpulse.io.lifecycle.python_daemon", "pyspark.worker"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1].startswith("fleetpulse.core.errors.FleetError: the executor on ")
