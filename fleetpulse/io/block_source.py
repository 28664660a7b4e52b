"""Bronze as a stream of blocks: a Python data source that the JVM plans without ever seeing a message.

Rule 1: an offset is the number of the next Delta version to read; what a version appended never changes.
Rule 2: versions that only rewrite (OPTIMIZE) are passed over; a version that is gone is an error, not a gap.
Rule 3: rows that concern everybody go to every key group; a tick goes to group 0: it only moves the watermark.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from fleetpulse.columnar.blocks import ROW_SCHEMA
from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages import Kind

pc: Any = pyarrow.compute  # its functions are made at run time: no checker knows them
FORMAT: Final = "fleet_blocks"
MAX_ROWS: Final = 200_000
BLOCK_COLUMNS: Final = "key_group int, received_at timestamp, started_ms long, block binary"
_BLOCK_SCHEMA: Final = pa.schema(
    [
        ("key_group", pa.int32()),
        ("received_at", pa.timestamp("us", tz="UTC")),
        ("started_ms", pa.int64()),
        ("block", pa.binary()),
    ]
)


@dataclass(frozen=True)
class Files(InputPartition):
    """Some of a batch's files.

    Attributes:
        paths: Parquet files, in the order of their versions.
        started_ms: ``received_at`` of the first row ever, epoch milliseconds.
    """

    paths: tuple[str, ...]
    started_ms: int


class DeltaLog:
    """The appended files of a Delta table's versions, read from its log."""

    def __init__(self, table: Path) -> None:
        self.table = table
        self.log = table / "_delta_log"

    def latest(self) -> int:
        """Return the newest version; -1 where there is none."""
        versions = [int(path.stem) for path in self.log.glob("*.json") if path.stem.isdecimal()]
        return max(versions, default=-1)

    def appended(self, version: int) -> list[tuple[str, int]]:
        """Return path and number of rows of each file that a version appended.

        Raises:
            FleetError: the version is no longer in the log.
        """
        try:
            lines = (self.log / f"{version:020d}.json").read_text().splitlines()
        except FileNotFoundError:
            raise FleetError(
                f"version {version} of {self.table.name} is gone from its log, and has not been judged; "
                f"restore it from a backup, or begin a new generation from a snapshot"
            ) from None
        files: list[tuple[str, int]] = []
        for line in lines:
            add = json.loads(line).get("add")
            if add and add.get("dataChange", True):
                rows = json.loads(add.get("stats") or "{}").get("numRecords", 0)
                files.append((str(self.table / unquote(add["path"])), rows))
        return files


class BlockReader(DataSourceStreamReader):
    """Plans batches by version and packs their files into blocks.

    Options: ``path`` of the table, ``key_groups``, ``max_rows`` a batch aims at, ``parallelism``.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self.log = DeltaLog(Path(options["path"]))
        self.key_groups = int(options["key_groups"])
        self.max_rows = int(options.get("max_rows", MAX_ROWS))
        self.parallelism = int(options.get("parallelism", "2"))
        self._started_ms: int | None = None
        self._known_end = 0

    def initialOffset(self) -> dict[str, int]:
        """Begin with the table's first version."""
        return {"version": 0}

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        """Return the end of the next batch: as many versions as ``max_rows`` allows, at least one."""
        begin = (start or self.initialOffset())["version"]
        end, rows, latest = begin, 0, self.log.latest()
        while end <= latest and (rows < self.max_rows or end == begin):
            rows += sum(count for _, count in self.log.appended(end))
            end += 1
        return {"version": end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Files]:
        """Share the files of a batch among the tasks."""
        paths = [path for v in range(start["version"], end["version"]) for path, _ in self.log.appended(v)]
        if not paths:
            return []
        share = -(-len(paths) // self.parallelism)
        started = self._started()
        return [Files(tuple(paths[at : at + share]), started) for at in range(0, len(paths), share)]

    def _started(self) -> int:
        if self._started_ms is None:
            version = 0
            while not (files := self.log.appended(version)):
                version += 1
            oldest = pc.min(pq.ParquetFile(files[0][0]).read(columns=["received_at"])["received_at"])
            self._started_ms = int(oldest.cast(pa.int64()).as_py()) // 1000
        return self._started_ms

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Pack one task's files: one block a key group."""
        assert isinstance(partition, Files)
        tables = [_bronze_rows(path) for path in partition.paths]
        yield from pack(pa.concat_tables(tables).combine_chunks(), self.key_groups, partition.started_ms)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to clean up: bronze is kept by its own retention."""


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


def _bronze_rows(path: str) -> pa.Table:
    names = [name.removesuffix("_ms") if name in ("received_at_ms", "event_time_ms") else name for name in ROW_SCHEMA.names]
    table = pq.ParquetFile(path).read(columns=[*names, "device_hash"], use_threads=False)
    columns = {}
    for name in ROW_SCHEMA.names:
        if name in ("received_at_ms", "event_time_ms"):
            micros = table[name.removesuffix("_ms")].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
            columns[name] = pc.divide(micros, 1000)  # whole milliseconds by construction
        else:
            columns[name] = table[name].cast(ROW_SCHEMA.field(name).type)
    return pa.table({**columns, "device_hash": table["device_hash"]})


def pack(rows: pa.Table, key_groups: int, started_ms: int) -> Iterator[pa.RecordBatch]:
    """Sort rows into key groups and yield one batch with a block for each group that has any.

    Args:
        rows: columns of `ROW_SCHEMA` and ``device_hash``.
        key_groups: how many groups there are.
        started_ms: ``received_at`` of the first row ever.
    """
    if rows.num_rows == 0:
        return
    place = np.asarray(rows["device_hash"].to_numpy()) % key_groups
    kinds = rows["kind"]
    shared = np.asarray(pc.is_in(kinds, pa.array([Kind.GAP.value, Kind.POLICY.value])))
    place[np.asarray(pc.equal(kinds, Kind.TICK.value))] = 0
    groups: list[int] = []
    newest: list[int] = []
    blocks: list[bytes] = []
    plain = rows.select(ROW_SCHEMA.names)
    received = plain["received_at_ms"].to_numpy()
    for group in range(key_groups):
        at = np.flatnonzero((place == group) | shared)
        if len(at):
            groups.append(group)
            newest.append(int(received[at].max()) * 1000)
            blocks.append(_ipc(plain.take(pa.array(at)).combine_chunks().to_batches()[0]))
    yield pa.record_batch(
        [
            pa.array(groups, pa.int32()),
            pa.array(newest, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            pa.array([started_ms] * len(groups), pa.int64()),
            pa.array(blocks, pa.binary()),
        ],
        schema=_BLOCK_SCHEMA,
    )


def _ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
