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
    """Return the running descendants of a process whose command line has this argument; others may end meanwhile."""
    found: list[psutil.Process] = []
    for one in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
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
