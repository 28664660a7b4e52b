"""Stateful processor of the stream ``sessions``: one value of state for each key group.

Rule 1: the driver and Spark's planners import this module for its class name, so it imports no compiled code.
Rule 2: the block source wakes each key group in each batch, so there are no timers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, ValueState

from fleetpulse.io.lifecycle.state_variables import only_declares

OUTPUT: Final = "key_group int, changes binary, state binary"


class InitialState(NamedTuple):
    """State with which a checkpoint begins.

    Attributes:
        path: file of the state of all devices.
        key_groups: number of key groups.
        repeats: whether the first batch has rows that the state includes.
    """

    path: Path
    key_groups: int
    repeats: bool


def declare(handle: StatefulProcessorHandle) -> tuple[ValueState, ValueState]:
    """Declare the state variables of a key group: its block, and the name of its copy."""
    return handle.getValueState("group", "block binary"), handle.getValueState("copy", "name string")


class SessionProcessor(StatefulProcessor):
    """Processor of key groups, called for each micro-batch with rows.

    Args:
        silence_ms: limit of silence, milliseconds.
        initial: state with which the checkpoint begins; None for none.
    """

    def __init__(self, silence_ms: int, initial: InitialState | None = None) -> None:
        self.silence_ms, self.initial = silence_ms, initial
        self.task: Any = None  # that of a Spark task

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        if only_declares(handle):
            declare(handle)
            return
        from fleetpulse.io.streams.session_task import SessionTask

        self.task = SessionTask(handle, self.silence_ms, self.initial)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fold the blocks of a key group in a micro-batch."""
        yield from self.task.fold(key[0], rows)

    def close(self) -> None:
        """Finish the task."""
        if self.task is not None:
            self.task.close()
