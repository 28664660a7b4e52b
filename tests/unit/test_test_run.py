"""The scheduler of a test run: a small suite of two files, run by real pytest processes."""

import os
import sys
from pathlib import Path

import pytest

from cli.test_plan import Finished, Part
from cli.test_run import ROOT, Scheduler, Screen

pytestmark = pytest.mark.unit
ONE = """
import pytest
def test_passes(): pass
def test_skips(): pytest.skip("no broker")
"""
TWO = """
def test_fails():
    print("words of the test")
    assert False
"""


def test_parts_run_at_once_and_only_the_output_of_one_that_fails_is_shown(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "test_two.py").write_text(TWO)
    written: list[str] = []
    scheduler = Scheduler(
        command=lambda part, events: [
            *(sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.reporting"),
            *("--rootdir", str(tmp_path), "--fleet-events", str(events), *part.targets),
        ],
        environment={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        root=tmp_path,
        folder=tmp_path,
        jobs=2,
        screen=Screen(written.append, is_terminal=False),
    )
    ended = scheduler.run([Part("one", ("test_one.py",), 1.0), Part("two", ("test_two.py",), 1.0), Part("none", ("-k", "no"), 1)])
    results = {one.part.label: [(test.test, test.outcome, test.reason) for test in one.finished] for one in ended}
    assert results == {
        "one": [("test_one.py::test_passes", "passed", ""), ("test_one.py::test_skips", "skipped", "no broker")],
        "two": [("test_two.py::test_fails", "failed", "")],
        "none": [],
    }
    assert {one.part.label: (one.code(), one.collected, one.left_out) for one in ended} == {
        "one": (0, 2, 0),
        "two": (1, 1, 0),
        "none": (0, 0, 3),
    }
    assert all(isinstance(test, Finished) and test.wall_s >= 0 for one in ended for test in one.finished)
    said = "".join(written)
    assert "words of the test" in said and "== two: FAILED, 0 passed, 1 failed, 0 skipped, in " in said
    assert "test_passes" not in said and "== one: 1 passed, 0 failed, 1 skipped, in " in said
