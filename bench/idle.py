"""Benchmark of an idle fleet: CPU and memory, compared with another commit.

Rule 1: ``./fleet up --no-airflow --no-sim`` runs on a terminal, as in interactive use; the
devices publish from outside its process tree.
Rule 2: contenders alternate on the same machine. CPU is that of the whole tree, ended workers
included; memory counts shared pages once.
Rule 3: latency is measured from outside: from the publication of a new device's first message to
the commit of its transition.
"""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from threading import Thread
from typing import Any, Final

import psutil

from bench.folders import own_folder
from bench.measure import Meter, arguments_of, pss_bytes
from cli.common.output import as_json, as_table, console
from cli.supervisor.processes import ROOT
from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog, is_committed
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.system.process import read_status
from fleetpulse.paths import cache_dir

BEFORE: Final = "716d995"  # commit before adaptive batching
OURS: Final = "this tree"
WITH_STREAMS: Final = "this tree with streams"
DEVICES: Final = (100, 10_000)
PARTS: Final = ("broker", "bridge", "landing", "lifecycle", "screen")
COLUMNS: Final = (
    "contender", "devices", "cpu_cores", *(f"{part}_cores" for part in PARTS), "pss_mb", "p50_s", "p99_s", "lateness_s", "new",
)  # fmt: skip
INTERVAL_S: Final = 60.0  # between two messages of a device
SETTLE_S: Final = 120.0  # after the first verdict: the JVM compiles, and Spark's class archive is written
WINDOW_S: Final = 120.0
_NEW_S: Final = 1.7  # between two new devices
_START_S: Final = 300.0
_LATENESS_MS: Final = 60_000
_LAST_S: Final = 20.0  # after the allowed lateness, for the last verdicts


@dataclass(frozen=True, slots=True)
class Contender:
    """Source tree of a commit of this project.

    Attributes:
        name: name for display.
        tree: folder of the source tree.
        streams: whether all streams beside the lifecycle run.
    """

    name: str
    tree: Path
    streams: bool = False


@contextmanager
def checkout(commit: str) -> Iterator[Contender]:
    """Check out another commit of this project into a separate folder.

    Raises:
        FleetError: this tree is no Git clone, or has no such commit.
    """
    place = cache_dir() / "idle" / commit
    done = subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "add", "--force", "--detach", str(place), commit],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and not (place / "fleet").exists():
        raise FleetError(
            f'commit "{commit}" cannot be checked out ({done.stderr.strip()}); name a commit of this clone',
            code="commit-unknown",
        )
    try:
        yield Contender(commit, place)
    finally:
        subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(place)], capture_output=True, check=False)


class _Fleet(Thread):
    """Thread that publishes for each device every `INTERVAL_S`, and adds new devices.

    The time of a new device's first message is recorded.
    """

    def __init__(self, home: Home, devices: int) -> None:
        super().__init__(daemon=True, name="fleet")
        self.home, self.devices = home, devices
        self.published: dict[str, float] = {}
        self.ended = False

    def run(self) -> None:
        """Publish until ended."""
        with Publisher(load_address(self.home.run("broker")), "fleetpulse-bench-idle", cancelled=lambda: self.ended) as publisher:
            began, sent, new = time.monotonic(), 0, 0
            while not self.ended:
                elapsed_s = time.monotonic() - began
                while sent < elapsed_s * self.devices / INTERVAL_S:
                    self._publish_heartbeat(publisher, f"d{sent % self.devices}")
                    sent += 1
                if new < elapsed_s / _NEW_S:
                    self.published[f"new-{new}"] = time.time()
                    self._publish_heartbeat(publisher, f"new-{new}")
                    new += 1
                publisher.pump(0.1)

    def _publish_heartbeat(self, publisher: Publisher, device: str) -> None:
        publisher.publish(f"fleet/main/{device}/heartbeat", b'{"ts": %d}' % (time.time_ns() // 1_000_000))


def _part_of(process: psutil.Process) -> str:
    """Return the part of a run that a process belongs to, by command lines."""
    for one in (process, *process.parents()):
        arguments = arguments_of(one)
        if any("nats-server" in argument for argument in arguments):
            return "broker"
        if "job" in arguments:
            return arguments[arguments.index("job") + 1]
        if "up" in arguments:
            return "screen"
    return ""


@contextmanager
def _running(contender: Contender, home: Home) -> Iterator[psutil.Process]:
    """Run ``fleet up`` on a new pseudo-terminal; yield its process."""
    master, slave = pty.openpty()
    command = [str(contender.tree / "fleet"), "up", "--no-airflow", "--no-sim", "--port", "0", "--home", str(home.path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"FLEET_VENV": str(Path(sys.executable).parents[1]), "FLEET_CACHE": str(cache_dir()), "TERM": "xterm"}
    if contender.streams:
        environment["FLEET_STREAMS"] = json.dumps([*StreamName])
    # The working directory is the contender's tree: without PYTHONSAFEPATH, Python workers import
    # from the directory in which Spark was started.
    started = subprocess.Popen(
        command, cwd=contender.tree, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    Thread(target=_drain, args=(master,), daemon=True).start()
    try:
        yield psutil.Process(started.pid)
    finally:
        started.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            started.wait(120)
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        os.close(master)


def _drain(terminal: int) -> None:
    with suppress(OSError):
        while os.read(terminal, 65_536):
            pass


class _Commits:
    """First transitions of devices, each with the time of its commit."""

    def __init__(self, home: Home) -> None:
        self._table, self._next = home.table(JUDGEMENTS.name), 0
        self._log = DeltaLog(self._table)
        self.first_s: dict[str, float] = {}

    def look(self) -> None:
        """Read new commits; call it before old versions are removed from the log."""
        import pyarrow.parquet as pq

        if not is_committed(self._table):
            return
        while self._next <= self._log.latest():
            files = [path for path, _ in self._log.appended(self._next) if "kind=transition" in path]
            for device in (one for path in files for one in pq.ParquetFile(path).read(["device_id"])["device_id"].to_pylist()):
                self.first_s.setdefault(device, self._log.landed_ms(self._next) / 1000)
            self._next += 1


def _measure(contender: Contender, devices: int, place: Path, settle_s: float, window_s: float) -> dict[str, Any]:
    home = Home(_folder(place, contender, devices))
    commits = _Commits(home)
    with _running(contender, home) as tree, Meter(tree) as meter:
        _await(lambda: read_status(home.run("bridge")).get("state") == "live", "the bridge")
        fleet = _Fleet(home, devices)
        fleet.start()
        try:
            _await(lambda: commits.look() or bool(commits.first_s), "the first verdict")
            _sleep(settle_s, commits)
            _await(lambda: not _keeps_classes(tree), "writing Spark's class archive")
            began_s, before, sizes = time.time(), meter.cpu_s(_part_of), list[int]()
            for _ in range(10):
                _sleep(window_s / 10, commits)
                sizes.append(pss_bytes(tree) or 0)
            ended_s, after = time.time(), meter.cpu_s(_part_of)
            _sleep(_LATENESS_MS / 1000 + _LAST_S, commits)  # for verdicts about messages of the window
        finally:
            fleet.ended = True
            fleet.join(10)
    used = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / (ended_s - began_s) for part in after}
    new = {name: at_s for name, at_s in fleet.published.items() if began_s <= at_s <= ended_s}
    waited = [commits.first_s[name] - at_s for name, at_s in new.items() if name in commits.first_s]
    if len(waited) < max(2, len(new)):
        raise FleetError(
            f"{len(waited)} of {len(new)} new devices got a verdict from {contender.name} within {_LAST_S:.0f} s after the "
            f"allowed lateness: the run has no latency to report; use a longer --window, or inspect {home.path} during a run",
            code="verdicts-missing",
        )
    return {
        "contender": contender.name,
        "devices": devices,
        "cpu_cores": sum(used.values()),
        **{f"{part}_cores": used.get(part, 0.0) for part in PARTS},
        "pss_mb": median(sizes) / 1e6,
        "p50_s": median(waited),
        "p99_s": quantiles(waited, n=100, method="inclusive")[-1],
        "lateness_s": _LATENESS_MS / 1000,
        "new": len(waited),
    }


def _folder(place: Path, contender: Contender, devices: int) -> Path:
    return place / f"{contender.name.replace(' ', '-')}-{devices}"


def _sleep(seconds: float, commits: _Commits) -> None:
    limit = time.monotonic() + seconds
    while (left_s := limit - time.monotonic()) > 0:
        time.sleep(min(left_s, 1.0))
        commits.look()


def _await(reached: Any, what: str) -> None:
    limit = time.monotonic() + _START_S
    while not reached():
        if time.monotonic() > limit:
            raise FleetError(
                f"{what} took longer than {_START_S:.0f} s; the logs are in the home of this run", code="wait-timeout"
            )
        time.sleep(0.5)


def _keeps_classes(tree: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("classes" in arguments_of(one) for one in tree.children())
    return False


def bench_idle(
    *,
    before: str,
    devices: Sequence[int],
    settle_s: float,
    window_s: float,
    rounds: int,
    json_lines: bool,
    alone: bool,
    streams: bool = False,
) -> None:
    """Run the contenders in turn; print a row each, with the ratio per fleet size.

    Args:
        before: commit to compare with.
        devices: fleet sizes.
        settle_s: time from the first verdict to the measurement, seconds.
        window_s: duration of the measurement, seconds.
        rounds: number of runs of each contender; figures are medians.
        json_lines: whether to print one JSON object a line instead of a table.
        alone: whether to measure this commit only.
        streams: whether to measure this commit again with all streams beside the lifecycle.

    Raises:
        FleetError: a run did not start, or did not judge all published messages.
    """
    rows: list[dict[str, Any]] = []
    with own_folder(Path(tempfile.mkdtemp(prefix="fleet-idle-"))) as place, ExitStack() as others:
        contenders = [] if alone else [others.enter_context(checkout(before))]
        contenders.append(Contender(OURS, ROOT))
        if streams:
            contenders.append(Contender(WITH_STREAMS, ROOT, streams=True))
        for size in devices:
            found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contenders}
            for number in range(rounds):
                for one in contenders:
                    console().print(f"{one.name}, {size:,} devices, round {number + 1}", style="bright_black")
                    found[one.name].append(_measure(one, size, place, settle_s, window_s))
                    shutil.rmtree(_folder(place, one, size), ignore_errors=True)
            medians = {name: _median(those) for name, those in found.items()}
            for row in medians.values():
                row["ratio"] = round(row["cpu_cores"] / medians[contenders[0].name]["cpu_cores"], 3)
            rows += medians.values()
    shown = [{name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()} for row in rows]
    if json_lines:
        as_json(shown)
    else:
        console().print(as_table(shown, [*COLUMNS, "ratio"], "an idle fleet"))


def _median(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = {name: median(row[name] for row in rows) for name in rows[0] if name != "contender"}
    return {"contender": rows[0]["contender"], **numbers, "devices": rows[0]["devices"]}
