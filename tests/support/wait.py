"""Waits for effects of other processes: conditions with timeouts, no fixed sleep."""

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 600  # a slow machine needs minutes for steps that take seconds elsewhere
Found = TypeVar("Found")


def await_that(
    reached: Callable[[], Found],
    *,
    limit_s: float = PATIENCE_S,
    what: str = "what was waited for",
    by: "subprocess.Popen[str] | None" = None,
    pause_s: float = 0.1,
) -> Found:
    """Poll a condition, and return its first true value.

    Args:
        reached: condition.
        limit_s: timeout, in seconds, after which the test fails.
        what: name of the condition in the failure.
        by: process that must bring about the condition. If it ends, the test fails with its output.
        pause_s: time between two checks, in seconds.
    """
    deadline_s = time.monotonic() + limit_s
    while not (found := reached()):
        assert by is None or by.poll() is None, by.communicate()[0]
        assert time.monotonic() < deadline_s, f"{what}: not within {limit_s} s"
        time.sleep(pause_s)
    return found
