"""Processes that tests begin, and what becomes of them where a test fails before it has stopped them."""

import subprocess
from contextlib import suppress

import psutil

_BEGUN: list["subprocess.Popen[str]"] = []


def kept_in_mind(process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
    """Return a process that has begun; it is ended by `end_the_begun` if nobody else does."""
    _BEGUN.append(process)
    return process


def end_the_begun() -> None:
    """Kill what is left of the processes that were begun, with all that they have started; those know of no other end."""
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
