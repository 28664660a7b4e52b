"""Adaptive batching: when the lifecycle job starts a batch, and landing commits.

Rule 1: rows of a live fleet wait for a batch, a backlog does not. A batch costs more than half a
CPU second however few rows it reads, so the job collects rows of a live fleet. Rows that are old
when they land are read at once.
Rule 2: this module decides only where batches are cut. It may read the wall clock, since no verdict
depends on a cut.

Source: docs/adr/0030-wake-up-of-every-key-group.md
"""

import time
from collections.abc import Callable
from typing import Final

from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.system.wall_clock import wall_clock_ms

NEWEST: Final = "newest"  # writer in bronze's commits whose number is the newest ``received_at`` that has landed, epoch ms
BATCH_ROWS: Final = 1_000_000  # target of a batch: its fixed cost is about the CPU time of 300,000 rows
FEW_ROWS: Final = 20_000  # a batch of this many rows starts at once: its fixed cost is a small part of the total
_PART_OF_LATENESS: Final = 6
_HOLD, _LANDING = 0.8, 0.1  # parts of the verdict delay: until a row's batch has ended, and until the row has landed
_POLLS_PER_HOLD: Final = 10  # polls for new rows in one hold: each takes some milliseconds
_SLOWEST_LANDING_S: Final = 1.0
_LIVE_MS: Final = 15_000  # rows that are older than this when they land are a backlog


def verdict_delay_ms(allowed_lateness_ms: int, setting_ms: int) -> int:
    """Return the target delay of a verdict after its frontier, in milliseconds.

    The delay is at most a sixth of the allowed lateness. The target is met while a batch takes less
    than three quarters of the delay.

    Args:
        allowed_lateness_ms: allowed lateness of the installation, milliseconds.
        setting_ms: setting ``verdict_delay``, milliseconds.
    """
    return min(setting_ms, allowed_lateness_ms // _PART_OF_LATENESS)


def hold_ms(delay_ms: int) -> int:
    """Return the time from the landing of a live row to the end of its batch.

    Args:
        delay_ms: verdict delay, milliseconds.

    Returns:
        Hold time, milliseconds.
    """
    return int(delay_ms * _HOLD)


def trigger_ms(hold_ms: int, batch_every_ms: int) -> tuple[int, int]:
    """Return the interval of Spark's trigger and the hold time of rows.

    Args:
        hold_ms: hold time as returned by `hold_ms`, milliseconds.
        batch_every_ms: setting ``batch_every``, milliseconds.

    Returns:
        Interval and hold time, milliseconds. The hold time is 0 if the interval is at least as long.
    """
    interval_ms = max(batch_every_ms, hold_ms // _POLLS_PER_HOLD)
    return interval_ms, hold_ms if interval_ms < hold_ms else 0


def landing_pause_s(delay_ms: int, least_s: float) -> float:
    """Return the pause of landing between two commits of a live fleet, in seconds.

    Args:
        delay_ms: verdict delay, milliseconds.
        least_s: interval at which landing polls for rows, seconds.
    """
    return max(least_s, min(_SLOWEST_LANDING_S, delay_ms * _LANDING / 1000))


def is_live(newest_ms: int | None, now_ms: int) -> bool:
    """Return whether the newest landed row is recent, as in a live fleet without a backlog.

    Args:
        newest_ms: newest ``received_at`` that has landed, epoch milliseconds; None if unknown.
        now_ms: wall-clock time, epoch milliseconds.
    """
    return newest_ms is not None and abs(now_ms - newest_ms) <= _LIVE_MS


class BatchStart:
    """Decision of one reader of bronze when its next batch starts.

    Args:
        log: Delta log of bronze.
        held_ms: time from the landing of a row to the end of its batch, milliseconds; 0 starts each
            batch at once.
        now_ms: monotonic clock, milliseconds.
        wall_ms: wall clock, epoch milliseconds.
    """

    def __init__(
        self,
        log: DeltaLog,
        held_ms: int,
        now_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        wall_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._log, self._held_ms = log, held_ms
        self._now_ms, self._wall_ms = now_ms, wall_ms
        self._first_version = -1
        self._since_ms = self._started_ms = 0  # monotonic times: since when rows are held, and when the last batch started
        self._took_ms = 0  # from the start of the last batch to the first poll after it
        self._counted = -1  # rows of versions below it are counted in `_rows`
        self._rows = 0

    def is_due(self, start: int, latest: int) -> bool:
        """Return whether a batch of the versions ``start`` through ``latest`` starts now.

        The first batch of a reader always starts at once, since the waiting time of its rows is
        unknown.
        """
        if not self._held_ms or latest < start:
            return True
        now_ms, first = self._now_ms(), self._first_version < 0
        if self._first_version != start:
            self._took_ms = 0 if first else now_ms - self._started_ms
            self._first_version, self._counted, self._rows = start, start, 0
            waited_ms = self._wall_ms() - self._log.landed_ms(start)  # mostly while the previous batch ran
            self._since_ms = now_ms - min(max(waited_ms, 0), self._held_ms)
        due = first or now_ms - self._since_ms >= self._held_ms - self._took_ms or self._is_backlog(latest)
        if due:
            self._started_ms = now_ms
        return due

    def _is_backlog(self, latest: int) -> bool:
        if self._counted > latest:
            return False
        while self._counted <= latest and self._rows < FEW_ROWS:
            files, self._counted = self._log.span(self._counted)
            self._rows += sum(rows for _, rows in files)
        return self._rows >= FEW_ROWS or not is_live(newest_received_ms(self._log, latest), self._wall_ms())


def newest_received_ms(log: DeltaLog, version: int) -> int | None:
    """Return the newest ``received_at`` that had landed with a version of bronze.

    Returns:
        Epoch milliseconds; None if the version landed no rows, such as a rewrite.

    Raises:
        FleetError: the version is no longer in the log.
    """
    numbers = [one["txn"]["version"] for one in log.actions(version) if one.get("txn", {}).get("appId") == NEWEST]
    return int(numbers[0]) if numbers else None


def first_version_since(log: DeltaLog, end: int, span_ms: int) -> int:
    """Return the first version of bronze whose rows may lie within a span before a version.

    Args:
        log: Delta log of bronze.
        end: version before which the span ends.
        span_ms: length of the span of ``received_at``, milliseconds.

    Returns:
        The version; the oldest one in the log if the log does not reach back so far.
    """

    def landed(version: int) -> tuple[int, int | None] | None:
        """Return the nearest version at or before another that landed rows; None if the log has none."""
        for one in range(version, -1, -1):
            if log.digest(one) is None:
                return None
            if (newest_ms := newest_received_ms(log, one)) is not None:
                return one, newest_ms
        return None

    last = landed(end - 1)
    if last is None or last[1] is None:
        return end
    low, high = 0, last[0]  # the version is in this range
    while low < high:
        middle = (low + high) // 2
        found = landed(middle)
        if found is None or found[1] is None or found[1] < last[1] - span_ms:
            low = middle + 1
        else:
            high = found[0]
    return low
