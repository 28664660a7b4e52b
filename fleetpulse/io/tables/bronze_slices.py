"""Bronze as it lies now, cut by ``received_at``: for jobs that read a history once, from its first row to its last.

Rule 1: what counts is which files the newest version has; the log's older versions may be gone, and files put together.
Rule 2: slices follow each other in ``received_at``: no row of a slice was received before one of the slice before it.
Rule 3: of a slice no more is in memory than the files, or row groups of large files, that reach into it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from fleetpulse.columnar.compute import pc
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.delta.corruption import reporting_corruption_of_file
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.adaptive_batching import MAX_ROWS
from fleetpulse.io.tables.bronze import pack, read_bronze
from fleetpulse.io.tables.tables import files_of

_COLUMN: Final = "received_at"


@dataclass(frozen=True, slots=True)
class BronzePiece:
    """A file of bronze, or one row group of a large one. Instants are epoch milliseconds.

    Attributes:
        path: of the file.
        row_group: its number; None is the whole file.
        rows: how many.
        first_ms: the least ``received_at``.
        last_ms: the greatest.
    """

    path: str
    row_group: int | None
    rows: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of bronze.

    Attributes:
        number: its place, from 0.
        pieces: that reach into it.
        since_ms: the first instant of it.
        until_ms: the first instant of the next one; None in the last.
    """

    number: int
    pieces: tuple[BronzePiece, ...]
    since_ms: int
    until_ms: int | None

    @property
    def newest_ms(self) -> int:
        """Return up to where every row has been read when the slice has, by ``received_at``."""
        last_ms = max(piece.last_ms for piece in self.pieces)
        return last_ms if self.until_ms is None else min(last_ms, self.until_ms - 1)


def pieces_of(home: Home, max_rows: int = MAX_ROWS) -> list[BronzePiece]:
    """Return what bronze consists of, in order of the first ``received_at``; files of more rows by row group."""
    found: list[BronzePiece] = []
    for file in files_of(home, MESSAGES, _COLUMN):
        if file.rows == 0:
            continue
        if file.rows is None or file.least is None or file.greatest is None or file.rows > max_rows:
            found += _row_groups(str(file.path))
        else:
            found.append(BronzePiece(str(file.path), None, file.rows, _millis(file.least), _millis(file.greatest)))
    return sorted(found, key=lambda piece: (piece.first_ms, piece.last_ms, piece.path))


def _row_groups(path: str) -> Iterator[BronzePiece]:
    with reporting_corruption_of_file(Path(path)):
        file = pq.ParquetFile(path)
    for number in range(file.num_row_groups):
        with reporting_corruption_of_file(Path(path)):
            received = file.read_row_group(number, columns=[_COLUMN])[_COLUMN]
        if len(received):
            least, greatest = pc.min_max(received).as_py().values()
            yield BronzePiece(path, number, len(received), _millis(least), _millis(greatest))


def _millis(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def slices_of(pieces: Sequence[BronzePiece], max_rows: int = MAX_ROWS) -> list[Slice]:
    """Cut pieces into slices of about ``max_rows``: between two pieces where that can be had, else within some.

    Args:
        pieces: in order of the first ``received_at``.
        max_rows: what a slice aims at.
    """
    starts: list[int] = []
    rows, last_ms = 0, 0
    for piece in pieces:
        apart = piece.first_ms > last_ms
        if not starts or (piece.first_ms > starts[-1] and (rows >= max_rows if apart else rows >= 2 * max_rows)):
            starts.append(piece.first_ms)
            rows = 0
        rows, last_ms = rows + piece.rows, max(last_ms, piece.last_ms)
    ends = [*starts[1:], None]
    cut: list[Slice] = []
    for number, (since_ms, until_ms) in enumerate(zip(starts, ends, strict=True)):
        reaching = (piece for piece in pieces if piece.last_ms >= since_ms and (until_ms is None or piece.first_ms < until_ms))
        cut.append(Slice(number, tuple(reaching), since_ms, until_ms))
    return cut


def read_slice(wanted: Slice) -> pa.Table:
    """Return a slice's rows, as `read_bronze` returns a file's."""
    tables: list[pa.Table] = []
    for piece in wanted.pieces:
        table = read_bronze(piece.path, piece.row_group)
        if piece.first_ms < wanted.since_ms or (wanted.until_ms is not None and piece.last_ms >= wanted.until_ms):
            table = table.filter(_inside(table[_COLUMN], wanted))
        tables.append(table)
    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def _inside(received: pa.ChunkedArray, wanted: Slice) -> pa.ChunkedArray:
    millis = pc.divide(received.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
    inside = pc.greater_equal(millis, wanted.since_ms)
    return inside if wanted.until_ms is None else pc.and_(inside, pc.less(millis, wanted.until_ms))


def blocks_of(wanted: Slice, key_groups: int, started_ms: int) -> pa.RecordBatch:
    """Return a slice packed into blocks, see `bronze.pack`: one a key group that has rows in it."""
    return pack(read_slice(wanted), key_groups, started_ms)
