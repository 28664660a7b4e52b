"""Benchmark of reading the present fleet: `status`, `devices` and `device` of a large home.

Rule 1: each command runs as typed, in a process of its own; the figures are medians.
Rule 2: the fleet is generated in the declared tables, without broker and job. All histories of a run
have the same devices, and end at the same instant.
Rule 3: a command reads the kept facts and newer rows: a minute of messages, and some transitions.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.folders import own_folder
from bench.large_home import ID, add_newer, generate
from cli.dev.test_run import calibrate
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home

RUNS: Final = 3
_LIMIT_S: Final = 600.0


def bench_present(
    devices: int, histories: list[int], report: Callable[[str], None], *, unkept: bool = False
) -> Iterator[dict[str, Any]]:
    """Measure the commands over each history, and yield a row each.

    Args:
        devices: number of devices.
        histories: lengths of history, as multiples of about 4.5 transitions and 3 messages a device.
        report: callback for progress.
        unkept: whether to measure also before the facts are kept, when all rows are read.

    Raises:
        FleetError: a command failed or took longer than its limit, or two reads differ.
    """
    unit_s = calibrate()
    for history in histories:
        with own_folder(Path(tempfile.mkdtemp(prefix="fleet-present-"))) as place:
            report(f"generating {devices:,} devices, history x{history}")
            home = Home(place / "home")
            transitions, messages = generate(home, devices, history)
            same = {"devices": devices, "transitions": transitions, "messages": messages}
            if unkept:
                yield from _measured(home, {**same, "facts": "read from all rows"}, unit_s, report)
            yield {**same, "facts": "", **_run(home, "maintain"), "command": "maintain", "runs": 1}
            add_newer(home, devices)
            yield from _measured(home, {**same, "facts": "kept"}, unit_s, report)


def _measured(home: Home, same: dict[str, Any], unit_s: float, report: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    commands = (
        ("status", "--json"),
        ("devices", "--last", "50"),
        ("devices", "--mode", "offline", "--last", "50"),
        ("device", ID),
    )
    for words in commands:
        report(" ".join(words))
        runs = [_run(home, *words) for _ in range(RUNS + 1)][1:]
        figures = {name: round(median(run[name] for run in runs), 2) for name in ("cpu_s", "wall_s", "peak_mb")}
        yield {**same, "command": " ".join(words), **figures, "units": round(figures["cpu_s"] / unit_s, 2), "runs": RUNS}


def _run(home: Home, *words: str) -> dict[str, float]:
    """Run a command; return its CPU and wall seconds, and its peak memory in megabytes."""
    report = home.path.parent / "usage.json"
    measure = (
        "import json, resource, subprocess, sys, time; began = time.monotonic();"
        "done = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL, check=False);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "found = dict(wall_s=time.monotonic() - began, cpu_s=used.ru_utime + used.ru_stime, peak_mb=used.ru_maxrss / 1024);"
        "open(sys.argv[1], 'w').write(json.dumps(found)); sys.exit(done.returncode)"
    )
    command = [sys.executable, "-m", "cli", *words, "--home", str(home.path)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", measure, str(report), *command],
            env={**os.environ, "COLUMNS": "200"}, check=False, capture_output=True, text=True, timeout=_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise FleetError(f'"fleet {" ".join(words)}" took longer than {_LIMIT_S:g} s', code="bench-run-too-long") from late
    if done.returncode:
        raise FleetError(f'"fleet {" ".join(words)}" failed:\n{done.stderr[-2000:]}', code="bench-run-failed")
    return json.loads(report.read_text(encoding="utf-8"))
