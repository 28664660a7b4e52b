"""The operator around a key group, as Spark calls it; what it does is in `group_task`, which a worker imports.

Rule: the driver imports this module to name its class, and so do Spark's planners: it imports nothing that is compiled.
"""

from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from fleetpulse.core.replay import Deployment

OUTPUT: Final = "key_group int, judgements binary, files string"  # see `judgement_sink`


class GroupProcessor(StatefulProcessor):
    """One key group's call for each micro-batch with rows, and for its timer.

    Args:
        deployment: lateness, clock lead and jitter.
        form: the stored form to write.
        silent: whether what is said is heard by nobody: then a summary is still to be said.
        table: folder of the table for many judgements of one call; None leaves all of them in the rows.
        generation: of the job.
    """

    def __init__(
        self, deployment: Deployment, form: int, *, silent: bool = False, table: str | None = None, generation: int = 0
    ) -> None:
        self.deployment = deployment
        self.form = form
        self.silent = silent
        self.table, self.generation = table, generation

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state: the group with its timer, and what waits in it."""
        from fleetpulse.io.lifecycle.group_task import GroupFold

        self.fold = GroupFold(
            handle, self.deployment, self.form, silent=self.silent, table=self.table, generation=self.generation
        )

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        """Begin with devices that another generation, or the registry, has brought; see `columnar.seeds`."""
        self.fold.begin_with(initialState, timerValues.getCurrentWatermarkInMs())

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fold the group's blocks of a micro-batch."""
        yield from self.fold.take_in(key[0], rows, timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Let time pass for the group."""
        yield from self.fold.pass_time(key[0], timerValues.getCurrentWatermarkInMs())

    def close(self) -> None:
        """Nothing is held but what every task needs."""
        self.fold.close()
