"""Scheduler of the parts of a test run: processes, their events, idle cores, and progress.

Rule: a part is a pytest process in a session of its own. It reports to a file of events, and an
interrupted run ends all processes that it has started.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from cli.dev.test_plan import (
    Finished,
    Part,
    closing,
    fits_in,
    in_order,
    next_part,
    pace_of,
    part_left_s,
    progress,
    span,
    time_left_s,
)

EVERY_S: Final = 10.0  # interval of progress lines; on a terminal it is 1 s
IDLE_S: Final = 10.0  # time for which the cores are observed before a further part starts
IDLE_SHARE: Final = 0.15  # share of the time of all cores
_POLL_S: Final = 0.1
_ENDS_S: Final = 30.0  # timeout for the parts of an interrupted run to end
_NO_TESTS: Final = 5  # exit code of pytest if no test is selected, as -k may cause in a part


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
        """Whether the process succeeded, but did not report the end of every collected test."""
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
    """Detector of idle cores: end-to-end tests leave cores idle while they wait.

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
        within_s: time limit of the run, seconds: an optional part that would exceed it does not start, or is stopped;
            None if there is none.
        pace: pace at first, see `pace_of`.
        not_started: optional parts that the time limit has left out, after the run.
        stopped: optional parts that were running at the time limit, after the run.
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
    within_s: float | None = None
    pace: float = 1.0
    not_started: list[Part] = field(default_factory=list)
    stopped: list[Part] = field(default_factory=list)

    def run(self, parts: Sequence[Part]) -> list[Running]:
        """Run parts to their end; return them in the order in which they ended.

        If the run is interrupted, it ends the started parts.
        """
        waiting, running, ended = list(parts), list[Running](), list[Running]()
        began_s, idle = time.monotonic(), IdleCores()
        try:
            while waiting or running:
                while self._has_room(len(running), idle) and (part := self._next(began_s, waiting, running, ended)):
                    idle.begin()
                    waiting.remove(part)
                    running.append(self._start(part, len(ended) + len(running)))
                if not running:  # no waiting part fits into the time that is left
                    break
                if self.has_terminal:
                    running[0].process.wait()
                self._stop_late(began_s, running)
                self.reap(running)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    if one.part in self.stopped:
                        continue
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
        self.not_started = waiting
        return ended

    def _next(self, began_s: float, waiting: Sequence[Part], running: Sequence[Running], ended: Sequence[Running]) -> Part | None:
        now_s, parts = time.monotonic(), [one.part for one in running]
        if self.within_s is None:
            return next_part(waiting, parts)
        durations = [(one.part.estimate_s, one.ended_s - one.began_s) for one in ended]
        durations += [(one.part.estimate_s, now_s - one.began_s) for one in running if now_s - one.began_s > one.part.estimate_s]
        pace, left_s = pace_of(durations, self.pace), began_s + self.within_s - now_s
        lasting = [
            part_left_s(pace * one.part.estimate_s, now_s - one.began_s, len(one.finished), one.collected or 0) for one in running
        ]
        return next_part(in_order(waiting, pace), parts, lambda part: fits_in(part, waiting, lasting, self.jobs, pace, left_s))

    def _stop_late(self, began_s: float, running: Sequence[Running]) -> None:
        """Stop the optional parts that run beyond the time limit."""
        if self.within_s is None or time.monotonic() - began_s < self.within_s:
            return
        if late := [one for one in running if one.part.optional]:
            _end_all([one.process for one in late], interrupted=False)
            self.stopped += [one.part for one in late]

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
            with (folder / "output").open("wb") as output, _interruptible():
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
        why = ended_how(one) if one.broken else closing(one.finished)
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


def ended_how(one: Running) -> str:
    """Describe the end of a part that failed without a failed test."""
    if one.incomplete:
        return f"ended after {len(one.finished)} of {'an unknown number of' if one.collected is None else one.collected} tests"
    return f"ended unexpectedly with exit code {one.code()}"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let processes that start inside the block end by SIGINT, although a shell may have started this one without.

    A shell without job control starts a command in the background with SIGINT ignored, and each child inherits it.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


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
