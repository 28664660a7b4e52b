"""Stateful processor of the lifecycle query, which forwards calls to `group_task`.

Rule: the driver and Spark's planners import this module for its class name, so it imports no
compiled code. Only workers import `group_task`.
"""

from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from fleetpulse.core.replay import Deployment
from fleetpulse.io.lifecycle.state_variables import declare, only_declares

OUTPUT: Final = "key_group int, judgements binary, files string"  # read by `judgement_sink`


class GroupProcessor(StatefulProcessor):
    """Processor of key groups, called for each micro-batch with rows and for timers.

    Args:
        deployment: allowed lateness, clock lead and jitter.
        form: format version to write.
        silent: whether the judgements are discarded; summaries then remain to be emitted.
        table: folder of the table to which the judgements of one call are written if they are many;
            None returns all judgements in the rows.
        generation: generation of the job.
        whole: whether each judgement has a row of its own, for comparisons; otherwise `sum_repeats`
            limits the number of rows for each device.
    """

    def __init__(
        self,
        deployment: Deployment,
        form: int,
        *,
        silent: bool = False,
        table: str | None = None,
        generation: int = 0,
        whole: bool = False,
    ) -> None:
        self.deployment = deployment
        self.form = form
        self.silent = silent
        self.table, self.generation, self.whole = table, generation, whole
        self.fold: Any = None  # that of a task

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state: the group with its timer, and its pending rows."""
        if only_declares(handle):
            declare(handle)
            return
        from fleetpulse.io.lifecycle.group_task import GroupFold

        self.fold = GroupFold(
            handle,
            self.deployment,
            self.form,
            silent=self.silent,
            table=self.table,
            generation=self.generation,
            whole=self.whole,
        )

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        """Load the initial state of a group from another generation or the registry."""
        self.fold.begin_with(initialState, timerValues.getCurrentWatermarkInMs())

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fold the group's blocks of a micro-batch."""
        yield from self.fold.fold_rows(key[0], rows, timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Judge the group after its timer fired."""
        yield from self.fold.fold_timer(key[0], timerValues.getCurrentWatermarkInMs())

    def close(self) -> None:
        """Finish the task."""
        if self.fold is not None:
            self.fold.close()
