"""Registry of started processes, to end those that a failed test left."""

import subprocess
from contextlib import suppress

import psutil

_BEGUN: list["subprocess.Popen[str]"] = []


def register_process(process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
    """Register a started process, so that `kill_registered` ends it if it still runs."""
    _BEGUN.append(process)
    return process


def descendants_with(process: psutil.Process, argument: str) -> list[psutil.Process]:
    """Return the descendants of a process that run with this argument; descendants may end during the call."""
    found: list[psutil.Process] = []
    for one in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # psutil raises a subclass for a zombie
            if argument in one.cmdline():
                found.append(one)
    return found


def kill_registered() -> None:
    """Kill the registered processes that still run, with their descendants."""
    left: list[psutil.Process] = []
    while _BEGUN:
        begun = _BEGUN.pop()
        if begun.poll() is None:
            with suppress(psutil.NoSuchProcess):
                whole = psutil.Process(begun.pid)
                left += [whole, *whole.children(recursive=True)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=20)
