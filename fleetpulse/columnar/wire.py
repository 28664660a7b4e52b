"""Signals on their way to a key group, and while they wait in it: narrow columns, not compressed.

Rule: they are written and read twice or four times within a batch, and live no longer; compressing costs more than
carrying. What lasts, the changelog, is compressed by the state store.
"""

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute

from fleetpulse.columnar.blocks import SIGNAL_SCHEMA, from_bytes
from fleetpulse.columnar.packing import Packed, Unpacked

pc: Any = pyarrow.compute  # its functions are made at run time: no checker knows them
_PLAIN: Final = pa.ipc.IpcWriteOptions(use_threads=False)
_NARROW: Final = ((2**7, pa.int8()), (2**15, pa.int16()), (2**31, pa.int32()))


def to_wire(signals: pa.RecordBatch) -> bytes:
    """Write signals.

    Args:
        signals: columns of `SIGNAL_SCHEMA`, at least one row.
    """
    packed = Packed()
    for field in SIGNAL_SCHEMA:
        column = signals[field.name]
        if pa.types.is_integer(field.type):
            values = column.to_numpy()
            packed.measured(field.name, values, (int(values.min()), int(values.max()), 0))
        elif pa.types.is_dictionary(field.type):
            width = next(kind for size, kind in _NARROW if len(column.dictionary) <= size)
            packed.columns[field.name] = pa.DictionaryArray.from_arrays(column.indices.cast(width), column.dictionary)
        elif pa.types.is_string(field.type):
            packed.text(field.name, column)
        else:
            packed.columns[field.name] = column
    return packed.to_bytes({"count": signals.num_rows}, _PLAIN)


def from_wire(written: bytes) -> pa.RecordBatch:
    """Read what `to_wire` wrote, or what waited before there was a `to_wire`: whole columns, and a digest with each."""
    try:
        packed = Unpacked(pa.py_buffer(written))
    except KeyError:
        return _as_it_was(from_bytes(written))
    count = packed.known["count"]
    return pa.RecordBatch.from_arrays([_column(packed, field, count) for field in SIGNAL_SCHEMA], schema=SIGNAL_SCHEMA)


def _as_it_was(signals: pa.RecordBatch) -> pa.RecordBatch:
    numbered = pc.greater_equal(signals["seq"], 0)
    return signals.set_column(signals.schema.get_field_index("digest"), "digest", pc.if_else(numbered, 0, signals["digest"]))


def _column(packed: Unpacked, field: pa.Field, count: int) -> pa.Array:
    if pa.types.is_integer(field.type):
        return pa.array(packed.number(field.name, count)).cast(field.type)
    if pa.types.is_string(field.type):
        return packed.text(field.name)
    column: Any = packed.columns[field.name]
    if pa.types.is_dictionary(field.type):
        return pa.DictionaryArray.from_arrays(column.indices.cast(pa.int32()), column.dictionary)
    return column
