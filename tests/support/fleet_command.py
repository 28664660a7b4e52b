"""Calls of ``./fleet`` as a process, its output rows and remaining processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.dev.jvm_lease import LEASES_JVMS
from fleetpulse.paths import ROOT
from tests.support.processes import register_process
from tests.support.wait import PATIENCE_S, await_that


def fleet_command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cli", *words]


def fleet(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        fleet_command(*words), capture_output=True, text=True, timeout=PATIENCE_S, env=environment, cwd=ROOT, check=False
    )


def begin(*words: str, own_jvm: bool = False) -> subprocess.Popen[str]:
    """Start a command.

    Args:
        words: its words after ``./fleet``.
        own_jvm: whether it starts JVMs, instead of leasing them from the pool of the test run.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if own_jvm:
        environment.pop(LEASES_JVMS, None)
    return register_process(
        subprocess.Popen(
            fleet_command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        )
    )


def rows_of(*words: str) -> list[dict[str, Any]]:
    done = fleet(*words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def left_running(home: Path) -> list[str]:
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and any(str(home) in word for word in process.info["cmdline"])
    ]


def await_none_left(home: Path) -> None:
    await_that(lambda: not left_running(home), limit_s=20, what="the end of all that was started")


def kill_at(words: str, *command: str) -> None:
    """Kill a command and its descendants as soon as it prints a text."""
    running = begin(*command, own_jvm=True)
    assert running.stdout is not None
    for line in running.stdout:
        if words in line:
            os.kill(running.pid, signal.SIGKILL)
            break
    else:
        pytest.fail(f"its output never had {words!r}")
    assert running.wait(PATIENCE_S) == -signal.SIGKILL, "it had ended"
