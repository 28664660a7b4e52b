"""Test runner: one scheduler for the parts of all layers, progress, and costs.

Rule 1: the output of a part goes to a file, and is printed whole if the part fails.
Rule 2: each part has its own environment and process, so that no layer affects the next one.
"""

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from cli.dev.test_plan import (
    FORM_VARIABLE,
    Budget,
    Chosen,
    Durations,
    Finished,
    Form,
    Part,
    budget_of,
    closing,
    further_jobs,
    layer_of,
    next_part,
    number_of_jobs,
    part_left_s,
    parts_of,
    progress,
    skips,
    slowest,
    span,
    time_left_s,
    usual_jobs,
    wholly_extended,
)
from cli.supervisor.cds import create_archive
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.kernel_cache import compile_in_background
from fleetpulse.paths import ROOT, cache_dir

EVERY_S: Final = 10.0  # interval of progress lines; on a terminal it is 1 s
IDLE_S: Final = 15.0  # time for which the cores are observed before a further part starts
IDLE_SHARE: Final = 0.3  # share of the time of all cores
_JOBS_VARIABLE: Final = "FLEET_TEST_JOBS"
_POLL_S: Final = 0.1
_ENDS_S: Final = 30.0  # timeout for the parts of an interrupted run to end
_NO_TESTS: Final = 5  # exit code of pytest if no test is selected, as -k may cause in a part
_PR_SET_CHILD_SUBREAPER: Final = 36
_STOPS: Final = re.compile(r"-[a-zA-Z]*x[a-zA-Z]*|--exitfirst|--maxfail(=.*)?")  # options that end a run at a failure
_FOLD_LAYERS: Final = ("unit", "property", "spark", "e2e")  # layers that need the compiled fold
_SPARK_LAYERS: Final = ("spark", "e2e")
_PEERS: Final = "from bench.peers.scala_jar import compiled; compiled()"
# One repetition of the calibration. Its work resembles the suite's: imports in a new process, and
# plain Python.
_CALIBRATION: Final = """
import hashlib, json
import numpy, pyarrow
rows = [{"device_id": f"d{n}", "kind": "heartbeat", "at_ms": n * 1000, "seq": n} for n in range(20_000)]
for _ in range(3):
    text = [json.dumps(row) for row in rows]
    assert [json.loads(line)["seq"] for line in text][-1] == 19_999
    for line in text:
        hashlib.sha256(line.encode()).digest()
"""


@dataclass
class Running:
    """Started part, with its events so far."""

    part: Part
    process: "subprocess.Popen[bytes]"
    folder: Path
    began_s: float
    collects: bool = False
    finished: list[Finished] = field(default_factory=list)
    now: str = ""
    collected: int | None = None
    left_out: int = 0
    ended_s: float = 0.0
    _read: int = 0

    def read(self) -> None:
        """Read the events that were written since the last call."""
        try:
            with (self.folder / "events").open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        if not whole:
            return
        self._read += len(whole) + 1
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        match event.pop("event"):
            case "collected":
                self.collected, self.left_out = event["tests"], event["left_out"]
            case "started":
                self.now = event["test"]
            case _:
                self.finished.append(Finished(**event))
                self.now = ""

    def code(self) -> int:
        """Return the exit code; 0 for a part without any test."""
        code = self.process.returncode
        return 0 if code == _NO_TESTS else code

    @property
    def incomplete(self) -> bool:
        """Whether the process passed without reporting the end of each collected test."""
        return self.code() == 0 and not (self.collects or (self.collected is not None and len(self.finished) >= self.collected))

    @property
    def passed(self) -> bool:
        """Whether all tests of the part ended, and none failed."""
        return self.code() == 0 and not self.incomplete

    @property
    def broken(self) -> bool:
        """Whether the part failed without a failed test."""
        return not self.passed and not any(one.outcome == "failed" for one in self.finished)

    def spark_starts(self) -> int:
        """Return the number of Spark sessions that the part has started."""
        return _lines(self.folder / "starts")

    def output(self) -> str:
        """Return the output; empty if the part used the terminal."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Screen:
    """Printer of permanent lines, and of a progress line that a terminal overwrites."""

    def __init__(self, write: Callable[[str], None], *, is_terminal: bool) -> None:
        self._write, self._is_terminal = write, is_terminal
        self._shown_s, self._dirty = time.monotonic(), False

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self._write(("\r\x1b[K" if self._dirty else "") + text + "\n")
        self._dirty = False

    def progress(self, line: Callable[[], str], *, at_once: bool = False) -> None:
        """Print the progress, if the interval has passed or ``at_once`` is set."""
        if not at_once and time.monotonic() - self._shown_s < (1.0 if self._is_terminal else EVERY_S):
            return
        self._shown_s = time.monotonic()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + line()[:width])
            self._dirty = True
        else:
            self._write(line() + "\n")


def _core_times() -> tuple[float, float]:
    times = psutil.cpu_times()
    return times.idle + getattr(times, "iowait", 0.0), sum(times)


class IdleCores:
    """Detector of idle cores, which end-to-end tests leave while they wait.

    Args:
        times: function that returns the idle time and the total time of all cores, in seconds.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, times: Callable[[], tuple[float, float]] = _core_times, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._times, self._clock = times, clock
        self.begin()

    def begin(self) -> None:
        """Start an observation of `IDLE_S` seconds."""
        self._since_s, self._seen = self._clock(), self._times()

    def found(self) -> bool:
        """Return whether an observation has ended with at least `IDLE_SHARE` of idle time.

        If an observation has ended, the next one starts.
        """
        if self._clock() - self._since_s < IDLE_S:
            return False
        (idle_s, whole_s), (idle_before_s, whole_before_s) = self._times(), self._seen
        self.begin()
        return idle_s - idle_before_s >= IDLE_SHARE * (whole_s - whole_before_s)


@dataclass
class Scheduler:
    """Scheduler that runs a number of parts at a time.

    Attributes:
        command: function that returns the command line of a part, given the part and its event
            file.
        environment: environment of each part.
        root: working directory of the parts.
        folder: folder for the files of the run.
        jobs: number of parts at a time.
        further: number of additional parts that may start while cores are idle.
        screen: printer of lines.
        has_terminal: whether a part uses the terminal itself.
        stops: whether no further part starts after a failure.
        collects: whether parts only list their tests.
        reaps: whether this process becomes the parent of the parts' orphans, and must reap them.
        expected: function that returns the recorded number of tests of a part.
    """

    command: Callable[[Part, Path], list[str]]
    environment: Mapping[str, str]
    root: Path
    folder: Path
    jobs: int
    screen: Screen
    has_terminal: bool = False
    stops: bool = False
    collects: bool = False
    reaps: bool = False
    expected: Callable[[Part], int] = lambda _: 0
    further: int = 0

    def run(self, parts: Sequence[Part]) -> list[Running]:
        """Run parts to their end; return them in the order in which they ended.

        If the run is interrupted, it ends the started parts.
        """
        waiting, running, ended = list(parts), list[Running](), list[Running]()
        began_s, idle = time.monotonic(), IdleCores()
        try:
            while waiting or running:
                while self._has_room(len(running), idle) and (part := next_part(waiting, [one.part for one in running])):
                    idle.begin()
                    waiting.remove(part)
                    running.append(self._start(part, len(ended) + len(running)))
                if self.has_terminal:
                    running[0].process.wait()
                self.reap(running)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    ended.append(one)
                    self._end(one)
                    if self.stops and not one.passed:
                        waiting.clear()
                    self._progress(began_s, waiting, running, ended, at_once=bool(waiting or running))
                for one in running:
                    one.read()
                self._progress(began_s, waiting, running, ended)
                time.sleep(_POLL_S if running else 0)
        finally:
            _end_all([one.process for one in running], interrupted=self.has_terminal)
        return ended

    def _has_room(self, running: int, idle: IdleCores) -> bool:
        return running < self.jobs or (running < self.jobs + self.further and idle.found())

    def _start(self, part: Part, number: int) -> Running:
        folder = self.folder / f"part-{number}"
        folder.mkdir()
        environment = {**self.environment, "FLEET_STARTS": str(folder / "starts")}
        command = self.command(part, folder / "events")
        if self.has_terminal:
            process = subprocess.Popen(command, cwd=self.root, env=environment)
        else:
            with (folder / "output").open("wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches this process only, which ends the parts in order
                )
        return Running(part, process, folder, time.monotonic(), self.collects)

    def _end(self, one: Running) -> None:
        one.ended_s = time.monotonic()
        one.read()
        took = f"{span(one.ended_s - one.began_s)} (about {span(one.part.estimate_s)} expected)"
        if one.passed:
            results = closing(one.finished) if one.finished else f"{one.collected or 0} tests selected"
            self.screen.line(f"== {one.part.label}: {results}, in {took}")
            return
        if output := one.output():
            self.screen.line(f"== {one.part.label}: output\n{output.rstrip()}")
        why = _ended(one) if one.broken else closing(one.finished)
        during = f", during {one.now}" if one.now else ""
        self.screen.line(f"== {one.part.label}: FAILED, {why}{during}, in {took}")

    def reap(self, running: Sequence[Running] = ()) -> None:
        """Reap ended orphans of the parts, so that their CPU time counts."""
        own = {one.process.pid: one.process for one in running}
        while self.reaps:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            if found.si_pid in own:
                own[found.si_pid].poll()
            else:
                os.waitpid(found.si_pid, 0)

    def _progress(
        self,
        began_s: float,
        waiting: Sequence[Part],
        running: Sequence[Running],
        ended: Sequence[Running],
        *,
        at_once: bool = False,
    ) -> None:
        if self.has_terminal:
            return
        now_s = time.monotonic()

        def progress_line() -> str:
            expected = sum(self.expected(part) for part in waiting)
            for one in (*running, *ended):
                expected += self.expected(one.part) if one.collected is None else one.collected
            so_far = [(one.part, now_s - one.began_s) for one in running]
            left = [
                part_left_s(one.part.estimate_s, now_s - one.began_s, len(one.finished), one.collected or 0) for one in running
            ]
            return progress(
                sum(len(one.finished) for one in (*running, *ended)),
                expected,
                now_s - began_s,
                time_left_s(left, [part.estimate_s for part in waiting], self.jobs),
                [(part.label, seconds, part.estimate_s) for part, seconds in so_far],
            )

        self.screen.progress(progress_line, at_once=at_once)


def _ended(one: Running) -> str:
    """Return how a part ended that failed without a failed test."""
    if one.incomplete:
        return f"ended after {len(one.finished)} of {'an unknown number of' if one.collected is None else one.collected} tests"
    return f"ended unexpectedly with exit code {one.code()}"


def _end_all(processes: Sequence["subprocess.Popen[bytes]"], *, interrupted: bool) -> None:
    """End the parts of an interrupted run as Ctrl-C does, then kill what remains.

    Args:
        processes: processes of the parts.
        interrupted: whether Ctrl-C reached them too; a second SIGINT would cut pytest's shutdown
            short.
    """
    parts: list[psutil.Process] = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            if one.poll() is None:
                parts.append(psutil.Process(one.pid))
    started = _descendants(parts)
    if not interrupted:
        for part in parts:
            with suppress(psutil.NoSuchProcess):
                part.send_signal(signal.SIGINT)
    psutil.wait_procs(parts, timeout=_ENDS_S)
    left = [one for one in {*parts, *started, *_descendants(parts)} if one.is_running()]
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=_ENDS_S)


def _descendants(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            found.update(one.children(recursive=True))
    return found


def run_tests(chosen: Chosen) -> bool:
    """Run the selected tests, and print their results and costs.

    Returns:
        Whether all tests passed, within the budget of the suite.

    Raises:
        FleetError: Java or a JAR is required but not available.
    """
    screen = Screen(_write, is_terminal=sys.stdout.isatty())
    several = str(usual_jobs(os.cpu_count() or 1))
    usual = number_of_jobs(os.environ.get(_JOBS_VARIABLE) or several, _JOBS_VARIABLE)
    jobs = 1 if chosen.interactive else chosen.jobs or usual
    durations_path = cache_dir() / "durations.json"
    durations = _read_durations(durations_path)
    files, left_out = files_of(chosen)
    parts = parts_of(files, chosen, durations.estimate(chosen.form), jobs)
    if not chosen.collects:
        _prepare(chosen.layers, screen)
    budget = _budget(chosen)
    unit_s = _calibrate() if budget else 0.0
    counts = durations.tests_of(chosen.form)
    began_s, before_s = time.monotonic(), _children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="fleet-tests-", ignore_cleanup_errors=True) as folder, _subreaper() as reaps:
        if not chosen.interactive:
            left = time_left_s([], [part.estimate_s for part in parts], jobs)
            several = f"{len(parts)} parts, {jobs} at a time" if len(parts) > 1 else "one part"
            screen.line(f"== {chosen.form}: {several}; about {span(left)}")
        scheduler = Scheduler(
            command=lambda part, events: _pytest(chosen, part, events),
            environment={**os.environ, FORM_VARIABLE: chosen.form},
            root=ROOT,
            folder=Path(folder),
            jobs=jobs,
            further=0 if chosen.interactive or chosen.jobs or _JOBS_VARIABLE in os.environ else further_jobs(chosen.form),
            screen=screen,
            has_terminal=chosen.interactive,
            collects=chosen.collects,
            stops=any(_STOPS.fullmatch(argument) for argument in chosen.rest),
            reaps=reaps,
            expected=lambda part: sum(counts[path] or _functions(path) for path in part.targets),
        )
        with _signals_as_exit():
            ended = scheduler.run(parts)
        scheduler.reap()  # orphans that ended in the meantime
        starts = sum(one.spark_starts() for one in ended)
    cpu_s = _children_cpu_s() - before_s
    finished = [test for one in ended for test in one.finished]
    _print_results(screen, finished, lambda test: durations.of_test(chosen.form, test))
    if left_out or any(one.left_out for one in ended):
        screen.line(f"== left out: {sum(one.left_out for one in ended)} tests, and {left_out} files that only --all runs")
    cost = f"== {span(time.monotonic() - began_s)}, {starts} starts of Spark, {cpu_s:,.0f} CPU s"
    faults = [f"{one.part.label}: {_why(one)}" for one in ended if not one.passed]
    if not (finished or faults or chosen.collects):
        faults.append("no test ran; name existing tests, or an expression of -k that matches some")
    if budget:
        units = cpu_s / unit_s
        cost += f", {units:,.0f} CPU units of {unit_s:.2f} s; budget: {budget.spark_starts} starts, {budget.cpu_units:,.0f} units"
        faults += budget.faults(chosen.form, starts, units)
    screen.line(cost)
    if not chosen.interactive:
        _keep(durations_path, chosen, ended)
    for fault in faults:
        screen.line(f"== failed: {fault}")
    broken = sum(one.broken for one in ended)
    screen.line(f"{sum(one.collected or 0 for one in ended)} tests selected" if chosen.collects else closing(finished, broken))
    return not faults


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _why(one: Running) -> str:
    failed = [test.test for test in one.finished if test.outcome == "failed"]
    return ", ".join(failed) if failed else _ended(one) + (f" during {one.now}" if one.now else "")


def _print_results(screen: Screen, finished: Sequence[Finished], before: Callable[[str], float | None]) -> None:
    if len(finished) > 1:
        screen.line("== slowest tests")
        for line in slowest(finished, before):
            screen.line(line)
    if several := [one for one in finished if one.spark_starts > 1]:
        screen.line("== tests with several starts of Spark")
        for one in sorted(several, key=lambda one: -one.spark_starts):
            screen.line(f"   {one.spark_starts:3d}  {one.test}")
    if lines := skips(finished):
        screen.line("== skipped")
        for line in lines:
            screen.line(line)


def files_of(chosen: Chosen) -> tuple[dict[str, list[str]], int]:
    """Return the files of each layer, and the number of excluded files.

    The default suite excludes files whose tests are all extended.
    """
    files: dict[str, list[str]] = {}
    left_out = 0
    for layer in chosen.layers:
        if named := [path for path in chosen.targets if layer_of(path) == layer]:
            files[layer] = named
            continue
        paths = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / layer).glob("**/test_*.py"))]
        whole = chosen.form is not Form.DEFAULT or bool(chosen.targets)
        files[layer] = [path for path in paths if whole or not wholly_extended((ROOT / path).read_text())]
        left_out += len(paths) - len(files[layer])
    return files, left_out


def _functions(path: str) -> int:
    """Return the number of test functions of a file without a record."""
    try:
        return (ROOT / path.partition("::")[0]).read_text().count("\ndef test_")
    except OSError:
        return 0


def _pytest(chosen: Chosen, part: Part, events: Path) -> list[str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-p",
        "tests.support.reporting",
        "--fleet-events",
        str(events),
        *part.targets,
    ]
    if expression := chosen.expression():
        command += ["-m", expression]
    return [*command, *chosen.rest]


def _prepare(layers: Sequence[str], screen: Screen) -> None:
    """Compile the fold and create shared files once, instead of in each part."""
    kernels = compile_in_background() if any(layer in _FOLD_LAYERS for layer in layers) else None
    if kernels is not None:
        screen.line("== compiling the fold")
    if any(layer in _SPARK_LAYERS for layer in layers):
        screen.line(f"== {create_archive()}")
    if "spark" in layers:
        subprocess.run(
            [sys.executable, "-P", "-c", _PEERS], cwd=ROOT, check=False
        )  # if this fails, the tests that need the peers report the reason
    if kernels is not None:
        kernels.wait()


def _budget(chosen: Chosen) -> Budget | None:
    """Return the budget of the run; None if it is no whole suite, or has no budget."""
    return budget_of(tomllib.loads((ROOT / "pyproject.toml").read_text()), chosen.form) if chosen.whole else None


def _calibrate(repetitions: int = 5) -> float:
    """Return the CPU unit: the minimum CPU seconds of a fixed piece of work."""
    durations_s: list[float] = []
    for _ in range(repetitions):
        before_s = _children_cpu_s()
        subprocess.run([sys.executable, "-P", "-c", _CALIBRATION], check=True)
        durations_s.append(_children_cpu_s() - before_s)
    return min(durations_s)


def _children_cpu_s() -> float:
    """Return the CPU seconds of all reaped child processes.

    Spark's Python daemon ignores SIGCHLD, so its workers are never reaped, and are missing here.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP into `SystemExit`, so that the parts end too."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _subreaper() -> Iterator[bool]:
    """Make this process the parent of its orphaned descendants, on Linux.

    Yields:
        Whether it is their parent.
    """
    if sys.platform != "linux":
        yield False
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    done = prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield done
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _read_durations(path: Path) -> Durations:
    try:
        return Durations(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Durations()


def _keep(path: Path, chosen: Chosen, ended: Sequence[Running]) -> None:
    """Record the durations of passed tests.

    The file is read again, because another run may have written it in the meantime. A narrowed run
    is not recorded: a file with few executed tests would seem short.
    """
    if chosen.narrowed:
        return
    fresh = _read_durations(path)
    for one in ended:
        if one.passed:
            for target in one.part.targets:
                fresh.forget(chosen.form, target, (test.test for test in one.finished))
        for test in one.finished:
            if test.outcome == "passed":
                fresh.add(chosen.form, test.test, test.wall_s, test.cpu_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        atomic_write(path, json.dumps(fresh.recorded(), separators=(",", ":")), sync=False, temporary=temporary)
    except OSError as error:
        _write(f"== durations were not recorded: {error}\n")
