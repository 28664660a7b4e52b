"""The scheduler of a test run: a small suite of two files, run by real pytest processes."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from cli.dev.test_plan import Finished, Form, Part, choose
from cli.dev.test_run import IDLE_S, IdleCores, Scheduler, Screen, files_of
from fleetpulse.paths import ROOT

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


def scheduler(folder: Path, written: list[str]) -> Scheduler:
    """Return a scheduler of pytest processes in a folder; its lines go to a list."""
    return Scheduler(
        command=lambda part, events: [
            *(sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.support.reporting"),
            *("--rootdir", str(folder), "--fleet-events", str(events), *part.targets),
        ],
        environment={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        root=folder,
        folder=folder,
        jobs=2,
        screen=Screen(written.append, is_terminal=False),
    )


def test_a_further_part_may_start_when_the_cores_were_idle_for_a_while() -> None:
    at_s, idle_s = 0.0, 0.0
    cores = IdleCores(lambda: (idle_s, 2 * at_s), lambda: at_s)
    assert not cores.found(), "it has not watched them yet"
    at_s, idle_s = IDLE_S, 0.31 * 2 * IDLE_S
    assert cores.found()
    assert not cores.found(), "it watches them anew"
    at_s = 2 * IDLE_S
    assert not cores.found(), "they were busy"


def test_parts_run_at_once_and_only_the_output_of_one_that_fails_is_shown(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "test_two.py").write_text(TWO)
    written: list[str] = []
    ended = scheduler(tmp_path, written).run(
        [Part("one", ("test_one.py",), 1.0), Part("two", ("test_two.py",), 1.0), Part("none", ("-k", "no"), 1)]
    )
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


def test_a_part_that_passes_without_the_end_of_each_test_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "conftest.py").write_text(
        "import os, pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_runtest_logstart(nodeid):\n"
        "    if nodeid.endswith('skips'): os._exit(0)\n"
    )
    written: list[str] = []
    (part,) = scheduler(tmp_path, written).run([Part("one", ("test_one.py",), 1.0)])
    assert (part.code(), part.passed, part.incomplete, part.broken) == (0, False, True, True)
    assert "== one: FAILED, ended after 1 of 2 tests, during test_one.py::test_skips, in " in "".join(written)


def test_a_run_that_is_broken_off_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(
        "import os, pathlib, subprocess, sys, time\ndef test_waits():\n"
        "    started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "    pathlib.Path('pids').write_text(f'{os.getpid()} {started.pid}')\n"
        "    time.sleep(600)\n"
    )

    class Broken(Exception):
        pass

    def broken(_: str) -> None:
        if (tmp_path / "pids").exists() and (tmp_path / "pids").read_text():
            raise Broken

    running = scheduler(tmp_path, [])
    running.screen = Screen(broken, is_terminal=True)
    with pytest.raises(Broken):
        running.run([Part("waits", ("test_waits.py",), 1.0)])
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (["unit", "tests/e2e/ingest/test_access.py"], {"unit", "e2e"}),
        (["tests/unit", "tests/e2e/ingest/test_access.py"], {"unit", "e2e"}),
    ],
)
def test_a_layer_beside_a_file_of_another_layer_runs_whole(words: list[str], layers: set[str]) -> None:
    files, left_out = files_of(choose(words, Form.DEFAULT))
    assert set(files) == layers and left_out == 0
    assert files["e2e"] == ["tests/e2e/ingest/test_access.py"] and "tests/unit/cli/dev/test_test_run.py" in files["unit"]
