"""Pytest plugin that writes a JSON line for each test that starts or ends.

``./fleet test`` reads the lines during the run.
"""

import json
import os
import time
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from cli.dev.jvm_lease import LEASES

OPTION: Final = "--fleet-events"
_STARTS_PROCESSES: Final = ("tests/spark/", "tests/e2e/")  # tests whose CPU time includes running descendants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, default=None, help="file that gets a line for each test that starts or ends")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption(OPTION)) is not None:
        config.pluginmanager.register(Reporting(path), "fleet-reporting")


class Reporting:
    """Writer of the events of one pytest process."""

    def __init__(self, path: Path) -> None:
        self._path, self._left_out = path, 0
        self._outcome, self._reason = "passed", ""
        self._began_s = self._cpu_s = 0.0
        self._starts = 0

    def _write(self, event: str, **more: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._left_out += len(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("finished", test=report.nodeid, outcome="failed")
        elif report.skipped:
            self._write("finished", test=report.nodeid, outcome="skipped", reason=_reason(report.longrepr))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", tests=len(session.items), left_out=self._left_out)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._reason = "passed", ""
        self._began_s, self._cpu_s, self._starts = time.monotonic(), _cpu_s(nodeid), _starts()
        self._write("started", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed"
        elif report.skipped and self._outcome == "passed":
            self._outcome, self._reason = "skipped", getattr(report, "wasxfail", "") or _reason(report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(
            "finished",
            test=nodeid,
            outcome=self._outcome,
            reason=self._reason,
            wall_s=time.monotonic() - self._began_s,
            cpu_s=max(0.0, _cpu_s(nodeid) - self._cpu_s),
            spark_starts=_starts() - self._starts,
        )


def _reason(outcome: Any) -> str:
    return str(outcome[2] if isinstance(outcome, tuple) else outcome).removeprefix("Skipped: ")


def _cpu_s(test: str) -> float:
    """Return CPU seconds of this process, reaped children, running descendants and ended leases of JVMs."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    if test.startswith(_STARTS_PROCESSES):
        for process in psutil.Process().children(recursive=True):
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.Error:
                continue
        total += _leased_s()
    return total


def _leased_s() -> float:
    try:
        return sum(map(float, Path(os.environ["FLEET_STARTS"]).with_name(LEASES).read_text().split()))
    except (KeyError, OSError):
        return 0.0


def _starts() -> int:
    try:
        return Path(os.environ["FLEET_STARTS"]).read_bytes().count(b"\n")
    except (KeyError, OSError):
        return 0
