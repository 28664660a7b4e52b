"""Python data source that streams bronze as blocks, without messages in the JVM.

Rule 1: an offset is the number of the next Delta version to read. The rows that a version appended
never change.
Rule 2: `delta.log` selects the files of a version. It skips rewrites; a missing version is an
error.
Rule 3: Spark's planner and streaming runner import this module at each start of a query, and Spark
waits at most ten seconds for each. Imports that only a task needs (numba, packing) are in `read`.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from fleetpulse.columnar.compute import pc
from fleetpulse.io.delta.corruption import reporting_corruption_of_file
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.lifecycle import block_files
from fleetpulse.io.tables.adaptive_batching import BATCH_ROWS, BatchStart

FORMAT: Final = "fleet_blocks"
ROWS_A_TASK: Final = 20_000  # with fewer rows, a third or further task costs more than it saves
_LEAST_TASKS: Final = 2
BLOCK_COLUMNS: Final = (
    f"key_group int, received_at timestamp, newest_ms long, started_ms long, signals binary, others binary, {block_files.COLUMNS}"
)


@dataclass(frozen=True)
class Piece:
    """A file of bronze, or one row group of a large file.

    Attributes:
        path: path of the Parquet file.
        row_group: number of the row group; None for the whole file.
        rows: number of rows; 0 if the log has no count.
    """

    path: str
    row_group: int | None
    rows: int


@dataclass(frozen=True)
class Files(InputPartition):
    """Files of a batch for one task.

    Attributes:
        pieces: files and row groups, in the order of their versions.
        started_ms: ``received_at`` of the first row of bronze, epoch milliseconds.
        folder: folder for the blocks of signals; None if rows carry the blocks.
    """

    pieces: tuple[Piece, ...]
    started_ms: int
    folder: str | None = None


def shares(pieces: Sequence[Piece], parallelism: int) -> list[tuple[Piece, ...]]:
    """Split the files of a batch into consecutive shares of about equal rows, one per task.

    A batch has more than two shares only if each has `ROWS_A_TASK` rows. A file with more rows than
    a share is split into its row groups.

    Args:
        pieces: files of the batch, at least one, in the order of their versions.
        parallelism: maximum number of shares.
    """
    total = sum(_weight(piece) for piece in pieces)
    tasks = min(parallelism, max(_LEAST_TASKS, total // ROWS_A_TASK))
    split = [part for piece in pieces for part in (_row_groups(piece) if _is_large(piece, total / tasks) else [piece])]
    found: list[list[Piece]] = [[] for _ in range(tasks)]
    before = 0
    for piece in split:  # to the share that contains the middle of its rows
        found[min(tasks - 1, (2 * before + _weight(piece)) * tasks // (2 * total))].append(piece)
        before += _weight(piece)
    return [tuple(share) for share in found if share]


def _weight(piece: Piece) -> int:
    return piece.rows or ROWS_A_TASK


def _is_large(piece: Piece, share: float) -> bool:
    return piece.rows > max(share, ROWS_A_TASK)


def _row_groups(piece: Piece) -> list[Piece]:
    """Return the row groups of a file; the file itself if it has only one."""
    with reporting_corruption_of_file(Path(piece.path)):
        about = pq.ParquetFile(piece.path).metadata
    if about.num_row_groups < 2:
        return [piece]
    return [Piece(piece.path, number, about.row_group(number).num_rows) for number in range(about.num_row_groups)]


class BlockReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader that plans batches by version and packs their files into blocks.

    Options:
    - ``path``: path of the table.
    - ``key_groups``: number of key groups.
    - ``max_rows``: target number of rows a batch.
    - ``parallelism``: maximum number of tasks of a batch, one per core.
    - ``begin``: first version to read with a new checkpoint.
    - ``begin_alone``: 1 if the first batch of a new checkpoint reads no rows.
    - ``through``: version at which to stop.
    - ``handover``: folder of the query for block files, see `block_files`.
    - ``hold_ms``: hold time of rows of a live fleet, milliseconds, see `adaptive_batching`.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self.log = DeltaLog(Path(options["path"]))
        self.key_groups = int(options["key_groups"])
        self.max_rows = int(options.get("max_rows", BATCH_ROWS))
        self.parallelism = int(options.get("parallelism", "2"))
        self.begin = int(options.get("begin", "0"))
        self.alone = options.get("begin_alone") == "1"
        self.through = int(options["through"]) if "through" in options else None
        self.handover = options.get("handover")
        self.batch_start = BatchStart(self.log, int(options.get("hold_ms", "0")))
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
        if self.through is None and not self.batch_start.is_due(first, latest):
            return start
        while end <= latest and (rows < self.max_rows or end == first):
            files, end_of_span = self.log.span(end, self.through)
            rows += sum(count for _, count in files)
            end = end_of_span
        return start if end == first else {"version": end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Files]:
        """Split the files of a batch among the tasks, see `shares`."""
        pieces: list[Piece] = []
        version = start["version"]
        while version < end["version"]:
            files, version = self.log.span(version, end["version"])
            pieces += [Piece(path, None, rows) for path, rows in files]
        if not pieces:
            return []
        started = self._started()
        folder = self.handover and block_files.folder_for(self.handover, start["version"], end["version"])
        return [Files(share, started, folder) for share in shares(pieces, self.parallelism)]

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
        tables = [read_bronze(piece.path, piece.row_group) for piece in partition.pieces]
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
