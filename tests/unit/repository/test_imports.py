"""Imports of modules: every module can be imported, so that no rename is incomplete."""

import subprocess
import sys

import pytest

from fleetpulse import paths
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
PACKAGES = ("fleetpulse", "streaming", "batch", "cli", "bench", "tests")
ELSEWHERE = (
    "fleetpulse/orchestration/",
    "tests/dags/",
    "tests/support/airflow.py",
    "bench/peers/pyflink/",
)  # they need Airflow or Flink
_IMPORT_ALL = """
import importlib, sys

faults = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        faults.append(f"{name}: {type(error).__name__}: {error}")
sys.exit("\\n".join(faults) or 0)
"""


def test_every_module_can_be_imported() -> None:
    paths = [path.relative_to(ROOT).as_posix() for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in paths
        if not path.startswith(ELSEWHERE) and not path.endswith("__main__.py")
    ]
    assert len(names) > 300
    result = subprocess.run(
        [sys.executable, "-P", "-c", _IMPORT_ALL, *names],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_files_in_the_module_paths_exist() -> None:
    assert all(path.exists() for path in (paths.PACKAGE, paths.ROOT, paths.BOOTSTRAP, paths.LOG4J))
