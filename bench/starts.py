"""Benchmark of commands: CPU and wall time, compared with another commit.

Rule 1: each command runs as typed, in a separate process tree; contenders alternate.
Rule 2: the caches (compiled kernels, Spark's class archive) are warm, as from the second start on.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from bench.folders import own_folder
from bench.idle import OURS, Contender, checkout
from bench.lifecycle.generate import START_MS
from bench.measure import Meter
from cli.common.output import as_json, as_table, console
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import is_committed
from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT, cache_dir
from streaming.simulator.scenario import Scenario
from tests.support.histories.recordings import record

COLUMNS: Final = ("command", "contender", "wall_s", "cpu_s", "runs")
_SHORT: Final = 5  # runs of a command without Spark
_LIMIT_S: Final = 300.0


def bench_starts(*, before: str, alone: bool, json_lines: bool) -> None:
    """Run each command with each contender, and print a row each.

    Args:
        before: commit to compare with.
        alone: whether to measure this commit only.
        json_lines: whether to print one JSON object a line instead of a table.

    Raises:
        FleetError: a command failed, or took longer than five minutes.
    """
    rows: list[dict[str, Any]] = []
    with own_folder(Path(tempfile.mkdtemp(prefix="fleet-starts-"))) as place, ExitStack() as others:
        contenders = [] if alone else [others.enter_context(checkout(before))]
        contenders.append(Contender(OURS, ROOT))
        recording = record(place / "fleet.ndjson.gz", Scenario(5, 10, START_MS, history_ms=90 * 60_000))
        for number, one in enumerate(contenders):
            for run in range(2):  # the first run fills the caches
                home = place / f"replayed-{number}-{run}"
                replay = _measure(one, 1, "replay", str(recording), "--home", str(home), "--lateness", "1m")
            home = place / f"replayed-{number}-0"
            rows += [
                _measure(one, _SHORT, "--help"),
                _measure(one, _SHORT, "version"),
                _measure(one, _SHORT, "status", "--home", str(home)),
                replay,
                _measure(one, 2, "state", "snapshot", "--home", str(home)),
                _first_verdict(one, place / f"live-{number}"),
            ]
    commands = list(dict.fromkeys(row["command"] for row in rows))
    rows.sort(key=lambda row: commands.index(row["command"]))
    if json_lines:
        as_json(rows)
    else:
        console().print(as_table(rows, COLUMNS, "starts"))


def _start(contender: Contender, arguments: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"FLEET_VENV": str(Path(sys.executable).parents[1]), "FLEET_CACHE": str(cache_dir())}
    return subprocess.Popen(
        [str(contender.tree / "fleet"), *arguments],
        cwd=contender.tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _measure(contender: Contender, runs: int, *arguments: str) -> dict[str, Any]:
    wall_s, cpu_s = list[float](), list[float]()
    for _ in range(runs):
        began_s, before_s = time.monotonic(), _waited_cpu_s()
        running = _start(contender, arguments)
        with Meter(psutil.Process(running.pid)) as meter:
            try:
                _, errors = running.communicate(timeout=_LIMIT_S)
            finally:
                _end(running)
            seen_s = meter.read().cpu_s
        if running.returncode:
            raise FleetError(f"./fleet {' '.join(arguments)} failed: {errors.decode()[-500:]}", code="command-failed")
        wall_s.append(time.monotonic() - began_s)
        cpu_s.append(max(seen_s, _waited_cpu_s() - before_s))  # only the meter counts Spark's workers
    return _row(arguments, contender, wall_s, cpu_s)


def _first_verdict(contender: Contender, home: Path) -> dict[str, Any]:
    arguments = ("up", "--no-airflow", "--devices", "20", "--port", "0", "--home", str(home))
    table, began_s = Home(home).table(JUDGEMENTS.name), time.monotonic()
    running = _start(contender, arguments)
    try:
        with Meter(psutil.Process(running.pid)) as meter:
            while not (is_committed(table) and any(table.glob("kind=transition/*.parquet"))):
                if running.poll() is not None or time.monotonic() - began_s > _LIMIT_S:
                    raise FleetError(f"no verdict within {_LIMIT_S:.0f} s of ./fleet {' '.join(arguments)}", code="wait-timeout")
                time.sleep(0.1)
            return _row(("up", "to the first verdict"), contender, [time.monotonic() - began_s], [meter.read().cpu_s])
    finally:
        _end(running)


def _end(running: "subprocess.Popen[bytes]") -> None:
    if running.poll() is None:
        running.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            running.communicate(timeout=60)
    if running.poll() is None:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def _row(arguments: tuple[str, ...], contender: Contender, wall_s: list[float], cpu_s: list[float]) -> dict[str, Any]:
    named = " ".join(argument for argument in arguments[:2] if not argument.startswith(("/", "--home")))
    return {
        "command": named,
        "contender": contender.name,
        "wall_s": round(median(wall_s), 2),
        "cpu_s": round(median(cpu_s), 2),
        "runs": len(wall_s),
    }


def _waited_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
