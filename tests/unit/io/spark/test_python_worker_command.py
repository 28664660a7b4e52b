"""Command of Spark's Python workers: their modules come from the installed packages, whose compiled form is stored."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.io.spark.jars import spark_home
from fleetpulse.paths import PYTHON_WORKER, ROOT

pytestmark = pytest.mark.unit
SHOWN = "import json, pyspark, sys; print(json.dumps([pyspark.__file__, sys.executable, sys.argv[1:]]))"


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "PYTHONSAFEPATH": "1", **environment}
    return subprocess.run([PYTHON_WORKER, *arguments], env=given, capture_output=True, text=True, check=False, timeout=60)


def test_a_worker_imports_the_installed_pyspark_and_not_the_archive_of_it() -> None:
    archives = [*(spark_home() / "python" / "lib").glob("*.zip"), *(spark_home() / "jars").glob("spark-core_*.jar")]
    assert len(archives) == 3
    path = os.pathsep.join(map(str, [*archives, ROOT]))
    done = _run({"PYTHONPATH": path, "FLEET_PYTHON": sys.executable}, "-c", SHOWN, "a b", "*")
    assert json.loads(done.stdout) == [str(spark_home() / "__init__.py"), sys.executable, ["a b", "*"]], done.stderr


def test_a_worker_keeps_all_other_entries_of_its_path(tmp_path: Path) -> None:
    first, second = tmp_path / "with a space", tmp_path / "*"
    path = f"/spark/pyspark.zip:{first}:/spark/jars/spark-core_2.13-4.2.0.jar:{second}:/own.zip"
    command = "import os; print(os.environ['PYTHONPATH'])"
    assert _run({"PYTHONPATH": path, "FLEET_PYTHON": sys.executable}, "-c", command).stdout == f"{first}:{second}:/own.zip\n"
    assert _run({"FLEET_PYTHON": sys.executable}, "-c", command).stdout == "\n"


def test_a_worker_without_an_interpreter_names_the_variable() -> None:
    done = _run({}, "-c", SHOWN)
    assert done.returncode != 0
    assert "FLEET_PYTHON: is missing; a session of fleetpulse sets it" in done.stderr
