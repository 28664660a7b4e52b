"""Parts of a micro-batch of the lifecycle job: driver, reading stage, folding stage.

Rule: the driver's part is the time of a batch in which no stage runs: offsets, planning, logs and
the commit of the judgements. Only one core works on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

_PLANNING: Final = ("latestOffset", "getBatch", "queryPlanning")
_LOGS: Final = ("walCommit", "commitOffsets")


@dataclass(frozen=True, slots=True)
class Stage:
    """A finished stage of Spark.

    Attributes:
        began_ms: start, epoch milliseconds.
        ended_ms: end, epoch milliseconds.
        run_ms: run times of all tasks together, milliseconds.
        tasks: number of tasks.
        reads: whether the stage reads bronze; otherwise it folds.
    """

    began_ms: int
    ended_ms: int
    run_ms: int
    tasks: int
    reads: bool


@dataclass(frozen=True, slots=True)
class BatchParts:
    """Parts of one micro-batch, all times in milliseconds.

    Attributes:
        batch_ms: duration of the batch.
        planning_ms: driver: offsets and plan.
        logs_ms: driver: logs of offsets and commits of the checkpoint.
        sink_ms: driver: commit of the judgements, and everything else while no task runs.
        read_ms: duration of the stage that reads and packs.
        read_run_ms: run times of its tasks together.
        read_tasks: number of its tasks.
        fold_ms: duration of the stage that folds and writes state and judgements.
        fold_run_ms: run times of its tasks together.
        fold_tasks: number of its tasks.
    """

    batch_ms: float
    planning_ms: float
    logs_ms: float
    sink_ms: float
    read_ms: float
    read_run_ms: float
    read_tasks: int
    fold_ms: float
    fold_run_ms: float
    fold_tasks: int

    @property
    def driver_ms(self) -> float:
        """Time of the driver alone."""
        return self.planning_ms + self.logs_ms + self.sink_ms


def parts_of(batches: Sequence[Mapping[str, Any]], stages: Sequence[Stage]) -> list[BatchParts]:
    """Return the parts of each micro-batch.

    Args:
        batches: progress of each batch, in order: ``timestamp`` and ``durationMs``.
        stages: stages of the query, in any order. A stage belongs to the batch in which it began.
    """
    found: list[BatchParts] = []
    for batch in batches:
        took: Mapping[str, int] = batch["durationMs"]
        began_ms = round(datetime.fromisoformat(batch["timestamp"]).timestamp() * 1000)
        own = [one for one in stages if began_ms <= one.began_ms <= began_ms + took["triggerExecution"]]
        read, fold = ([one for one in own if one.reads is reads] for reads in (True, False))
        planning_ms, logs_ms = (sum(took.get(name, 0) for name in names) for names in (_PLANNING, _LOGS))
        read_ms, fold_ms = (sum(one.ended_ms - one.began_ms for one in part) for part in (read, fold))
        rest_ms = took["triggerExecution"] - planning_ms - logs_ms - read_ms - fold_ms
        found.append(
            BatchParts(
                took["triggerExecution"], planning_ms, logs_ms, max(0, rest_ms),
                read_ms, sum(one.run_ms for one in read), sum(one.tasks for one in read),
                fold_ms, sum(one.run_ms for one in fold), sum(one.tasks for one in fold),
            )
        )  # fmt: skip
    return found


def stages_since(spark: SparkSession, first: int) -> tuple[list[Stage], int]:
    """Return the finished stages of a session, and the number of the next stage.

    Args:
        spark: Spark session.
        first: number of the first stage to return.
    """
    java_context: Any = spark.sparkContext._jsc  # noqa: SLF001 - pyspark has no public access to stages
    context = java_context.sc()
    context.listenerBus().waitUntilEmpty()
    found: list[Stage] = []
    while True:
        try:
            stage = context.statusStore().lastStageAttempt(first)
        except Py4JJavaError:  # NoSuchElementException: there is no such stage yet
            return found, first
        first += 1
        if stage.completionTime().isDefined():
            began_ms, ended_ms = stage.submissionTime().get().getTime(), stage.completionTime().get().getTime()
            reads = stage.shuffleWriteRecords() > 0
            found.append(Stage(began_ms, ended_ms, stage.executorRunTime(), stage.numTasks(), reads))
