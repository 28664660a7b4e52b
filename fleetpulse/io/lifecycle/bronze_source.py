"""Python data source that streams bronze as blocks, without messages in the JVM.

Rule 1: an offset is the number of the next Delta version to read. The rows that a version appended
never change.
Rule 2: `delta.log` selects the files of a version. It skips rewrites; a missing version is an
error.
Rule 3: Spark's planner and streaming runner import this module at each start of a query, and Spark
waits at most ten seconds for each. Imports that only a task needs (numba, packing) are in `read`.
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
    """Files of a batch for one task.

    Attributes:
        paths: Parquet files, in the order of their versions.
        started_ms: ``received_at`` of the first row of bronze, epoch milliseconds.
        folder: folder for the blocks of signals; None if rows carry the blocks.
    """

    paths: tuple[str, ...]
    started_ms: int
    folder: str | None = None


class BlockReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader that plans batches by version and packs their files into blocks.

    Options:
    - ``path``: path of the table.
    - ``key_groups``: number of key groups.
    - ``max_rows``: target number of rows a batch.
    - ``parallelism``: number of tasks.
    - ``begin``: first version to read with a new checkpoint.
    - ``begin_alone``: 1 if the first batch of a new checkpoint reads no rows.
    - ``through``: version at which to stop.
    - ``handover``: folder of the query for block files, see `block_files`.
    - ``hold_ms``: hold time of rows of a live fleet, milliseconds, see `adaptive_batching`.
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
        """Return the first version to read.

        The offset is marked if the first batch must read no rows.
        """
        return {"version": self.begin, "begun": 0} if self.alone else {"version": self.begin}

    def prepareForTriggerAvailableNow(self) -> None:
        """Stop at the newest version that is available now."""
        newest = self.log.latest() + 1
        self.through = newest if self.through is None else min(self.through, newest)

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        """Return the end of the next batch.

        A batch has as many versions as ``max_rows`` allows, and at least one. If no batch is due,
        the end equals the start.
        """
        start = start or self.initialOffset()
        if "begun" in start:
            return {"version": start["version"]}
        first = start["version"]
        end, rows, latest = first, 0, self.log.latest() if self.through is None else self.through - 1
        if self.through is None and not self.pacer.is_due(first, latest):
            return start
        while end <= latest and (rows < self.max_rows or end == first):
            files, end_of_span = self.log.span(end, self.through)
            rows += sum(count for _, count in files)
            end = end_of_span
        return start if end == first else {"version": end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Files]:
        """Split the files of a batch among the tasks."""
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
            assert first is not None, "bronze has a first file if a batch has files"
            oldest = pc.min(pq.ParquetFile(first).read(columns=["received_at"])["received_at"])
            self._started_ms = int(oldest.cast(pa.int64()).as_py()) // 1000
        return self._started_ms

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Pack the files of one task into one block for each key group."""
        from fleetpulse.io.spark.python_worker import freeze_gc
        from fleetpulse.io.tables.bronze import pack, read_bronze, with_wake_rows

        assert isinstance(partition, Files)
        tables = [read_bronze(path) for path in partition.paths]
        rows = pa.concat_tables(tables, promote_options="default").combine_chunks()  # files of signals only have fewer columns
        if rows.num_rows:
            blocks = with_wake_rows(pack(rows, self.key_groups, partition.started_ms), self.key_groups)
            yield block_files.write_blocks(blocks, "signals", partition.folder)
        freeze_gc()

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: maintenance applies the retention of bronze."""

    def stop(self) -> None:
        """Remove the block files of the query."""
        if self.handover:
            shutil.rmtree(self.handover, ignore_errors=True)


class BlockSource(DataSource):
    """Data source of bronze blocks.

    Register it with ``spark.dataSource.register(BlockSource)`` and read it with
    ``format("fleet_blocks")``.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of a block."""
        return BLOCK_COLUMNS

    def streamReader(self, schema: Any) -> BlockReader:
        """Return the stream reader."""
        return BlockReader(dict(self.options))
