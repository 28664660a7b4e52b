"""Benchmark of a backtest against a replay of the same recording.

Run it by ``./fleet bench state --recording FILE``.

Rule 1: both run as commands, including the start of their processes; each has one warm-up run.
Rule 2: CPU is that of the command and of all its child processes.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.paths import ROOT

BAR: Final = 20.0
_LIMIT_S: Final = 1_200.0
_PLAYED: Final = ("--timeout", "60m", "--lateness", "5m")
_TRIED: Final = '[rules]\ntimeout = "45m"\n'


def bench_backtest(recording: Path, report: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    """Replay a recording, and backtest a policy on it; yield a row for each.

    The row of the backtest has its speed-up over the replay.

    Args:
        recording: recording, gzip or plain NDJSON.
        report: callback for progress lines.

    Raises:
        FleetError: a command failed.
    """
    place = Path(tempfile.mkdtemp(prefix="fleet-bench-backtest-"))
    policy = place / "tried.toml"
    policy.write_text(_TRIED)
    try:
        for home in ("first", "second"):
            report(f"replaying the recording, {home} time")
            played = _run("replay", str(recording.resolve()), "--home", str(place / home), *_PLAYED)
        for number in ("first", "second"):
            report(f"backtesting another policy, {number} time")
            tried = _run("backtest", "--policy", str(policy), "--home", str(place / "second"), "--json")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    times = round(played["wall_s"] / tried["wall_s"], 1)
    yield {"what": "recording played", **played, "times": 1.0, "bar": None}
    yield {"what": "recording backtested", **tried, "times": times, "bar": BAR}


def _run(*arguments: str) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "cli", *arguments]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False, timeout=_LIMIT_S
    )
    wall_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise FleetError(f"./fleet {arguments[0]} failed: {done.stderr.strip()[-500:]}", code="command-failed")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2)}
