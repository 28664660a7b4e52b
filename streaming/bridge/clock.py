"""Clock of the bridge: the wall clock, protected against jumps forward.

Rule: ``received_at`` never runs backwards, so a stamp from a wrong jump forward would persist, and
messages would be judged too early. A jump is therefore accepted only after `HOLDS_MS`. Until then
time advances as on the monotonic clock, and the bridge receives nothing (ADR 29).
"""

import time
from collections.abc import Callable
from typing import Final

from fleetpulse.io.system.wall_clock import wall_clock_ms

STEP_MS: Final = 5_000  # a wall clock that is further ahead than expected has jumped; less costs some allowed lateness
HOLDS_MS: Final = 30_000
SET_FORWARD: Final = f"the clock jumped forward; no messages are received until it has kept its time for {HOLDS_MS // 1000} s"


class GuardedClock:
    """Wall clock that is checked against a monotonic clock.

    Args:
        wall_ms: wall clock, epoch milliseconds.
        steady_ms: monotonic clock, milliseconds from any origin.
    """

    def __init__(self, wall_ms: Callable[[], int] | None = None, steady_ms: Callable[[], int] | None = None) -> None:
        self._wall_ms = wall_ms or wall_clock_ms
        self._steady_ms = steady_ms or _steady_ms
        self._reference = self._wall_ms(), self._steady_ms()
        self._since_ms: int | None = None

    @property
    def doubted(self) -> bool:
        """Whether the wall clock was ahead of the expected time at the last reading."""
        return self._since_ms is not None

    def now_ms(self) -> int:
        """Read the clocks; return the accepted time in epoch milliseconds."""
        wall_ms, steady_ms = self._wall_ms(), self._steady_ms()
        expected_ms = self._reference[0] + steady_ms - self._reference[1]
        if wall_ms - expected_ms > STEP_MS:
            self._since_ms = steady_ms if self._since_ms is None else self._since_ms
            if steady_ms - self._since_ms < HOLDS_MS:
                return expected_ms
        self._reference, self._since_ms = (wall_ms, steady_ms), None
        return wall_ms


def _steady_ms() -> int:
    """Return monotonic time, including sleep of the machine if the system supports it."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000
