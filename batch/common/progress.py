"""Progress lines of long steps: counts every few seconds, without estimates.

Rule 1: a short step reports only its start.
Rule 2: progress never delays the work: a line is built only when it is written, and a separate
thread polls Spark.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ReportProgress = Callable[[str], None]
Clock = Callable[[], float]
EVERY_S: Final = 4.0
_SILENT_S: Final = 2 * EVERY_S  # longer than the pauses of a step that reports its own progress
_POLL_S: Final = 1.0
_PATIENCE_S: Final = 5.0  # for the last poll: Spark may answer slowly


def silent(_words: str) -> None:
    """Discard a progress line."""


class Paced:
    """Rate limit for the progress lines of a step: one every `EVERY_S` seconds.

    Args:
        report: callback for progress lines.
        clock: function that returns the present time, seconds.
    """

    def __init__(self, report: ReportProgress, clock: Clock = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._since_s = clock()

    def __call__(self, line: Callable[[], str]) -> None:
        """Report a progress line if the pause has passed; `line` is called only then."""
        if self._clock() - self._since_s >= EVERY_S:
            self._report(line())
            self._since_s = self._clock()


class Steps:
    """Reporter of steps; for a silent step it reports Spark's task counts.

    Args:
        report: callback for progress lines.
        clock: function that returns the present time, seconds.
    """

    def __init__(self, report: ReportProgress, clock: Clock = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._step, self._since_s = "", clock()
        self._turn = threading.Lock()

    def __call__(self, line: str) -> None:
        """Report the start of a step, or its progress."""
        with self._turn:
            self._step, self._since_s = line, self._clock()
            self._report(line)

    def report_if_silent(self, tasks: Callable[[], tuple[int, int] | None]) -> None:
        """Report Spark's task counts if no line was written for `_SILENT_S` seconds.

        Args:
            tasks: function that returns the numbers of finished and of all tasks in the running
                stages; None if no stage runs.
        """
        if not self._is_silent() or (counted := tasks()) is None:
            return
        done, count = counted
        with self._turn:
            if self._is_silent():  # checked again: the next step may have started while the tasks were counted
                self._since_s = self._clock()
                self._report(f"{self._step}: {done:,} of {count:,} tasks of Spark's present stage done")

    def _is_silent(self) -> bool:
        return self._clock() - self._since_s >= _SILENT_S


def tasks_of(spark: "SparkSession") -> tuple[int, int] | None:
    """Return the numbers of finished and of all tasks in Spark's running stages.

    None if no stage runs.
    """
    tracker = spark.sparkContext.statusTracker()
    found = [stage for number in tracker.getActiveStageIds() if (stage := tracker.getStageInfo(number)) is not None]
    return (sum(one.numCompletedTasks for one in found), sum(one.numTasks for one in found)) if found else None


@contextmanager
def watched(spark: "SparkSession", steps: Steps) -> Iterator[threading.Thread]:
    """Poll Spark every second in a thread until the context exits, see `Steps.report_if_silent`.

    Args:
        spark: Spark session.
        steps: reporter of steps.

    Yields:
        The polling thread.
    """
    from py4j.protocol import Py4JError  # imported here: not every user of this module has pyspark

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            try:
                steps.report_if_silent(lambda: tasks_of(spark))
            except (Py4JError, OSError):
                return  # the JVM has ended; its user reports that

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield watcher
    finally:
        ended.set()
        watcher.join(_PATIENCE_S)
