"""Scheduler of a test run: parts run in parallel, and the output of failed parts is shown."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cli.dev.test_plan import Finished, Form, Part, choose
from cli.dev.test_run import environment_of_parts, files_of
from cli.dev.test_scheduler import IDLE_S, IdleCores, Scheduler, Screen
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
PASSED_AND_SKIPPED = """
import pytest
def test_passes(): pass
def test_skips(): pytest.skip("no broker")
"""
FAILED = """
def test_fails():
    print("output of the test")
    assert False
"""
BUSY_S = 0.4
BUSY = f"import time\nwhile time.process_time() < {BUSY_S}: pass"


def scheduler(folder: Path, written: list[str]) -> Scheduler:
    """Return a scheduler of pytest processes in a folder; its output is appended to a list."""
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_the_cpu_time_of_an_orphan_that_ends_after_the_last_part_counts() -> None:
    part = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BUSY!r}])"
    runner = "import resource, subprocess, sys\nfrom cli.dev.test_run import reaping_orphans\n"
    runner += f"with reaping_orphans():\n    subprocess.run([sys.executable, '-c', {part!r}], check=True)\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{runner}print(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert float(done.stdout) > BUSY_S


def test_an_additional_part_may_start_after_the_cores_were_idle() -> None:
    at_s, idle_s = 0.0, 0.0
    cores = IdleCores(lambda: (idle_s, 2 * at_s), lambda: at_s)
    assert not cores.found(), "the first call starts the observation"
    at_s, idle_s = IDLE_S, 0.31 * 2 * IDLE_S
    assert cores.found()
    assert not cores.found(), "the observation starts again"
    at_s = 2 * IDLE_S
    assert not cores.found(), "the cores were busy"


def test_parts_run_in_parallel_and_only_failed_parts_show_their_output(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(PASSED_AND_SKIPPED)
    (tmp_path / "test_two.py").write_text(FAILED)
    written: list[str] = []
    parts = scheduler(tmp_path, written).run(
        [Part("one", ("test_one.py",), 1.0), Part("two", ("test_two.py",), 1.0), Part("none", ("-k", "no"), 1)]
    )
    results = {part.part.label: [(test.test, test.outcome, test.reason) for test in part.finished] for part in parts}
    assert results == {
        "one": [("test_one.py::test_passes", "passed", ""), ("test_one.py::test_skips", "skipped", "no broker")],
        "two": [("test_two.py::test_fails", "failed", "")],
        "none": [],
    }
    assert {part.part.label: (part.code(), part.collected, part.left_out) for part in parts} == {
        "one": (0, 2, 0),
        "two": (1, 1, 0),
        "none": (0, 0, 3),
    }
    assert all(isinstance(test, Finished) and test.wall_s >= 0 for part in parts for test in part.finished)
    output = "".join(written)
    assert "output of the test" in output and "== two: FAILED, 0 passed, 1 failed, 0 skipped, in " in output
    assert "test_passes" not in output and "== one: 1 passed, 0 failed, 1 skipped, in " in output


def test_a_time_limit_stops_and_leaves_out_optional_parts_only(tmp_path: Path) -> None:
    for name in ("late", "waits"):
        (tmp_path / f"test_{name}.py").write_text("import time\ndef test_waits(): time.sleep(600)\n")
    (tmp_path / "test_one.py").write_text(PASSED_AND_SKIPPED)
    written: list[str] = []
    running = scheduler(tmp_path, written)
    running.within_s = 1.5
    late = Part("late", ("test_late.py",), 0.5, optional=True)  # it is expected to end in time, and does not
    never = Part("waits", ("test_waits.py",), 2.0, optional=True)
    ended = running.run([never, late, Part("one", ("test_one.py",), 1.0)])
    assert [(one.part.label, one.passed) for one in ended] == [("one", True)]
    assert (running.not_started, running.stopped) == ([never], [late])
    assert "FAILED" not in "".join(written)


def test_a_part_fails_if_one_of_its_tests_did_not_end(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(PASSED_AND_SKIPPED)
    (tmp_path / "conftest.py").write_text(
        "import os, pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_runtest_logstart(nodeid):\n"
        "    if nodeid.endswith('skips'): os._exit(0)\n"
    )
    written: list[str] = []
    (part,) = scheduler(tmp_path, written).run([Part("one", ("test_one.py",), 1.0)])
    assert (part.code(), part.passed, part.incomplete, part.broken) == (0, False, True, True)
    assert "== one: FAILED, ended after 1 of 2 tests, during test_one.py::test_skips, in " in "".join(written)


@pytest.mark.parametrize("ignored", [False, True])  # as a shell starts a command in the background
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, *, ignored: bool) -> None:
    (tmp_path / "test_waits.py").write_text(
        "import os, pathlib, subprocess, sys, time\ndef test_waits():\n"
        "    started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "    pathlib.Path('pids').write_text(f'{os.getpid()} {started.pid}')\n"
        "    try:\n        time.sleep(600)\n"
        "    finally:\n        pathlib.Path('ended').touch()\n"
    )

    class Interrupted(Exception):
        pass

    def interrupt(_: str) -> None:
        if (tmp_path / "pids").exists() and (tmp_path / "pids").read_text():
            raise Interrupted

    running = scheduler(tmp_path, [])
    running.screen = Screen(interrupt, is_terminal=True)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(Interrupted):
            running.run([Part("waits", ("test_waits.py",), 1.0)])
        assert not ignored or signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (tmp_path / "ended").exists(), "the part ended in order, and was not killed"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        (["unit", "tests/e2e/ingest/test_access.py"], {"unit", "e2e"}),
        (["tests/unit", "tests/e2e/ingest/test_access.py"], {"unit", "e2e"}),
    ],
)
def test_a_layer_named_with_a_file_of_another_layer_runs_all_its_files(arguments: list[str], layers: set[str]) -> None:
    files, left_out = files_of(choose(arguments, Form.DEFAULT))
    assert set(files) == layers and left_out == 0
    assert files["e2e"] == ["tests/e2e/ingest/test_access.py"] and "tests/unit/cli/dev/test_test_run.py" in files["unit"]


def test_processes_of_a_run_may_store_bytecode() -> None:
    own = {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    assert environment_of_parts(Form.ALL, own, {"POOL": "p"}) == {"PATH": "/bin", "FLEET_TEST_FORM": "all", "POOL": "p"}
