"""Python peers on Spark: per-device state in the JVM, accessed by Python workers.

Rule 1: both peers run ``bench.peers.python_fold``; they add only state access and timers.
Rule 2: timers are lazy, as in ``scala/Jobs.scala``: each device has one timer, which is moved only
if a deadline is earlier.
"""

import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from bench.peers.python_fold import COLUMNS, NEVER, TIMER, UNKNOWN, Fold, Rules

OUTPUT: Final = (
    "device_id string, transition_no long, from_mode string, to_mode string, trigger string, event_time_ms long, runtime_ms long"
)
STATE: Final = ", ".join(f"{name} {kind}" for name, kind in COLUMNS)
_NAMES: Final = [item.split()[0] for item in OUTPUT.split(", ")]
_OutputRow = SparkRow(*_NAMES)


def transform_with_state(messages: DataFrame, rules: Rules) -> DataFrame:
    """Return transitions by ``transformWithState``, with one call per device."""
    return messages.groupBy("deviceId").transformWithState(DeviceProcessor(rules), OUTPUT, "append", "eventtime")


def apply_in_pandas(messages: DataFrame, rules: Rules) -> DataFrame:
    """Return transitions by ``applyInPandasWithState``.

    The state is one pickled value: PySpark 4.2 lowercases the schema of a state, and so fails on
    one with arrays.
    """
    fold = _with_pandas(rules)
    return messages.groupBy("deviceId").applyInPandasWithState(fold, OUTPUT, "device binary", "append", "EventTimeTimeout")


class DeviceProcessor(StatefulProcessor):
    """Processor called for a device's messages of a micro-batch, and for its timer."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self.handle = handle
        self.device = handle.getValueState("device", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fold a device's messages of a micro-batch."""
        known = self.device.get() or UNKNOWN
        fold = Fold(key[0], known, self.rules)
        for row in rows:
            fold.take(*row[1:6])
        fold.fold_to(fold.frontier(timerValues.getCurrentWatermarkInMs()))
        self.device.update(fold.to_state(self._arm(known[TIMER], fold.wake_at())))
        return (_OutputRow(*values) for values in fold.out)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Advance a device's time to the watermark."""
        fold = Fold(key[0], self.device.get() or UNKNOWN, self.rules)
        fold.fold_to(timerValues.getCurrentWatermarkInMs())
        self.device.update(fold.to_state(self._arm(NEVER, fold.wake_at())))
        return (_OutputRow(*values) for values in fold.out)

    def close(self) -> None:
        """Do nothing: no resources are open."""

    def _arm(self, registered: int, due: int) -> int:
        if due == NEVER or (registered != NEVER and registered <= due):
            return registered
        if registered != NEVER:
            self.handle.deleteTimer(registered)
        self.handle.registerTimer(due)
        return due


def _with_pandas(rules: Rules) -> Callable[[Any, Iterator[Any], Any], Iterator[Any]]:
    def fold_device(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        import pandas as pd

        known = pickle.loads(state.get[0]) if state.exists else UNKNOWN  # noqa: S301 - written by this fold
        fold = Fold(key[0], known, rules)
        for frame in () if state.hasTimedOut else frames:
            columns = (frame[name].tolist() for name in ("eventMs", "receivedMs", "boot", "seq", "code"))
            for message in zip(*columns, strict=True):
                fold.take(*message)
        fold.fold_to(fold.frontier(state.getCurrentWatermarkMs()))
        state.update((pickle.dumps(fold.to_state(NEVER)),))
        wake_at = fold.wake_at()
        if wake_at != NEVER:
            state.setTimeoutTimestamp(wake_at)
        if fold.out:
            yield pd.DataFrame(fold.out, columns=_NAMES)

    return fold_device
