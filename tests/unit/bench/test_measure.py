"""Process trees as benchmarks see them: an ended process hides no other one."""

import subprocess
import sys
import time

import psutil
import pytest

from bench.measure import arguments_of

pytestmark = pytest.mark.unit


def test_an_ended_process_has_no_arguments() -> None:
    waits = "print('started', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", waits, "classes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout and started.stdout.readline()  # Linux shows no arguments until the program runs
        process = psutil.Process(started.pid)
        assert "classes" in arguments_of(process)
        started.kill()
        limit_s = time.monotonic() + 30
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert arguments_of(process) == []
    assert arguments_of(process) == []
