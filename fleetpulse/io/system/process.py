"""Processes of a home: stop signals, death of the parent, status files, GC.

Rule 1: nothing here kills a process. A process is stopped by SIGTERM or SIGINT, which `StopSignal`
receives.
Rule 2: a status file is complete or absent. A failed write of a status never stops the work.
"""

import ctypes
import gc
import getpass
import json
import os
import pwd
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
REQUESTED_BY_VARIABLE: Final = "FLEET_ASKED_BY"  # environment variable: requester of the action, if not the user
NOT_RESTARTED: Final = "given up"  # state of a job that its run no longer restarts automatically
_PARENT_CHECK_S: Final = 1.0
_OBJECTS: Final = 100_000  # threshold of a collection; a segment has fewer messages


def die_with_parent(parent_pid: int | None) -> None:
    """Make the kernel send this process a SIGTERM when the thread that started it ends.

    This works on Linux only and has no effect elsewhere.

    Args:
        parent_pid: id of the parent process; if it has already ended, this process gets SIGTERM at
            once. None has no effect.
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


def command_with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Return a command whose program gets a SIGTERM when the starting thread ends.

    Use it for programs that cannot call `die_with_parent` themselves. The signal is sent on Linux
    only.
    """
    return [sys.executable, "-I", "-S", "-c", _DYING, str(os.getpid()), *command]


class _Absent:
    """Import finder that reports some packages as missing."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"imports of {name} are blocked in this process", name=name)


def block_imports(*names: str) -> None:
    """Make imports of packages fail in this process as if they were not installed.

    Packages that are already imported stay available. PyArrow imports pandas, if installed, when it
    makes its first array of a list. This costs 45 MB and most of a second, and is useless in a
    process without data frames.
    """
    sys.meta_path.insert(0, cast("Any", _Absent(frozenset(names))))


def unblock_imports(*names: str) -> None:
    """Allow imports of blocked packages again; PyArrow does not look for them again."""
    for finder in sys.meta_path:
        if isinstance(finder, _Absent):
            finder.names -= {*names}


def asked_by() -> str:
    """Return the requester of this process: its Airflow run, or user and machine."""
    if requester := os.environ.get(REQUESTED_BY_VARIABLE):
        return requester
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def os_user() -> str:
    """Return the user of this process from the operating system, not from the environment."""
    uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def requester() -> str | None:
    """Return the requester that the environment names: an Airflow run, or the user of sudo."""
    return os.environ.get(REQUESTED_BY_VARIABLE) or os.environ.get("SUDO_USER") or None


def present_requester() -> str:
    """Return the requester that the environment names, or the user of the operating system."""
    return requester() or os_user()


def remote_address() -> str | None:
    """Return the address from which the SSH session of the user came; None without a session."""
    return next(iter((os.environ.get("SSH_CLIENT") or os.environ.get("SSH_CONNECTION") or "").split()), None)


def tune_gc() -> None:
    """Run garbage collection rarely and exempt the loaded objects.

    Use it for jobs with many messages, which have no reference cycles. By default, Python collects
    every 700 objects and sometimes traverses all objects, which costs 2 us a message in the bridge
    and in landing.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS, 20, 20)


def use_system_memory_pool() -> None:
    """Make Arrow use the system allocator, for jobs with little data.

    Arrow's default allocator would keep 15 to 20 MB more.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


class StopSignal:
    """Stop request, set by SIGTERM, by SIGINT, by `set`, or by the end of the parent.

    The parent is checked every second. Signal handlers are installed only if the object is created
    in the main thread; `close` restores the former handlers.

    Args:
        parent_pid: id of the parent process whose end sets the request; None for no parent.
    """

    def __init__(self, parent_pid: int | None = None) -> None:
        self._set = False
        self._reader, self._writer = os.pipe()  # the interrupted code could hold the lock of an Event
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
        """Return the object itself; the signal handlers are already installed."""
        return self

    def set(self) -> None:
        """Set the stop request and wake waiting calls at once."""
        if not self._set:
            self._set = True
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        """Return whether a stop was requested."""
        if not self._set and self._parent is not None and time.monotonic() - self._checked_s >= _PARENT_CHECK_S:
            self._checked_s = time.monotonic()
            if not _runs(self._parent):
                self.set()
        return self._set

    def wait(self, seconds: float) -> bool:
        """Wait for a stop request, at most ``seconds``; return `is_set`."""
        deadline_s = time.monotonic() + seconds
        while not self.is_set() and (rest_s := deadline_s - time.monotonic()) > 0:
            select.select([self._reader], [], [], min(rest_s, _PARENT_CHECK_S))
        return self.is_set()

    def close(self) -> None:
        """Restore the signal handlers and close the file descriptors; call this last."""
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
    """Write a JSON status file atomically: a reader sees the old or the new file.

    Returns:
        Whether the file was written. If not, for example because the disk is full, the old file
        stays.
    """
    try:
        atomic_write(path, json.dumps(dict(mapping)), sync=False, temporary=path.with_name(f".{path.name}.{os.getpid()}"))
    except OSError:
        return False
    return True


def status_age_s(path: Path, now_s: float) -> float | None:
    """Return the age of a status file in seconds; None if it does not exist."""
    try:
        return max(0.0, now_s - path.stat().st_mtime)
    except FileNotFoundError:
        return None


def read_status(path: Path) -> dict[str, Any]:
    """Read a status file of `write_status`; empty if it is missing or invalid."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
