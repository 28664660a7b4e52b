"""Wire format of signals in the shuffle and in chunks of pending rows.

Columns are narrow and not compressed.

Rule: blocks are written and read two to four times within a batch and live no longer. Compression
would cost more than it saves. The changelog, which is durable, is compressed by the state store.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.codec.arrow import SIGNAL_SCHEMA
from fleetpulse.columnar.codec.packing import Packed, Unpacked, extent, narrow
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.jit.context import Int64s
from fleetpulse.columnar.jit.take import of_one_length

_PLAIN: Final = pa.ipc.IpcWriteOptions(use_threads=False)
_NARROW: Final = ((2**7, pa.int8()), (2**15, pa.int16()), (2**31, pa.int32()))
_LARGE_DICTIONARY: Final = 256


def to_wire(signals: pa.RecordBatch) -> bytes:
    """Serialize signals as one block.

    Args:
        signals: columns of `SIGNAL_SCHEMA`, at least one row.
    """
    return to_wires(signals, None, [0, signals.num_rows])[0]


def to_wires(signals: pa.RecordBatch, order: Int64s | None, edges: Sequence[int]) -> list[bytes]:
    """Serialize signals in parts.

    Columns are narrowed before they are reordered, which moves a third of the bytes.

    Args:
        signals: columns of `SIGNAL_SCHEMA`.
        order: indices of the signals to write, part after part; None writes all in their order.
        edges: start of each part in ``order``, and the end of the last; no part is empty.
    """
    places = None if order is None else pa.array(order)
    columns: dict[str, pa.Array] = {}
    base: dict[str, int | None] = {}
    for field in SIGNAL_SCHEMA:
        column = signals[field.name]
        if pa.types.is_integer(field.type):
            values = column.to_numpy()
            low, high = extent(values, order)
            base[field.name] = low
            if low != high:
                columns[field.name] = pa.array(narrow(values, low, high, order))
            continue
        if column.null_count == len(column):
            continue  # a column of nulls is left out
        if pa.types.is_dictionary(field.type):
            column = _indexed(column)
        elif pa.types.is_string(field.type) and (fixed := of_one_length(column)) is not None:
            column = fixed
        columns[field.name] = column if places is None else pc.take(column, places, boundscheck=False)
    return [_part(columns, base, start, end - start) for start, end in pairwise(edges)]


def _part(columns: dict[str, pa.Array], base: dict[str, int | None], start: int, rows: int) -> bytes:
    packed = Packed()
    packed.base = dict(base)
    for name, whole in columns.items():
        column = whole.slice(start, rows)
        if pa.types.is_string(column.type):
            packed.text(name, column)
        else:
            packed.columns[name] = _own_dictionary(column) if pa.types.is_dictionary(column.type) else column
    return packed.to_bytes({"count": rows}, _PLAIN)


def _indexed(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return a dictionary column with the narrowest index type."""
    width = next(kind for size, kind in _NARROW if len(column.dictionary) <= size)
    return pa.DictionaryArray.from_arrays(column.indices.cast(width), column.dictionary)


def _own_dictionary(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Reduce the dictionary of a part to the words in use, if the shared one is large."""
    if len(column.dictionary) <= min(_LARGE_DICTIONARY, len(column)):
        return column
    return _indexed(column.dictionary_decode().dictionary_encode())


def from_wire(written: bytes) -> pa.RecordBatch:
    """Deserialize signals that `to_wire` wrote, in this format version or version 1."""
    packed = Unpacked(pa.py_buffer(written))
    count = packed.known["count"]
    if "presence_ms" not in packed.known["base"]:
        _upgrade(packed)
    return pa.RecordBatch.from_arrays([_column(packed, field, count) for field in SIGNAL_SCHEMA], schema=SIGNAL_SCHEMA)


def _upgrade(packed: Unpacked) -> None:
    """Upgrade format version 1, which has no presence time, session or position."""
    packed.known["base"] |= {"presence_ms": packed.known["base"]["event_time_ms"], "offset_ms": 0, "trust": 0, "position": 0}
    if "event_time_ms" in packed.columns:
        packed.columns["presence_ms"] = packed.columns["event_time_ms"]


def _column(packed: Unpacked, field: pa.Field, count: int) -> pa.Array:
    if pa.types.is_integer(field.type):
        return pa.array(packed.number(field.name, count, np.dtype(field.type.to_pandas_dtype())))
    if field.name not in packed.columns:
        return pa.nulls(count, field.type)
    if pa.types.is_string(field.type):
        return packed.text(field.name)
    column: Any = packed.columns[field.name]
    if pa.types.is_dictionary(field.type):
        return pa.DictionaryArray.from_arrays(column.indices.cast(pa.int32()), column.dictionary)
    return column
