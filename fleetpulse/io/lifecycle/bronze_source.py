"""Bronze as a stream of blocks: a Python data source that the JVM plans without ever seeing a message.

Rule 1: an offset is the number of the next Delta version to read; what a version appended never changes.
Rule 2: what is read of a version is said by `delta.log`: rewrites are passed over, and one that is gone is an error, not a gap.
Rule 3: Spark's planner and its streaming runner import this module at each start of a query, and Spark waits ten seconds for
each at most: what only a task needs (numba, the packing) is imported where the task begins.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from fleetpulse.columnar.compute import pc
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.lifecycle import block_files
from fleetpulse.io.tables.adaptive_batching import MAX_ROWS, Pacer

FORMAT: Final = "fleet_blocks"
BLOCK_COLUMNS: Final = (
    f"key_group int, received_at timestamp, newest_ms long, started_ms long, signals binary, others binary, {block_files.COLUMNS}"
)


@dataclass(frozen=True)
class Files(InputPartition):
    """Some of a batch's files.

    Attributes:
        paths: Parquet files, in the order of their versions.
        started_ms: ``received_at`` of the first row ever, epoch milliseconds.
        folder: where blocks of signals are handed over; None where rows carry them.
    """

    paths: tuple[str, ...]
    started_ms: int
    folder: str | None = None


class BlockReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches by version and packs their files into blocks.

    Options: ``path`` of the table, ``key_groups``, ``max_rows`` a batch aims at, ``parallelism``; of a new checkpoint
    ``begin``, the first version to read, and ``begin_alone``: its first batch reads nothing; ``through``: the version to stop at;
    ``handover``: a folder of the query's own, see `block_files`; ``hold_ms``: how long rows of a live fleet wait, see
    `adaptive_batching`.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self.log = DeltaLog(Path(options["path"]))
        self.key_groups = int(options["key_groups"])
        self.max_rows = int(options.get("max_rows", MAX_ROWS))
        self.parallelism = int(options.get("parallelism", "2"))
        self.begin = int(options.get("begin", "0"))
        self.alone = options.get("begin_alone") == "1"
        self.through = int(options["through"]) if "through" in options else None
        self.handover = options.get("handover")
        self.pacer = Pacer(self.log, int(options.get("hold_ms", "0")))
        self._started_ms: int | None = None

    def initialOffset(self) -> dict[str, int]:
        """Begin with the first version that is to be read; where nothing is to be read yet, just before it."""
        return {"version": self.begin, "begun": 0} if self.alone else {"version": self.begin}

    def prepareForTriggerAvailableNow(self) -> None:
        """Read what is there now, and no further."""
        newest = self.log.latest() + 1
        self.through = newest if self.through is None else min(self.through, newest)

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        """Return the end of the next batch: as many versions as ``max_rows`` allows, at least one."""
        start = start or self.initialOffset()
        if "begun" in start:
            return {"version": start["version"]}
        begin = start["version"]
        end, rows, latest = begin, 0, self.log.latest() if self.through is None else self.through - 1
        if self.through is None and not self.pacer.is_due(begin, latest):
            return start
        while end <= latest and (rows < self.max_rows or end == begin):
            files, end_of_span = self.log.span(end, self.through)
            rows += sum(count for _, count in files)
            end = end_of_span
        return start if end == begin else {"version": end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Files]:
        """Share the files of a batch among the tasks."""
        paths: list[str] = []
        version = start["version"]
        while version < end["version"]:
            files, version = self.log.span(version, end["version"])
            paths += [path for path, _ in files]
        if not paths:
            return []
        share = -(-len(paths) // self.parallelism)
        started = self._started()
        folder = self.handover and block_files.folder_for(self.handover, start["version"], end["version"])
        return [Files(tuple(paths[at : at + share]), started, folder) for at in range(0, len(paths), share)]

    def _started(self) -> int:
        if self._started_ms is None:
            first = self.log.first_file()
            assert first is not None, "a batch with files has a first one"
            oldest = pc.min(pq.ParquetFile(first).read(columns=["received_at"])["received_at"])
            self._started_ms = int(oldest.cast(pa.int64()).as_py()) // 1000
        return self._started_ms

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Pack one task's files: one block a key group."""
        from fleetpulse.io.spark.python_worker import freeze_gc
        from fleetpulse.io.tables.bronze import pack, read_bronze, with_wake_rows

        assert isinstance(partition, Files)
        tables = [read_bronze(path) for path in partition.paths]
        rows = pa.concat_tables(tables, promote_options="default").combine_chunks()  # a file of signals alone has fewer columns
        if rows.num_rows:
            blocks = with_wake_rows(pack(rows, self.key_groups, partition.started_ms), self.key_groups)
            yield block_files.write_blocks(blocks, "signals", partition.folder)
        freeze_gc()

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to clean up: bronze is kept by its own retention."""

    def stop(self) -> None:
        """Take away what was handed over last."""
        if self.handover:
            shutil.rmtree(self.handover, ignore_errors=True)


class BlockSource(DataSource):
    """Register with ``spark.dataSource.register(BlockSource)``; read with ``format("fleet_blocks")``."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of a block."""
        return BLOCK_COLUMNS

    def streamReader(self, schema: Any) -> BlockReader:
        """Return the reader."""
        return BlockReader(dict(self.options))
