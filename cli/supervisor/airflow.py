"""Supervisor process of a home's Airflow: install, prepare, start, watch, stop.

Rule 1: the stream does not depend on Airflow: a failure here is reported, and ends this process
only.
Rule 2: neither Airflow's components nor their child processes outlive this process. Airflow's
components do not stop their own children.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import structlog

from cli.supervisor.airflow_env import HOST, environment
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import StopSignal, die_with_parent, write_status
from fleetpulse.paths import BOOTSTRAP, ROOT

_LOG: Final = structlog.get_logger("airflow")
PARTS: Final = {  # in the order of their start; without --skip-serve-logs, a log server would listen on all addresses
    "api-server": ("api-server",),
    "dag-processor": ("dag-processor",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
_INSTALL_S: Final = 1200.0
_PREPARE_S: Final = 300.0
_READY_S: Final = 300.0
_STOP_S: Final = 12.0
_RESTARTS: Final = 5
_WITHIN_S: Final = 600.0


def run_airflow(home: Home, port: int, stop: StopSignal) -> None:
    """Run Airflow until stopped.

    Args:
        home: the home, with existing passwords.
        port: loopback port of the UI and the API.
        stop: signal to end.

    Raises:
        FleetError: Airflow cannot be installed or prepared, or does not answer, or a component
            died too often.
    """
    status = _AirflowStatus(home, port)
    status.report("installing", problem="")
    install = [sys.executable, "-I", "-B", str(BOOTSTRAP), str(ROOT), "operations"]
    _await(install, dict(os.environ), "installing Airflow", _INSTALL_S, stop)
    settings = {**os.environ, **environment(home, port)}
    status.report("preparing")
    _await(
        [sys.executable, "-P", "-m", "fleetpulse.orchestration.database"],
        settings,
        "preparing Airflow's database",
        _PREPARE_S,
        stop,
    )
    if stop.is_set():
        return
    parts = [Part(home, name, arguments, settings) for name, arguments in PARTS.items()]
    try:
        status.report("starting")
        for part in parts:
            part.start()
        limit = time.monotonic() + _READY_S
        while not stop.wait(1.0):
            for part in parts:
                part.watch()
            if status.state != "running":
                if _answers(port):
                    status.report("running")
                elif time.monotonic() > limit:
                    raise FleetError(
                        f"Airflow does not answer on port {port} after {_READY_S:.0f} s; see its logs: "
                        f'"{home.logs}/airflow-*.log"',
                        code="airflow-not-ready",
                    )
    finally:
        for part in reversed(parts):
            part.terminate()
        limit = time.monotonic() + _STOP_S
        for part in reversed(parts):
            part.stop(max(0.1, limit - time.monotonic()))


class _AirflowStatus:
    """Writer of Airflow's status file."""

    def __init__(self, home: Home, port: int) -> None:
        self.path = home.run("airflow")
        self.url = f"http://{HOST}:{port}"
        self.state = ""

    def report(self, state: str, problem: str = "") -> None:
        self.state = state
        write_status(self.path, {"pid": os.getpid(), "state": state, "url": self.url, "problem": problem})
        _LOG.info("airflow", state=state, url=self.url)


class Part:
    """Process of one component of Airflow, which logs to ``airflow-NAME.log``.

    Args:
        home: the home.
        name: name of the component.
        arguments: arguments of the command ``airflow``.
        settings: environment of the process.
    """

    def __init__(self, home: Home, name: str, arguments: Sequence[str], settings: dict[str, str]) -> None:
        self.name = name
        self.log = home.logs / f"airflow-{name}.log"
        self.command = [sys.executable, "-P", "-m", "airflow", *arguments]
        self.settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._started: list[psutil.Process] = []
        self._died_at_s: list[float] = []

    def start(self) -> None:
        """Start the process."""
        us = os.getpid()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.settings,
                cwd=working_directory(self.settings),
                preexec_fn=lambda: die_with_parent(us),  # noqa: PLW1509 - this process has no other thread
                start_new_session=True,
            )

    def watch(self) -> None:
        """Restart the process if it died.

        Raises:
            FleetError: the process died too often.
        """
        assert self._process is not None
        self._started = self._descendants() or self._started
        if self._process.poll() is None:
            return
        now_s = time.monotonic()
        self._died_at_s = [at_s for at_s in self._died_at_s if now_s - at_s < _WITHIN_S]
        if len(self._died_at_s) >= _RESTARTS:
            raise FleetError(
                f"Airflow's {self.name} ended unexpectedly (exit {self._process.returncode}) {_RESTARTS} times; "
                f'see its log: "{self.log}"',
                code="airflow-ended",
            )
        self._died_at_s.append(now_s)
        _LOG.warning("a part of airflow died", part=self.name, exit=self._process.returncode)
        self._kill(self._started)
        self.start()

    def terminate(self) -> None:
        """Send SIGTERM to the process, and record its descendants."""
        if self._process is not None and self._process.poll() is None:
            self._started = self._descendants() or self._started
            self._process.terminate()

    def stop(self, patience_s: float) -> None:
        """Wait for the process, kill it after ``patience_s``, and kill its descendants."""
        if self._process is None:
            return
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._started += self._descendants()
            self._process.kill()
            self._process.wait()
        self._kill(self._started)

    def _descendants(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []

    @staticmethod
    def _kill(started: Sequence[psutil.Process]) -> None:
        """Kill processes that still run; a process with a reused id is not killed."""
        for one in started:
            with suppress(psutil.Error):
                if one.is_running():
                    one.kill()


def working_directory(settings: dict[str, str]) -> Path:
    """Return the working directory of Airflow's processes.

    It is not the project's folder: there, Python would import the project's packages instead of
    installed ones of the same name.
    """
    return Path(settings["AIRFLOW_HOME"])


def _await(command: Sequence[str], settings: dict[str, str], what: str, patience_s: float, stop: StopSignal) -> None:
    """Run a program until it ends or a stop is requested; its output goes to this log.

    Raises:
        FleetError: the program failed, or took too long.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=settings)
    limit = time.monotonic() + patience_s
    try:
        while process.poll() is None:
            if stop.wait(0.2):
                return
            if time.monotonic() > limit:
                raise FleetError(
                    f"{what} took longer than {patience_s:.0f} s; try again, or skip Airflow with --no-airflow",
                    code="airflow-step-timeout",
                )
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.returncode:
        raise FleetError(
            f"{what} failed (exit {process.returncode}); see its output above, or skip Airflow with --no-airflow",
            code="airflow-step-failed",
        )


def _answers(port: int) -> bool:
    """Return whether the API reports all of Airflow's components as healthy."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/api/v2/monitor/health", timeout=5) as answer:
            health = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError):
        return False
    return all(part.get("status") == "healthy" for part in health.values())
