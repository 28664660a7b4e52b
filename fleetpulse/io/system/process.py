"""Processes of a home: they end when they are asked to, or when whoever started them is gone, and say how they are.

Rule 1: nothing here kills; a process is asked by SIGTERM or SIGINT, and `Stop` is where it hears of it.
Rule 2: a status file is whole or absent, and failing to write one never stops the work whose status it is.
"""

import ctypes
import gc
import getpass
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from fleetpulse.io.system.fsync import atomic_write

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG: Final = 1
ASKED_BY: Final = "FLEET_ASKED_BY"  # in the environment: who asks, where it is not the user
GIVEN_UP: Final = "given up"  # the state of a job that its run no longer starts by itself
_PARENT_CHECK_S: Final = 1.0
_OBJECTS: Final = 100_000  # more than the messages of a segment are


def die_with_parent(parent_pid: int | None) -> None:
    """Ask the kernel for a SIGTERM when the thread that started this process ends; Linux alone can, elsewhere no effect.

    Args:
        parent_pid: who started us; where that process is gone already, SIGTERM comes at once. None: no effect.
    """
    if parent_pid is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    import psutil

    if not psutil.pid_exists(parent_pid):
        os.kill(os.getpid(), signal.SIGTERM)


_DYING: Final = (
    "import ctypes,os,sys\n"
    "if sys.platform=='linux': ctypes.CDLL(None).prctl(1,15,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(1)\n"
    "try: os.execv(sys.argv[2],sys.argv[2:])\n"
    "except OSError as e: sys.exit(f'{sys.argv[2]} cannot be started ({e.strerror})')"
)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line that runs a program which gets a SIGTERM when the thread that starts it ends.

    For programs that cannot call `die_with_parent` themselves; Linux alone can do that.
    """
    return [sys.executable, "-I", "-S", "-c", _DYING, str(os.getpid()), *command]


class _Absent:
    """Says of some packages that they are not there."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"this process does without {name}", name=name)


def block_imports(*names: str) -> None:
    """Let imports of packages fail in this process, as where they are not installed, unless they are imported already.

    PyArrow imports pandas at the first array that it makes of a list, if it finds it: that is 45 MB and most of a second
    for nothing in a process that has no data frame.
    """
    sys.meta_path.insert(0, cast("Any", _Absent(frozenset(names))))


def unblock_imports(*names: str) -> None:
    """Let imports of packages go again that this process did without; what PyArrow has found it does not look for again."""
    for finder in sys.meta_path:
        if isinstance(finder, _Absent):
            finder.names -= {*names}


def asked_by() -> str:
    """Return who asks for what this process does: the run of Airflow that started it, or the user and the machine."""
    if said := os.environ.get(ASKED_BY):
        return said
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def tune_gc() -> None:
    """Look for garbage in cycles seldom, and not among what is loaded: for jobs that hold many messages, which have none.

    Python looks each 700 objects, and at all that there is after a while: 2 us a message in bridge and landing each.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS, 20, 20)


def use_system_memory_pool() -> None:
    """Let Arrow take memory where all else does: its own allocator keeps 15 to 20 MB more, for jobs that hold little."""
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


class Stop:
    """Whether to end: set by SIGTERM, by SIGINT, by `set`, or by the end of the parent, looked for each second.

    Signals are heard where it is made in the main thread. Their former handlers come back with `close`.

    Args:
        parent_pid: whose end is ours as well; None where nobody's is.
    """

    def __init__(self, parent_pid: int | None = None) -> None:
        self._set = False
        self._reader, self._writer = os.pipe()  # an Event's lock could be held by the very code the signal interrupts
        os.set_blocking(self._writer, False)
        self._checked_s = time.monotonic()
        self._parent: psutil.Process | None = None
        if parent_pid is not None:
            from psutil import NoSuchProcess, Process

            try:
                self._parent = Process(parent_pid)
            except NoSuchProcess:
                self.set()
        self._former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.set()

    def on_signals(self) -> Self:
        """Return itself: signals are heard since it was made."""
        return self

    def set(self) -> None:
        """Stop; waiters wake at once."""
        if not self._set:
            self._set = True
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        """Whether to stop."""
        if not self._set and self._parent is not None and time.monotonic() - self._checked_s >= _PARENT_CHECK_S:
            self._checked_s = time.monotonic()
            if not _runs(self._parent):
                self.set()
        return self._set

    def wait(self, seconds: float) -> bool:
        """Wait until to stop, at most ``seconds``; return `is_set`."""
        deadline_s = time.monotonic() + seconds
        while not self.is_set() and (rest_s := deadline_s - time.monotonic()) > 0:
            select.select([self._reader], [], [], min(rest_s, _PARENT_CHECK_S))
        return self.is_set()

    def close(self) -> None:
        """Give back the signals and the two file descriptors; the object is of no use afterwards."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former.clear()
        self._set = True
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1


def _runs(process: "psutil.Process") -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def write_status(path: Path, mapping: Mapping[str, Any]) -> bool:
    """Write a JSON file so that a reader finds the former one or the new one, whole.

    Returns:
        False where the system refused, as a full disk does; the former file stays.
    """
    try:
        atomic_write(path, json.dumps(dict(mapping)), sync=False, aside=path.with_name(f".{path.name}.{os.getpid()}"))
    except OSError:
        return False
    return True


def silent_s(path: Path, now_s: float) -> float | None:
    """Return for how long nobody has written a status, in seconds; None where there is none, or no longer."""
    try:
        return max(0.0, now_s - path.stat().st_mtime)
    except FileNotFoundError:
        return None


def read_status(path: Path) -> dict[str, Any]:
    """Read what `write_status` wrote; empty where there is nothing to read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
