"""The operator around a key group, as Spark calls it; what it does is in `group_fold`, which a worker imports.

Rule: the driver imports this module to name its class, and so do Spark's planners: it imports nothing that is compiled.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS

pc: Any = pyarrow.compute  # its functions are made at run time: no checker knows them
OUTPUT: Final = "key_group int, judgements binary"
TOLD: Final = ", ".join(f"{column.name} {column.type}" for column in JUDGEMENTS.columns)
_INSTANT: Final = pa.timestamp("us", "UTC")


class GroupProcessor(StatefulProcessor):
    """One key group's call for each micro-batch with rows, and for its timer.

    Args:
        deployment: lateness, clock lead and jitter.
        form: the stored form to write.
        silent: whether what is said is heard by nobody: then a summary is still to be said.
    """

    def __init__(self, deployment: Deployment, form: int, *, silent: bool = False) -> None:
        self.deployment = deployment
        self.form = form
        self.silent = silent

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state: the group with its timer, and what waits in it."""
        from fleetpulse.io.group_fold import GroupFold

        self.fold = GroupFold(handle, self.deployment, self.form, silent=self.silent)

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


def unpacker(generation: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what turns rows of `OUTPUT` into judgements, columns of `TOLD`.

    They are whole here, and nothing is projected after it: an expression with the batch's time would be compiled anew,
    and then be warmed up anew, in every batch.

    Args:
        generation: of the job.
    """

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from fleetpulse.columnar.blocks import from_bytes
        from fleetpulse.io.workers import settle

        for batch in batches:
            for judgements in batch["judgements"]:
                yield _complete(from_bytes(judgements.as_py()), generation)
        settle()

    return unpack


def _complete(told: pa.RecordBatch, generation: int) -> pa.RecordBatch:
    """Add what the shell knows, and make instants of milliseconds."""
    added = {
        "judged_at": pa.scalar(time.time_ns() // 1000, pa.int64()).cast(_INSTANT),
        "generation": pa.scalar(generation, pa.int32()),
    }
    columns: dict[str, pa.Array] = {name: pa.repeat(value, told.num_rows) for name, value in added.items()}
    for column in JUDGEMENTS.columns:
        if column.name not in added:
            instant = column.type == "timestamp"
            columns[column.name] = _instants(told[f"{column.name}_ms"]) if instant else told[column.name]
    return pa.RecordBatch.from_pydict({column.name: columns[column.name] for column in JUDGEMENTS.columns})


def _instants(millis: pa.Array) -> pa.Array:
    return pc.multiply(millis, 1000).cast(_INSTANT)
