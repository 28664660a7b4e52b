"""Health of the lifecycle job: metrics of a micro-batch and their thresholds.

Rule 1: thresholds are data; each names the one column of ``stream_health`` that it reads.
Rule 2: a metric without a measurement is None and has no rating: it is never rated good.

The metrics are derived from the progress that Spark 4.2 reports for transformWithState in Python,
as recorded in ``tests/golden/progress-*.json``:

- **State size** is ``rocksdbSstFileSize``: the files of all partitions. The contents of memtables
  count as memory.
- **Memory** is ``memoryUsedBytes``: memory of RocksDB only, without the JVM heap and the Python
  workers.
- **Checkpoint** is ``walCommit + commitOffsets + commitTimeMs / numShufflePartitions``. The first
  two are durations of the batch. The third is summed over partitions, which commit in parallel.
- **State update** is the time that RocksDB takes to read and write one value: ``(rocksdbGetLatency
  + rocksdbPutLatency + rocksdbWriterStallLatencyMs) / numRowsUpdated``. ``allUpdatesTimeMs`` cannot
  be used in Python. It lasts from the start of a task to its last row and is summed over
  partitions. So it includes the Python worker, the fold and the sink. An idle fleet has 700 ms in a
  batch, so a threshold of 50 ms would always be exceeded. It is stored as ``updates_ms``.
- **Clean-up** is ``allRemovalsTimeMs + timerProcessingTimeMs + rocksdbTotalCompactionLatencyMs +
  rocksdbCommitCompactLatency``. The first two are always 0 in Python (SPARK-49603). The fold
  removes devices when it writes their key group, so compaction is the only other clean-up.

Source: docs/concepts/state-store.md
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, cast

from fleetpulse.core.times import parse_instant_ms

_GB: Final = 1_000_000_000


class Rating(StrEnum):
    """Rating of a metric."""

    GOOD = "good"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Threshold:
    """Thresholds of one metric.

    Attributes:
        metric: name of the metric, for operators.
        column: column of ``stream_health``; its name includes the unit.
        good_below: values below it are good.
        critical_above: values above it are critical; values between the two are a warning.
    """

    metric: str
    column: str
    good_below: int
    critical_above: int

    def rate(self, value: int | None) -> Rating | None:
        """Rate a value; None if there is no value."""
        if value is None:
            return None
        if value < self.good_below:
            return Rating.GOOD
        return Rating.CRITICAL if value > self.critical_above else Rating.WARNING


THRESHOLDS: Final = (
    Threshold("state size", "state_bytes", 1 * _GB, 5 * _GB),
    Threshold("checkpoint", "checkpoint_ms", 10_000, 30_000),
    Threshold("state update", "state_update_us", 10_000, 50_000),
    Threshold("clean-up", "clean_up_ms", 5_000, 15_000),
    Threshold("memory", "state_memory_bytes", 2 * _GB, 4 * _GB),
)


def measure(name: str, value: float | None) -> str | None:
    """Return a number with a readable unit.

    Args:
        name: name of the column, which ends in ``_bytes``, ``_ms`` or ``_us``.
        value: number in that unit.
    """
    if value is None:
        return None
    if name.endswith("_bytes"):
        for unit, size in (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)):
            if value >= size:
                return f"{value / size:.3g} {unit}"
        return f"{value} B"
    milliseconds = value / 1000 if name.endswith("_us") else value
    return f"{milliseconds / 1000:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Values of a batch that its progress does not contain.

    Attributes:
        generation: generation of the lifecycle job.
        input_rows: number of rows of bronze between the offsets of the batch; None if unknown.
        newest_received_ms: newest ``received_at`` read in earlier batches, epoch milliseconds.
        judgements: number of judgements that the batch wrote, by kind; None if unknown.
        devices: number of devices by mode; None before the first summary.
    """

    generation: int
    input_rows: int | None = None
    newest_received_ms: int | None = None
    judgements: Mapping[str, int] | None = None
    devices: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """One ``StreamingQueryProgress`` of Spark.

    Attributes:
        content: parsed JSON of the progress.
    """

    content: Mapping[str, Any] = field(repr=False)

    @property
    def run_id(self) -> str:
        """Run id of the query, which changes with each start."""
        return str(self.content["runId"])

    @property
    def batch_id(self) -> int:
        """Number of the batch in its checkpoint."""
        return int(self.content["batchId"])

    @property
    def newest_received_ms(self) -> int | None:
        """Newest ``received_at`` of the batch, epoch milliseconds; None if it read no row."""
        return self.event_ms("max")

    @property
    def versions(self) -> tuple[int, int] | None:
        """First and end version of bronze of the batch (end excluded); None if unknown."""
        source = self.content["sources"][0]
        end, start = _offset(source.get("endOffset")).get("version"), _offset(source.get("startOffset")).get("version", 0)
        return (start, end) if isinstance(start, int) and isinstance(end, int) else None

    def event_ms(self, name: str) -> int | None:
        """Return an instant of ``eventTime``, epoch milliseconds; None if absent or 0."""
        text = self.content.get("eventTime", {}).get(name)
        return (parse_instant_ms(text) or None) if text else None

    def part_ms(self, name: str) -> int | None:
        """Return the duration of one phase of the batch, milliseconds."""
        return self.content["durationMs"].get(name)

    def state(self, name: str) -> int:
        """Return a metric summed over the stateful operators; 0 if none reports it."""
        return sum(int(one.get(name, 0)) for one in self.content["stateOperators"])

    def custom(self, name: str) -> int:
        """Return a metric of the state store, summed; 0 if it is not reported."""
        return sum(int(one.get("customMetrics", {}).get(name, 0)) for one in self.content["stateOperators"])


def to_row(progress: Progress, context: BatchContext) -> dict[str, Any]:
    """Return the row of ``stream_health`` for a batch; timestamps are ``<column>_ms``.

    Args:
        progress: progress that Spark reported.
        context: values that the progress does not contain.

    Raises:
        KeyError, ValueError: not the progress of a batch.
    """
    content = progress.content
    at_ms, batch_ms = parse_instant_ms(content["timestamp"]), int(content["batchDuration"])
    blocks, rows = int(content["numInputRows"]), context.input_rows
    row: dict[str, Any] = {
        "began_at_ms": at_ms,
        "query_id": content["id"],
        "run_id": progress.run_id,
        "batch_id": progress.batch_id,
        "generation": context.generation,
        "input_rows": rows,
        "input_blocks": blocks,
        "input_rows_per_s": _rows_per_s(content.get("inputRowsPerSecond"), blocks, rows),
        "processed_rows_per_s": None if rows is None or not batch_ms else rows * 1000 / batch_ms,
        "judgements": _json(context.judgements),
        "rows_late": None if context.judgements is None else context.judgements.get("late", 0),
        "rows_dropped": progress.state("numRowsDroppedByWatermark"),
        "batch_ms": batch_ms,
        "devices": _json(context.devices),
        "source_offset": json.dumps(_offset(content["sources"][0].get("endOffset"))),
    }
    row |= {column: progress.part_ms(name) for column, name in _PARTS.items()}
    return row | _watermark(progress, context, at_ms + batch_ms) | _state(progress)


_PARTS: Final = {
    "latest_offset_ms": "latestOffset",
    "get_batch_ms": "getBatch",
    "query_planning_ms": "queryPlanning",
    "wal_commit_ms": "walCommit",
    "add_batch_ms": "addBatch",
    "commit_offsets_ms": "commitOffsets",
}


def _watermark(progress: Progress, context: BatchContext, end_ms: int) -> dict[str, int | None]:
    watermark_ms = progress.event_ms("watermark")
    read = [at for at in (progress.newest_received_ms, context.newest_received_ms) if at is not None]
    newest_ms = max(read, default=None)
    return {
        "newest_received_at_ms": newest_ms,
        "watermark_ms": watermark_ms,
        "watermark_delay_ms": None if watermark_ms is None or newest_ms is None else newest_ms - watermark_ms,
        "watermark_age_ms": None if watermark_ms is None else end_ms - watermark_ms,
    }


def _state(progress: Progress) -> dict[str, int | None]:
    state, custom = progress.state, progress.custom
    partitions, updated = state("numShufflePartitions"), state("numRowsUpdated")
    offsets_ms = (progress.part_ms("walCommit") or 0) + (progress.part_ms("commitOffsets") or 0)
    store_ms = custom("rocksdbGetLatency") + custom("rocksdbPutLatency") + custom("rocksdbWriterStallLatencyMs")
    compaction_ms = custom("rocksdbTotalCompactionLatencyMs") + custom("rocksdbCommitCompactLatency")
    return {
        "updates_ms": state("allUpdatesTimeMs"),
        "state_commit_ms": state("commitTimeMs"),
        "partitions": partitions,
        "state_rows": state("numRowsTotal"),
        "state_rows_updated": updated,
        "state_rows_removed": state("numRowsRemoved"),
        "state_bytes": custom("rocksdbSstFileSize"),
        "state_memory_bytes": state("memoryUsedBytes"),
        "checkpoint_ms": offsets_ms + round(state("commitTimeMs") / max(1, partitions)),
        "state_update_us": round(store_ms * 1000 / updated) if updated else None,
        "clean_up_ms": state("allRemovalsTimeMs") + custom("timerProcessingTimeMs") + compaction_ms,
        "rocksdb_gets": custom("rocksdbGetCount"),
        "rocksdb_puts": custom("rocksdbPutCount"),
        "rocksdb_written_bytes": custom("rocksdbTotalBytesWritten"),
        "rocksdb_snapshot_bytes": custom("rocksdbBytesCopied"),
        "rocksdb_stall_ms": custom("rocksdbWriterStallLatencyMs"),
        "rocksdb_load_ms": custom("rocksdbLoadLatencyMs"),
        "rocksdb_cache_misses": custom("rocksdbReadBlockCacheMissCount"),
    }


def _rows_per_s(blocks_per_s: Any, blocks: int, rows: int | None) -> float | None:
    """Convert Spark's rate of blocks to a rate of rows; None if unknown.

    Spark reports 0 for the first batch of a run.
    """
    if not blocks:
        return 0.0
    if rows is None or not isinstance(blocks_per_s, int | float) or not 0 < blocks_per_s < float("inf"):
        return None
    return blocks_per_s * rows / blocks


def _offset(value: Any) -> dict[str, Any]:
    offset = json.loads(value) if isinstance(value, str) else value
    return cast("dict[str, Any]", offset) if isinstance(offset, dict) else {}


def _json(counts: Mapping[str, int] | None) -> str | None:
    return None if counts is None else json.dumps(dict(sorted(counts.items())))


def _number(rows: int | None) -> str:
    return "an unknown number of" if rows is None else f"{rows:,}"


def problems_of(status: Mapping[str, Any]) -> list[str]:
    """Return the problems that the status of a job reports."""
    problems = [str(status["problem"])] if status.get("problem") else []
    problems += [
        f"the stream {name} has failed {one['failures']} times, and starts again: {one['error']}"
        for name, one in status.get("streams", {}).items()
        if one["state"] == "failed"
    ]
    problems += [
        f"the stream {name} was off for so long that retention removed {_number(one['missed'])} rows that it had not read; "
        f"its results of that time are incomplete"
        for name, one in status.get("streams", {}).items()
        if one.get("missed", 0) != 0
    ]
    return [*problems, "a coverage gap is open: silence at its sites does not count"] if status.get("gap_open") else problems
