"""What an image has beside Python and Java is installed by a script that needs neither an engine nor an image."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse import __version__
from fleetpulse.io.java import cache_dir

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_tree_is_installed_and_starts_without_a_network(tmp_path: Path) -> None:
    tree = tmp_path / "opt"
    for room in ("fleetpulse", "streaming", "batch", "cli", "infra", "requirements"):
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__", "secrets"))
    shutil.copy(ROOT / "fleet", tree)
    kept = {name: value for name, value in os.environ.items() if name not in ("FLEET_VENV", "PYTHONPATH")}
    ours = {
        **kept,
        "FLEET_CACHE": str(cache_dir()),  # what was fetched once is not fetched again
        "FLEET_PYTHON": sys.executable,
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
    }
    for step in ("packages", "rest"):
        command = [tree / "infra" / "images" / "install", step]  # as the Dockerfile has it: Airflow too
        done = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the fold is compiled"
    assert any((tmp_path / "numba").rglob("*.nbc"))
    has = "import airflow, great_expectations, psycopg2"
    done = subprocess.run([tree / ".venv" / "bin" / "python", "-c", has], env={**ours, "AIRFLOW_HOME": str(tmp_path / "airflow")},
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    nobody_to_ask = {**ours, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    for verb in ("version", "fetch"):
        done = subprocess.run([tree / "fleet", verb], env=nobody_to_ask, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert verb != "version" or done.stdout.strip() == __version__
