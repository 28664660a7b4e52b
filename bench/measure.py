"""What a run costs, measured from outside: CPU and memory of a whole process tree, bytes of a checkpoint.

Rule 1: CPU is user and system time of the process, all its descendants, and those of them that ended and were reaped;
who is not reaped is counted by a `Meter`.
Rule 2: who measures is no part of the tree.
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

_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """An instant: seconds on the wall's clock and of CPU."""

    wall_s: float
    cpu_s: float


def read(tree: psutil.Process) -> Reading:
    """Return the present reading of a process tree."""
    cpu_s = 0.0
    for process in _members(tree):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended meanwhile: its parent's children_* have it now, or will
            continue
        cpu_s += times.user + times.system + times.children_user + times.children_system
    return Reading(time.monotonic(), cpu_s)


def resident_bytes(tree: psutil.Process) -> int:
    """Return the resident memory of a process tree; pages that forked workers share count in each."""
    found = 0
    for process in _members(tree):
        try:
            found += process.memory_info().rss
        except psutil.Error:
            continue
    return found


def open_files(tree: psutil.Process) -> int:
    """Return how many files, sockets among them, a process tree has open."""
    found = 0
    for process in _members(tree):
        try:
            found += process.num_fds()
        except psutil.Error:
            continue
    return found


def own_bytes(tree: psutil.Process) -> int | None:
    """Return the memory of a process tree, a page that several share counted once, by its shares; None where that is not told.

    Linux tells it (``smaps_rollup``: the proportional set size).
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


def _members(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return [tree, *tree.children(recursive=True)]
    except psutil.Error:
        return []


def size_bytes(folder: Path) -> int:
    """Return what lies in a folder; what goes while it is looked at counts nothing."""
    found = 0
    for at, _, names in os.walk(folder):  # a folder that goes is passed over
        for name in names:
            with suppress(OSError):
                found += (Path(at) / name).stat().st_size
    return found


@dataclass(slots=True)
class Watch:
    """Watches one run: a reading when it began, when each awaited file appeared, and the peak of memory.

    Attributes:
        tree: whose.
        awaited: files, in the order in which they appear.
        began: the reading at the beginning.
        passed: readings when the awaited files appeared.
        peak_bytes: the greatest resident memory seen.
    """

    tree: psutil.Process
    awaited: list[Path]
    began: Reading
    passed: list[Reading] = field(default_factory=list[Reading])
    peak_bytes: int = 0
    _looked_s: float = 0.0

    @classmethod
    def begin(cls, tree: psutil.Process, awaited: Iterable[Path]) -> Self:
        """Begin."""
        return cls(tree, list(awaited), read(tree))

    def now(self) -> Reading:
        """Return the present reading, after a last look."""
        self.look()
        return read(self.tree)

    def look(self) -> None:
        """Look once; call it every few milliseconds."""
        while len(self.passed) < len(self.awaited) and self.awaited[len(self.passed)].exists():
            self.passed.append(read(self.tree))
        if time.monotonic() - self._looked_s > 0.2:
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self.tree))
            self._looked_s = time.monotonic()


class Meter:
    """CPU and memory of all that was ever seen of a process tree.

    Spark lets its idle workers die unreaped, and their time with them: so the tree is looked at once a second, by a thread that
    is part of it, as long as the meter is entered; of a process that ends, what it used after the last look is not counted: a
    worker has been idle for a minute then.

    Args:
        tree: its root; None takes this process.
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
        self._look()
        return Reading(time.monotonic(), sum(list(self._used.values())))

    def cpu_s(self, part_of: Callable[[psutil.Process], str]) -> dict[str, float]:
        """Return the CPU seconds of each part of the tree.

        Args:
            part_of: names the part that a process belongs to; asked once for each process, while it lives.
        """
        self._look()
        for process in _members(self._tree):
            with suppress(psutil.Error):
                self._parts.setdefault((process.pid, process.create_time()), part_of(process))
        found: dict[str, float] = {}
        for process_id, used_s in list(self._used.items()):
            part = self._parts.get(process_id, "")
            found[part] = found.get(part, 0.0) + used_s
        return found

    def peak_bytes(self) -> int:
        """Return the greatest resident memory since this was last asked; pages that forked workers share count in each."""
        self._look()
        found, self._peak_bytes = self._peak_bytes, 0
        return found

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        resident = 0
        for process in _members(self._tree):
            try:
                times = process.cpu_times()
                self._used[process.pid, process.create_time()] = times.user + times.system
                resident += process.memory_info().rss
            except psutil.Error:  # it ended meanwhile
                continue
        self._peak_bytes = max(self._peak_bytes, resident)
