"""How far a long step is: what was counted, every few seconds, and no guess of what is left.

Rule 1: a step that is done sooner says nothing but that it began.
Rule 2: the work waits for nobody: words are made only when they are said, and Spark is asked beside it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]
Clock = Callable[[], float]
EVERY_S: Final = 4.0
_SILENT_S: Final = 2 * EVERY_S  # longer than a step that tells itself how far it is says nothing
_LOOK_S: Final = 1.0
_PATIENCE_S: Final = 5.0  # with the last look: Spark may take its time to answer


def silent(_words: str) -> None:
    """Say nothing."""


class Paced:
    """Says how far a step is: not before some seconds have gone, and never more often than that.

    Args:
        say: told.
        clock: what time it is, in seconds.
    """

    def __init__(self, say: Say, clock: Clock = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._since_s = clock()

    def __call__(self, words: Callable[[], str]) -> None:
        """Say how far it is, where it is time to; the words are made only then."""
        if self._clock() - self._since_s >= EVERY_S:
            self._say(words())
            self._since_s = self._clock()


class Steps:
    """Says steps as they begin; of one that is silent for long it says how far Spark is, whenever somebody looks.

    Args:
        say: told.
        clock: what time it is, in seconds.
    """

    def __init__(self, say: Say, clock: Clock = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._step, self._since_s = "", clock()
        self._turn = threading.Lock()

    def __call__(self, words: str) -> None:
        """Say a step, or how far it is."""
        with self._turn:
            self._step, self._since_s = words, self._clock()
            self._say(words)

    def look(self, tasks: Callable[[], tuple[int, int] | None]) -> None:
        """Say how far Spark is, where nothing has been said for long.

        Args:
            tasks: how many are done, and how many there are, of the stages that run; None where none does.
        """
        if not self._is_silent() or (counted := tasks()) is None:
            return
        done, count = counted
        with self._turn:
            if self._is_silent():  # Spark takes its time to answer, and the next step may have begun
                self._since_s = self._clock()
                self._say(f"{self._step}: {done:,} of {count:,} tasks of Spark's present stage done")

    def _is_silent(self) -> bool:
        return self._clock() - self._since_s >= _SILENT_S


def tasks_of(spark: "SparkSession") -> tuple[int, int] | None:
    """Return how many tasks of the stages that run are done, and how many they have; None where none runs."""
    tracker = spark.sparkContext.statusTracker()
    found = [stage for number in tracker.getActiveStageIds() if (stage := tracker.getStageInfo(number)) is not None]
    return (sum(one.numCompletedTasks for one in found), sum(one.numTasks for one in found)) if found else None


@contextmanager
def watched(spark: "SparkSession", steps: Steps) -> Iterator[threading.Thread]:
    """Look at Spark every second, as long as it is entered, and say how far it is, see `Steps.look`; give who looks.

    Args:
        spark: the session.
        steps: what is told.
    """
    from py4j.protocol import Py4JError  # who has a session has it: others do without

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            try:
                steps.look(lambda: tasks_of(spark))
            except (Py4JError, OSError):
                return  # the JVM is gone: whoever works with it says so

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield watcher
    finally:
        ended.set()
        watcher.join(_PATIENCE_S)
