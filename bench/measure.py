"""Measurement of a process tree from outside: CPU, memory, and bytes of folders.

Rule 1: CPU is user and system time of the process and all its descendants, including ended
processes that were reaped. A `Meter` also counts ended processes that were not reaped.
Rule 2: the measuring process is not part of the tree.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

import psutil

_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of wall time and CPU time, in seconds."""

    wall_s: float
    cpu_s: float


def read(tree: psutil.Process) -> Reading:
    """Return the present reading of a process tree."""
    cpu_s = 0.0
    for process in _members(tree):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended meanwhile; its parent's children_* times include it
            continue
        cpu_s += times.user + times.system + times.children_user + times.children_system
    return Reading(time.monotonic(), cpu_s)


def resident_bytes(tree: psutil.Process) -> int:
    """Return the resident memory of a process tree; shared pages count repeatedly."""
    found = 0
    for process in _members(tree):
        try:
            found += process.memory_info().rss
        except psutil.Error:
            continue
    return found


def open_files(tree: psutil.Process) -> int:
    """Return the number of open files of a process tree, sockets included."""
    found = 0
    for process in _members(tree):
        try:
            found += process.num_fds()
        except psutil.Error:
            continue
    return found


def pss_bytes(tree: psutil.Process) -> int | None:
    """Return the proportional memory (PSS) of a process tree; None if unavailable.

    Shared pages count once in total. Only Linux reports it (``smaps_rollup``).
    """
    found = 0
    for process in _members(tree):
        try:
            found += process.memory_full_info().pss
        except AttributeError:
            return None
        except psutil.Error:
            continue
    return found


def arguments_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended, even if it is not reaped yet."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _members(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return [tree, *tree.children(recursive=True)]
    except psutil.Error:
        return []


def size_bytes(folder: Path) -> int:
    """Return the size of a folder's files; files removed meanwhile do not count."""
    found = 0
    for at, _, names in os.walk(folder):  # skips folders that are removed meanwhile
        for name in names:
            with suppress(OSError):
                found += (Path(at) / name).stat().st_size
    return found


@dataclass(slots=True)
class Watch:
    """Readings of one run: at its start and at each awaited file, and the memory peak.

    Attributes:
        tree: process tree of the run.
        awaited: files, in the order of their appearance.
        began: reading at the start.
        passed: readings at the appearance of the awaited files.
        peak_bytes: peak resident memory.
    """

    tree: psutil.Process
    awaited: list[Path]
    began: Reading
    passed: list[Reading] = field(default_factory=list[Reading])
    peak_bytes: int = 0
    _sampled_s: float = 0.0

    @classmethod
    def begin(cls, tree: psutil.Process, awaited: Iterable[Path]) -> Self:
        """Start watching a run."""
        return cls(tree, list(awaited), read(tree))

    def now(self) -> Reading:
        """Poll once more, and return the present reading."""
        self.look()
        return read(self.tree)

    def look(self) -> None:
        """Poll once; call it every few milliseconds."""
        while len(self.passed) < len(self.awaited) and self.awaited[len(self.passed)].exists():
            self.passed.append(read(self.tree))
        if time.monotonic() - self._sampled_s > 0.2:
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self.tree))
            self._sampled_s = time.monotonic()


class Meter:
    """CPU and memory of a process tree, including ended processes.

    Spark's idle workers end unreaped, so their CPU time would be lost. A thread therefore polls the
    tree every second until the context exits. CPU time after the last poll of a process is not
    counted; a Spark worker is idle for a minute before it ends.

    Args:
        tree: root of the process tree; None takes this process.
    """

    def __init__(self, tree: psutil.Process | None = None) -> None:
        self._tree = tree or psutil.Process()
        self._used: dict[tuple[int, float], float] = {}
        self._parts: dict[tuple[int, float], str] = {}
        self._peak_bytes = 0
        self._ended = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def read(self) -> Reading:
        """Return the present reading."""
        self._sample()
        return Reading(time.monotonic(), sum(list(self._used.values())))

    def cpu_s(self, part_of: Callable[[psutil.Process], str]) -> dict[str, float]:
        """Return the CPU seconds of each part of the tree.

        Args:
            part_of: function that returns the part of a process; called once per living process.
        """
        self._sample()
        for process in _members(self._tree):
            with suppress(psutil.Error):
                self._parts.setdefault((process.pid, process.create_time()), part_of(process))
        found: dict[str, float] = {}
        for process_id, used_s in list(self._used.items()):
            part = self._parts.get(process_id, "")
            found[part] = found.get(part, 0.0) + used_s
        return found

    def peak_bytes(self) -> int:
        """Return the peak of `resident_bytes` since the previous call."""
        self._sample()
        found, self._peak_bytes = self._peak_bytes, 0
        return found

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            self._sample()

    def _sample(self) -> None:
        resident = 0
        for process in _members(self._tree):
            try:
                times = process.cpu_times()
                self._used[process.pid, process.create_time()] = times.user + times.system
                resident += process.memory_info().rss
            except psutil.Error:  # it ended meanwhile
                continue
        self._peak_bytes = max(self._peak_bytes, resident)
