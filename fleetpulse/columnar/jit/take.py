"""Fast take and filter of record batches.

Text of one length, as device ids mostly are, is gathered as fixed-size binary. Arrow takes 13 ns a
row for it, and 28 to 46 ns for text of varying length.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.jit.cache import jit_cached


def of_one_length(values: pa.StringArray) -> pa.FixedSizeBinaryArray | None:
    """Return text as fixed-size binary; None unless all have one non-zero length."""
    if not len(values) or values.null_count:
        return None
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset :][: len(values) + 1]
    width = int(ends[1] - ends[0])
    if width == 0 or (np.diff(ends) != width).any():
        return None
    return pa.Array.from_buffers(pa.binary(width), len(values), [None, data.slice(int(ends[0]))])


def as_text(values: pa.FixedSizeBinaryArray) -> pa.StringArray:
    """Inverse of `of_one_length`."""
    ends = np.arange(values.offset, values.offset + len(values) + 1, dtype=np.int32) * values.type.byte_width
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(ends), values.buffers()[1])


def taken(batch: pa.RecordBatch, order: Any) -> pa.RecordBatch:
    """Return the rows at the indices in ``order``, without a bounds check."""
    places = pa.array(order)
    return _column_by_column(batch, lambda column: pc.take(column, places, boundscheck=False))


def filtered(batch: pa.RecordBatch, selected: Any) -> pa.RecordBatch:
    """Return the rows for which ``selected`` is true."""
    if selected.all():
        return batch
    mask = pa.array(selected)
    return _column_by_column(batch, lambda column: column.filter(mask))


@jit_cached
def partition_by_hash(hashes: NDArray[np.int64], groups: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Partition rows by hash into groups (a stable counting sort).

    Args:
        hashes: hash of each row.
        groups: number of groups.

    Returns:
        Row indices by group, in input order within each group; and the offset of each group, followed
        by the number of rows.
    """
    own = np.empty(len(hashes), np.int32)
    ends = np.zeros(groups + 1, np.int64)
    for row in range(len(hashes)):
        own[row] = hashes[row] % groups
        ends[own[row] + 1] += 1
    for group in range(groups):
        ends[group + 1] += ends[group]
    order = np.empty(len(hashes), np.int64)
    filled = ends[:-1].copy()
    for row in range(len(hashes)):
        order[filled[own[row]]] = row
        filled[own[row]] += 1
    return order, ends


def _column_by_column(batch: pa.RecordBatch, choose: Callable[[Any], Any]) -> pa.RecordBatch:
    columns: list[pa.Array] = []
    for column in batch.columns:
        fixed = of_one_length(column) if pa.types.is_string(column.type) else None
        columns.append(choose(column) if fixed is None else as_text(choose(fixed)))
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
