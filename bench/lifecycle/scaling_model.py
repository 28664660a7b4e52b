"""Model of the lifecycle job on more cores than this machine has, from measured parts of batches.

Rule 1: a figure of the model is never shown as a measurement.
Rule 2: the model is Amdahl's law: the driver's part of a batch is constant, and the work of tasks is
divided by the cores. The fixed work of a task is constant, too: each core runs one task per stage.
Rule 3: key groups are divided as Spark divides them. A batch waits for the busiest partition.

The model is optimistic: cores share memory bandwidth, and the driver starts more tasks and collects
more rows. The figures are for batches of the measured size; larger batches scale to more cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

from bench.lifecycle.batch_parts import BatchParts
from bench.lifecycle.contenders import key_groups
from fleetpulse.io.lifecycle.bronze_source import ROWS_A_TASK
from fleetpulse.planning.partition_skew import busiest

CORES = (8, 32, 128)


@dataclass(frozen=True, slots=True)
class ScalingModel:
    """Parts of a batch on a measured number of cores.

    Attributes:
        devices: number of devices, for the key groups.
        messages: messages of a batch.
        cores: measured number of cores.
        parts: medians of the parts of a batch.
        read_task_ms: fixed work of a task that reads, milliseconds; at most that in a very small batch.
        fold_task_ms: fixed work of a task that folds, milliseconds; at most that in a very small batch.
    """

    devices: int
    messages: int
    cores: int
    parts: BatchParts
    read_task_ms: float
    fold_task_ms: float

    @classmethod
    def measured(
        cls, devices: int, messages: int, cores: int, batches: Sequence[BatchParts], small: Sequence[BatchParts]
    ) -> "ScalingModel":
        """Return the model of measured batches.

        Args:
            devices: number of devices.
            messages: messages of a batch.
            cores: number of cores of the measurement.
            batches: parts of the batches, at least one.
            small: parts of very small batches on as many cores, at least one.
        """
        parts, fixed = medians(batches), medians(small)
        read_task_ms, fold_task_ms = (
            min(_a_task(fixed_run_ms, fixed_tasks), _a_task(run_ms, tasks))
            for fixed_run_ms, fixed_tasks, run_ms, tasks in (
                (fixed.read_run_ms, fixed.read_tasks, parts.read_run_ms, parts.read_tasks),
                (fixed.fold_run_ms, fixed.fold_tasks, parts.fold_run_ms, parts.fold_tasks),
            )
        )
        return cls(devices, messages, cores, parts, read_task_ms, fold_task_ms)

    def read_ms(self, cores: int) -> float:
        """Return the duration of reading and packing; a task has at least `ROWS_A_TASK` rows."""
        used = max(1, min(cores, max(2, self.messages // ROWS_A_TASK)))
        work_ms = self.parts.read_run_ms - self.parts.read_tasks * self.read_task_ms
        return self.read_task_ms + work_ms / used

    def fold_ms(self, cores: int) -> float:
        """Return the duration of folding: that of the busiest partition."""
        skew = busiest(key_groups(self.devices, cores), cores)
        work_ms = self.parts.fold_run_ms - self.parts.fold_tasks * self.fold_task_ms
        return self.fold_task_ms + work_ms * skew / cores

    def batch_ms(self, cores: int) -> float:
        """Return the duration of a batch on a number of cores, milliseconds."""
        return self.parts.driver_ms + self.read_ms(cores) + self.fold_ms(cores)

    @property
    def limit(self) -> float:
        """Speed-up over one core that no number of cores exceeds."""
        return self.batch_ms(1) / (self.parts.driver_ms + self.read_task_ms + self.fold_task_ms)


def medians(batches: Sequence[BatchParts]) -> BatchParts:
    """Return the median of each part over several batches."""
    return BatchParts(**{part.name: median(getattr(one, part.name) for one in batches) for part in fields(BatchParts)})


def _a_task(run_ms: float, tasks: float) -> float:
    return run_ms / tasks if tasks else 0.0
