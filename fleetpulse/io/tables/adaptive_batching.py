"""Adaptive batching: when the lifecycle job begins its next batch, and when landing commits.

Rule 1: a trickle waits, a backlog does not. A batch costs more than half a CPU second however few rows it reads, so the job holds
rows of a live fleet back and judges them together; it judges rows that are old when they land at once.
Rule 2: pacing decides only where batches are cut. It may read the wall clock, since no verdict depends on a cut.

Source: docs/adr/0030-every-batch-wakes-every-key-group.md
"""

import time
from collections.abc import Callable
from typing import Final

from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.system.wall_clock import wall_clock_ms

NEWEST: Final = "newest"  # the writer in bronze's commits whose number is the newest ``received_at`` that has landed, in epoch ms
MAX_ROWS: Final = 1_000_000  # that a batch aims at: its fixed cost is about the CPU time of 300,000 rows
FEW_ROWS: Final = 20_000  # a batch of more rows begins at once: its fixed cost is a small part of it
_PART_OF_LATENESS: Final = 6
_HOLD, _LANDING = 0.8, 0.1  # parts of the verdict delay: until a row's batch has ended, and until the row has landed
_LOOKS: Final = 10  # for new rows in a hold: each costs some milliseconds
_SLOWEST_LANDING_S: Final = 1.0
_LIVE_MS: Final = 15_000  # rows that are older when they land are a backlog


def verdict_delay_ms(allowed_lateness_ms: int, setting_ms: int) -> int:
    """Return by how much later than the frontier allows it the job aims to emit a verdict: at most a sixth of the lateness.

    The aim is met while a batch takes less than three quarters of it.

    Args:
        allowed_lateness_ms: of the installation.
        setting_ms: the setting ``verdict_delay``.
    """
    return min(setting_ms, allowed_lateness_ms // _PART_OF_LATENESS)


def hold_ms(delay_ms: int) -> int:
    """Return how long rows of a live fleet are held until their batch has ended, of a verdict delay; both in milliseconds."""
    return int(delay_ms * _HOLD)


def trigger_ms(hold_ms: int, batch_every_ms: int) -> tuple[int, int]:
    """Return the interval of the trigger, and for how long rows are held back; where the interval is as long, nothing is.

    Args:
        hold_ms: see `hold_ms`, milliseconds.
        batch_every_ms: the setting ``batch_every``.
    """
    look_ms = max(batch_every_ms, hold_ms // _LOOKS)
    return look_ms, hold_ms if look_ms < hold_ms else 0


def landing_pause_s(delay_ms: int, least_s: float) -> float:
    """Return the pause of landing between two commits of a live fleet, in seconds.

    Args:
        delay_ms: the verdict delay, milliseconds.
        least_s: the pause between two looks for rows.
    """
    return max(least_s, min(_SLOWEST_LANDING_S, delay_ms * _LANDING / 1000))


def is_live(newest_ms: int | None, now_ms: int) -> bool:
    """Whether what has landed is of now: then the next rows come at the pace of the fleet. Both in epoch milliseconds."""
    return newest_ms is not None and abs(now_ms - newest_ms) <= _LIVE_MS


class Pacer:
    """Decides for one reader of bronze whether its next batch begins.

    Args:
        log: of bronze.
        held_ms: for how long rows are held until their batch has ended; 0 holds nothing back.
        now_ms: a clock that never runs backwards, milliseconds.
        wall_ms: the wall clock, epoch milliseconds.
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
        self._begin = -1
        self._since_ms = self._begun_ms = 0  # on the clock: since when rows are held, and when the last batch began
        self._took_ms = 0  # from the begin of the last batch to the first look after it
        self._counted = -1  # versions below it are in `_rows`
        self._rows = 0

    def is_due(self, begin: int, latest: int) -> bool:
        """Whether a batch of the versions from ``begin`` through ``latest`` begins now.

        The first batch of a reader always does: nobody knows for how long its rows have waited.
        """
        if not self._held_ms or latest < begin:
            return True
        now_ms, first = self._now_ms(), self._begin < 0
        if self._begin != begin:
            self._took_ms = 0 if first else now_ms - self._begun_ms
            self._begin, self._counted, self._rows = begin, begin, 0
            waited_ms = self._wall_ms() - self._log.landed_ms(begin)  # most of it while the batch before ran
            self._since_ms = now_ms - min(max(waited_ms, 0), self._held_ms)
        due = first or now_ms - self._since_ms >= self._held_ms - self._took_ms or self._is_backlog(latest)
        if due:
            self._begun_ms = now_ms
        return due

    def _is_backlog(self, latest: int) -> bool:
        if self._counted > latest:
            return False
        while self._counted <= latest and self._rows < FEW_ROWS:
            files, self._counted = self._log.span(self._counted)
            self._rows += sum(rows for _, rows in files)
        return self._rows >= FEW_ROWS or not is_live(self._newest_ms(latest), self._wall_ms())

    def _newest_ms(self, version: int) -> int | None:
        numbers = [one["txn"]["version"] for one in self._log.actions(version) if one.get("txn", {}).get("appId") == NEWEST]
        return int(numbers[0]) if numbers else None
