"""Waits for effects of other processes: conditions with timeouts, no fixed sleep.

Rule 1: a wait leaves the cores to the processes that it waits for. Many conditions read tables, at 0.05 to 0.5 CPU seconds.
"""

import os
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 600  # a slow machine needs minutes for steps that take seconds elsewhere
CHECKS_SHARE = 0.1  # share of a core that the checks of a wait may use
LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 4.0
Found = TypeVar("Found")


def await_that(
    reached: Callable[[], Found],
    *,
    limit_s: float = PATIENCE_S,
    what: str = "what was waited for",
    by: "subprocess.Popen[str] | None" = None,
    pause_s: float | None = None,
) -> Found:
    """Poll a condition, and return its first true value.

    Args:
        reached: condition.
        limit_s: timeout, in seconds, after which the test fails.
        what: name of the condition in the failure.
        by: process that must bring about the condition. If it ends, the test fails with its output.
        pause_s: time between two checks, in seconds; None chooses `LEAST_PAUSE_S`, and more after a check that used much CPU
            time.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        before_s = _cpu_s()
        if found := reached():
            return found
        rest_s = max(LEAST_PAUSE_S, min((_cpu_s() - before_s) * (1 / CHECKS_SHARE - 1), LONGEST_PAUSE_S))
        assert by is None or by.poll() is None, by.communicate()[0]
        assert time.monotonic() < deadline_s, f"{what}: not within {limit_s} s"
        time.sleep(rest_s if pause_s is None else pause_s)


def _cpu_s() -> float:
    return sum(os.times()[:4])  # of this process, and of the children that have ended
