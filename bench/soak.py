"""Soak test: check under a long, constant load that no resource grows.

Rule 1: the lifecycle job runs as in production, as a separate process over a new home, with
`./fleet maintain` from time to time.
Rule 2: load and measurement run outside the job's process tree.
Rule 3: the first quarter is warm-up. A series grows if the median of its last quarter exceeds that
of its second by more than its bound. A series that is too short is an error, not a pass.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

import psutil
from rich.console import Console

from bench.folders import own_folder
from bench.load import LATENESS_MS, Load
from bench.measure import open_files, resident_bytes, size_bytes
from cli.common.output import as_table, console
from cli.supervisor.processes import ROOT, Run
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, STREAM_HEALTH
from fleetpulse.io.delta.appender import Appender
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.paths import cache_dir

COLUMNS = ("series", "samples", "before", "after", "change", "verdict")
_WRITER: Final = "bench-soak"
_PATIENCE_S: Final = 300.0
_LEAST_SAMPLES: Final = 12  # three per quarter
_BATCHES: Final = """SELECT batch_ms, state_rows, state_bytes, state_memory_bytes, devices FROM stream_health
                     WHERE input_rows > 0 AND devices IS NOT NULL ORDER BY batch_id"""


@dataclass(frozen=True, slots=True)
class Bound:
    """Greatest allowed increase of a series from its second quarter to its last.

    A series grows only if it exceeds both limits.

    Attributes:
        series: name of the series, with its unit.
        share: allowed increase as a share of the earlier median.
        least: allowed increase as an absolute value.
    """

    series: str
    share: float
    least: float


BOUNDS: Final = (
    Bound("rss_bytes", 0.15, 128e6),  # the job's whole process tree
    Bound("open_files", 0.10, 64),  # of the process tree, including sockets
    Bound("state_rows", 0.10, 16),  # one per key group, and one per chunk of pending rows
    Bound("state_bytes", 0.25, 2e6),  # RocksDB's files
    Bound("state_memory_bytes", 0.25, 16e6),  # RocksDB's memory
    Bound("checkpoint_bytes", 0.25, 16e6),  # all files of the checkpoint
    Bound("devices", 0.05, 10),  # in the state, in any mode
    Bound("batch_ms", 0.15, 100),  # of batches with rows
    Bound("behind_ms", 0.25, 60_000),  # lag of the job's newest row behind the load's, in event time
)
SETTLED: Final = ("state_rows", "state_bytes", "devices")  # stable within a minute; the JVM's figures need many minutes


@dataclass(frozen=True, slots=True)
class Trend:
    """Trend of a series.

    Attributes:
        bound: bound of the series.
        samples: number of samples.
        before: median of the second quarter.
        after: median of the last quarter.
    """

    bound: Bound
    samples: int
    before: float
    after: float

    @property
    def grows(self) -> bool:
        """Whether the series exceeds its bound."""
        return self.after - self.before > max(self.bound.least, self.bound.share * self.before)


def trend(bound: Bound, values: Sequence[float]) -> Trend:
    """Return the trend of a series.

    Raises:
        FleetError: the series is too short.
    """
    if len(values) < _LEAST_SAMPLES:
        raise FleetError(
            f"{bound.series} has {len(values)} samples; a trend needs {_LEAST_SAMPLES}: run for longer",
            code="soak-too-short",
        )
    quarter = len(values) // 4
    return Trend(bound, len(values), median(values[quarter : 2 * quarter]), median(values[-quarter:]))


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a soak test.

    Attributes:
        load: load of the job.
        minutes: duration, from the end of the first batch on.
        period_s: time between two steps of the load, seconds.
        batches: minimum number of batches, which may extend the duration.
        maintain_s: time between two maintenance runs, seconds. Airflow runs one an hour; shorter
            intervals show accumulation sooner.
        judged: series that can fail the test; the others are only shown, as they settle later.
    """

    load: Load
    minutes: float
    period_s: float = 1.0
    batches: int = 2 * _LEAST_SAMPLES
    maintain_s: float = 600.0
    judged: tuple[str, ...] = tuple(bound.series for bound in BOUNDS)


@dataclass(slots=True)
class Soak:
    """Result of a soak test.

    Attributes:
        series: samples by name, oldest first.
        messages: number of rows loaded.
        maintained: number of maintenance runs.
    """

    series: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    messages: int = 0
    maintained: int = 0

    def trends(self) -> list[Trend]:
        """Return the trend of each series.

        Raises:
            FleetError: a series is too short.
        """
        return [trend(bound, self.series.get(bound.series, [])) for bound in BOUNDS]

    def note(self, name: str, value: float) -> None:
        """Add a sample."""
        self.series.setdefault(name, []).append(value)

    def feed(self, home: Home, load: Load, number: int, appender: Appender) -> None:
        """Append a step of the load to bronze.

        Args:
            home: the home.
            load: the load.
            number: number of the step.
            appender: open appender, kept over all steps as landing does, for a constant cost.
        """
        rows = load.step(number)
        tables.append_of(home, MESSAGES, rows, {_WRITER: number + 1}, appender)
        self.messages += rows.num_rows

    def take_health(self, home: Home) -> None:
        """Add the job's own figures of each batch with rows, from ``stream_health``."""
        for batch in tables.query(home, _BATCHES, tables=[STREAM_HEALTH.name]):
            self.note("devices", sum(json.loads(batch.pop("devices")).values()))
            for name, value in batch.items():
                self.note(name, value)


class Maintenance:
    """Periodic runs of `./fleet maintain` beside load and job.

    Args:
        home: the home.
        every_s: time between two starts, seconds.
    """

    def __init__(self, home: Home, every_s: float) -> None:
        self._command = [sys.executable, "-P", "-m", "cli", "maintain", "--home", str(home.path.absolute())]
        self._log, self._every_s, self._next_s = home.path / "maintain.log", every_s, time.monotonic() + every_s
        self._process: subprocess.Popen[bytes] | None = None
        self.done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def look(self) -> None:
        """Start a run if it is time for one.

        Raises:
            FleetError: the previous run failed.
        """
        if self._process:
            if (code := self._process.poll()) is None:
                return
            if code:
                output = self._log.read_text(errors="replace").strip().splitlines()
                raise FleetError(
                    f"./fleet maintain ended with exit code {code}: {output[-1] if output else 'it printed nothing'}",
                    code="maintain-failed",
                )
            self._process, self.done = None, self.done + 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
                )


def plan(minutes: float | None = None, *, quick: bool = False) -> Plan:
    """Return a plan; ``quick`` only checks that the soak test itself works."""
    if quick:
        return Plan(Load(devices=1_000, leaving=5), minutes or 0.75, maintain_s=15, judged=SETTLED)
    return Plan(Load(devices=5_000, leaving=10), minutes or 60)


def bench_soak(*, minutes: float | None, quick: bool, json_lines: bool) -> None:
    """Run the soak test, and print the results.

    Args:
        minutes: duration; None takes that of the plan.
        quick: whether to use a small fleet for less than a minute; only the state is judged.
        json_lines: whether to print one JSON object a line instead of a table.

    Raises:
        FleetError: a series grows, or the job failed.
    """
    soak_plan = plan(minutes, quick=quick)
    shown = Console(stderr=True)
    found = run(soak_plan, shown)
    shown.print(f"{found.messages:,} messages, {found.maintained} maintenance runs", highlight=False)
    rows = [row_of(one, soak_plan) for one in found.trends()]
    if json_lines:
        for row in rows:
            sys.stdout.write(json.dumps(row) + "\n")
    else:
        formatted = [{name: f"{value:,}" if isinstance(value, int) else value for name, value in row.items()} for row in rows]
        console().print(as_table(formatted, COLUMNS, "soak"))
    if growing := [row["series"] for row in rows if row["verdict"] == "grows"]:
        raise FleetError(f"these series grow under a constant load: {', '.join(growing)}", code="soak-grows")


def row_of(one: Trend, soak_plan: Plan) -> dict[str, Any]:
    """Return a trend as a row of results."""
    change = f"{(one.after / one.before - 1) * 100:+.1f} %" if one.before else None
    verdict = "grows" if one.grows else "does not grow"
    if one.bound.series not in soak_plan.judged:
        verdict = "not judged: too short to settle"
    return dict(zip(COLUMNS, (one.bound.series, one.samples, round(one.before), round(one.after), change, verdict), strict=True))


def run(soak_plan: Plan, shown: Console, folder: Path | None = None) -> Soak:
    """Run the job under the planned load, and return the samples.

    Args:
        soak_plan: plan of the test.
        shown: console for the status line.
        folder: parent folder of the home, which is removed at the end, unless an error names its
            logs.

    Raises:
        FleetError: the job ended, or did not judge the whole load.
    """
    home = Home((folder or cache_dir().resolve() / "bench") / f"soak-{os.getpid()}")
    with own_folder(home.path):
        home.prepare(Deployment(LATENESS_MS, 300_000))
        return _soak(soak_plan, home, shown)


def _soak(soak_plan: Plan, home: Home, shown: Console) -> Soak:
    found, load, number = Soak(), soak_plan.load, 0
    for table in (MESSAGES, JUDGEMENTS):
        tables.create(home, table)
    appender = Appender(home.table(MESSAGES.name))
    with (
        home.locked("bench soak"),
        Run(home) as running,
        Maintenance(home, soak_plan.maintain_s) as maintenance,
        _status(shown, f"a load of {soak_plan.minutes:g} minutes"),
    ):

        def reported(name: str) -> int:
            return int(str(running.status("lifecycle").get(name) or 0))

        found.feed(home, load, number, appender)
        job = running.start("lifecycle")
        running.await_that("the first batch", lambda: reported("received_at_ms") >= load.newest_ms(0), _PATIENCE_S)
        assert job.pid is not None
        tree, ends_s = psutil.Process(job.pid), time.monotonic() + soak_plan.minutes * 60
        while time.monotonic() < ends_s or (reported("batch") < soak_plan.batches and time.monotonic() < ends_s + _PATIENCE_S):
            next_s = time.monotonic() + soak_plan.period_s
            number += 1
            found.feed(home, load, number, appender)
            running.watch()
            maintenance.look()
            found.note("rss_bytes", resident_bytes(tree))
            found.note("open_files", open_files(tree))
            found.note("checkpoint_bytes", size_bytes(home.checkpoint))
            found.note("behind_ms", load.newest_ms(number) - reported("received_at_ms"))
            time.sleep(max(0.0, next_s - time.monotonic()))
        running.await_that("the end of the load", lambda: reported("received_at_ms") >= load.newest_ms(number), _PATIENCE_S)
        found.maintained = maintenance.done
    found.take_health(home)
    return found


def _status(shown: Console, text: str) -> AbstractContextManager[Any]:
    return shown.status(text) if shown.is_terminal else nullcontext()
