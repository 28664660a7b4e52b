"""Waiting for what other processes bring about: a condition and a limit, and no sleep of a fixed length."""

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 240
Found = TypeVar("Found")


def await_that(
    reached: Callable[[], Found],
    *,
    limit_s: float = PATIENCE_S,
    what: str = "what was waited for",
    by: "subprocess.Popen[str] | None" = None,
    pause_s: float = 0.1,
) -> Found:
    """Return what ``reached`` returns as soon as that is true.

    Args:
        reached: looked at again and again.
        limit_s: after so many seconds the test fails.
        what: names it where that happens.
        by: a process without which it will not be reached: the test fails with its words when that has ended.
        pause_s: between two looks, in seconds.
    """
    deadline_s = time.monotonic() + limit_s
    while not (found := reached()):
        assert by is None or by.poll() is None, by.communicate()[0]
        assert time.monotonic() < deadline_s, f"{what}: not within {limit_s} s"
        time.sleep(pause_s)
    return found
