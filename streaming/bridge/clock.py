"""What time it is for the bridge: the wall's, but for a step forward that does not last.

Rule: what is stamped ahead of time stays so, since ``received_at`` never runs backwards, and would be judged ahead of time. So a
clock that is set forward is believed after `HOLDS_MS` only; until then time goes on as it did, and nothing is taken in.
"""

import time
from collections.abc import Callable
from typing import Final

from fleetpulse.io.system.wall_clock import wall_clock_ms

STEP_MS: Final = 5_000  # forward, between two looks, is a step; less is at most a few seconds of the allowed lateness
HOLDS_MS: Final = 30_000
SET_FORWARD: Final = f"the clock was set forward; nothing is taken in until it has stayed so for {HOLDS_MS // 1000} s"


class GuardedClock:
    """The wall's clock beside one that runs evenly.

    Args:
        wall_ms: the wall's, in epoch milliseconds.
        steady_ms: one that nobody sets, in milliseconds since whenever.
    """

    def __init__(self, wall_ms: Callable[[], int] | None = None, steady_ms: Callable[[], int] | None = None) -> None:
        self._wall_ms = wall_ms or wall_clock_ms
        self._steady_ms = steady_ms or _steady_ms
        self._believed = self._wall_ms(), self._steady_ms()
        self._since_ms: int | None = None

    @property
    def doubted(self) -> bool:
        """Whether the wall was ahead of what it should say, at the newest look."""
        return self._since_ms is not None

    def now_ms(self) -> int:
        """Look at the clocks and return what is believed, in epoch milliseconds."""
        wall_ms, steady_ms = self._wall_ms(), self._steady_ms()
        expected_ms = self._believed[0] + steady_ms - self._believed[1]
        if wall_ms - expected_ms > STEP_MS:
            self._since_ms = steady_ms if self._since_ms is None else self._since_ms
            if steady_ms - self._since_ms < HOLDS_MS:
                return expected_ms
        self._believed, self._since_ms = (wall_ms, steady_ms), None
        return wall_ms


def _steady_ms() -> int:
    """Count the time in which the machine sleeps as well, where the system can tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000
