"""Wall clock, for times that people read and for waits; no verdict depends on it."""

import time


def wall_clock_ms() -> int:
    """Return the current time in epoch milliseconds."""
    return time.time_ns() // 1_000_000
