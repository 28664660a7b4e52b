"""Slices of bronze by ``received_at``, for jobs that read the whole history once.

Rule 1: slices are made from the files of the newest version. Older versions may be gone from the
log, and their files may be compacted.
Rule 2: slices are ordered by ``received_at``: no row of a slice was received before a row of an
earlier slice.
Rule 3: memory holds only the files, or row groups of large files, that overlap one slice.
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
from fleetpulse.io.tables.adaptive_batching import BATCH_ROWS
from fleetpulse.io.tables.bronze import pack, read_bronze
from fleetpulse.io.tables.tables import files_of

_COLUMN: Final = "received_at"


@dataclass(frozen=True, slots=True)
class BronzePiece:
    """A file of bronze, or one row group of a large file.

    Attributes:
        path: path of the file.
        row_group: number of the row group; None for the whole file.
        rows: number of rows.
        first_ms: smallest ``received_at``, epoch milliseconds.
        last_ms: greatest ``received_at``, epoch milliseconds.
    """

    path: str
    row_group: int | None
    rows: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of bronze by ``received_at``.

    Attributes:
        number: index of the slice, from 0.
        pieces: pieces that overlap the slice.
        since_ms: first ``received_at`` of the slice, epoch milliseconds.
        until_ms: first ``received_at`` of the next slice, epoch milliseconds; None for the last.
    """

    number: int
    pieces: tuple[BronzePiece, ...]
    since_ms: int
    until_ms: int | None

    @property
    def newest_ms(self) -> int:
        """Return the ``received_at`` up to which all rows have been read after this slice."""
        last_ms = max(piece.last_ms for piece in self.pieces)
        return last_ms if self.until_ms is None else min(last_ms, self.until_ms - 1)


def pieces_of(home: Home, max_rows: int = BATCH_ROWS) -> list[BronzePiece]:
    """Return the pieces of bronze in order of their first ``received_at``.

    Args:
        home: home that holds the table.
        max_rows: largest number of rows of a file that stays one piece. A larger file is split by
            row group.
    """
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


def slices_of(pieces: Sequence[BronzePiece], max_rows: int = BATCH_ROWS) -> list[Slice]:
    """Divide pieces into slices of about ``max_rows`` rows.

    A slice ends between two pieces that do not overlap. If they overlap, it ends within a piece
    once it has twice as many rows.

    Args:
        pieces: pieces in order of their first ``received_at``.
        max_rows: target number of rows of a slice.
    """
    starts: list[int] = []
    rows, last_ms = 0, 0
    for piece in pieces:
        is_separate = piece.first_ms > last_ms
        if not starts or (piece.first_ms > starts[-1] and (rows >= max_rows if is_separate else rows >= 2 * max_rows)):
            starts.append(piece.first_ms)
            rows = 0
        rows, last_ms = rows + piece.rows, max(last_ms, piece.last_ms)
    ends = [*starts[1:], None]
    cut: list[Slice] = []
    for number, (since_ms, until_ms) in enumerate(zip(starts, ends, strict=True)):
        reaching = (piece for piece in pieces if piece.last_ms >= since_ms and (until_ms is None or piece.first_ms < until_ms))
        cut.append(Slice(number, tuple(reaching), since_ms, until_ms))
    return cut


def read_slice(selected: Slice) -> pa.Table:
    """Read the rows of a slice, with the columns of `read_bronze`."""
    tables: list[pa.Table] = []
    for piece in selected.pieces:
        table = read_bronze(piece.path, piece.row_group)
        if piece.first_ms < selected.since_ms or (selected.until_ms is not None and piece.last_ms >= selected.until_ms):
            table = table.filter(_inside(table[_COLUMN], selected))
        tables.append(table)
    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def _inside(received: pa.ChunkedArray, selected: Slice) -> pa.ChunkedArray:
    millis = pc.divide(received.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
    inside = pc.greater_equal(millis, selected.since_ms)
    return inside if selected.until_ms is None else pc.and_(inside, pc.less(millis, selected.until_ms))


def blocks_of(selected: Slice, key_groups: int, started_ms: int) -> pa.RecordBatch:
    """Read a slice and pack it into blocks by key group, see `bronze.pack`."""
    return pack(read_slice(selected), key_groups, started_ms)
