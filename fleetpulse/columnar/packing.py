"""Columns in the fewest bytes: numbers as distances from the least of them, and left out where there is but one.

Rule: what a column is read back from is written beside it, as JSON in the schema of an Arrow IPC stream.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.blocks import READING, WRITING
from fleetpulse.columnar.layout import Matrix
from fleetpulse.columnar.world import NONE, Int64s, Vocabulary

_WIDTHS: Final = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))


class Packed:
    """Columns on their way into an Arrow batch, and what is said of them once."""

    def __init__(self) -> None:
        self.columns: dict[str, pa.Array] = {}
        self.base: dict[str, int | None] = {}

    def number(self, name: str, values: Int64s) -> None:
        """Keep a column in the fewest bytes; only its value where there is but one."""
        some = values[values != NONE]
        nones = len(values) - len(some)
        self.measured(name, values, (int(some.min()), int(some.max()), nones) if len(some) else (0, 0, nones))

    def measured(self, name: str, values: Int64s, extent: Sequence[int]) -> None:
        """Keep a column whose least and greatest value, and number of values that are nothing, are known."""
        low, high, nones = extent
        self.base[name] = None if nones == len(values) else low
        if nones == len(values) or (low == high and not nones):
            return
        if nones:
            none = values == NONE
            self.columns[name] = pa.array(_narrow(np.where(none, low, values), low, high), mask=none)
        else:
            self.columns[name] = pa.array(_narrow(values, low, high))

    def lists(self, name: str, counts: Int64s, values: Matrix) -> None:
        """Keep the first of each row's values, as many as ``counts`` says."""
        flat = values[np.arange(values.shape[1]) < counts[:, None]]
        low, high = (int(flat.min()), int(flat.max())) if len(flat) else (0, 0)
        self.base[name] = low
        ends = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
        self.columns[name] = pa.ListArray.from_arrays(ends, pa.array(_narrow(flat, low, high)))

    def text(self, name: str, values: pa.StringArray) -> None:
        """Keep a column of text; where all of it is of one length, as ids mostly are, without saying where each begins."""
        _, offsets, letters = values.buffers()
        ends = np.frombuffer(offsets, np.int32)[values.offset :][: len(values) + 1] if len(values) else np.zeros(2, np.int32)
        width = int(ends[1] - ends[0])
        if values.null_count or width == 0 or (np.diff(ends) != width).any():
            self.columns[name] = values
        else:
            self.columns[name] = pa.Array.from_buffers(pa.binary(width), len(values), [None, letters.slice(int(ends[0]))])

    def words(self, name: str, numbers: Int64s, words: Vocabulary) -> list[Any]:
        """Keep a column of numbers of words, counted anew over those in use; return these words."""
        used = np.flatnonzero(np.bincount(numbers + 1, minlength=1)[1:]) if len(numbers) else []
        renumbered = np.full(len(words.words) + 1, -1, np.int64)
        renumbered[used] = np.arange(len(used))
        self.number(name, renumbered[numbers])
        return [words.words[one] for one in used]

    def to_bytes(self, metadata: Mapping[str, Any], options: pa.ipc.IpcWriteOptions = WRITING) -> bytes:
        """Return an Arrow IPC stream with one batch."""
        known = json.dumps({**metadata, "base": self.base}, separators=(",", ":"))
        batch = pa.RecordBatch.from_pydict(self.columns)
        schema = batch.schema.with_metadata({"fleetpulse": known})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema, options=options) as writer:
            if self.columns:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        return sink.getvalue().to_pybytes()


def _narrow(values: Int64s, low: int, high: int) -> NDArray[Any]:
    width = next(kind for bits, kind in _WIDTHS if (high - low).bit_length() <= bits)
    return (values - low).astype(width)


class Unpacked:
    """The inverse of `Packed`."""

    def __init__(self, source: pa.BufferReader) -> None:
        with pa.ipc.open_stream(source, options=READING) as reader:
            self.known: dict[str, Any] = json.loads((reader.schema.metadata or {})[b"fleetpulse"])
            self.columns = {name: column for batch in reader for name, column in zip(reader.schema.names, batch, strict=True)}

    def number(self, name: str, count: int) -> Int64s:
        """Return a column of numbers."""
        low = self.known["base"][name]
        column = self.columns.get(name)
        if low is None or column is None:
            return np.full(count, NONE if low is None else low, np.int64)
        if not column.null_count:
            return column.to_numpy().astype(np.int64) + low
        values = column.fill_null(0).to_numpy().astype(np.int64) + low
        values[column.is_null().to_numpy(zero_copy_only=False)] = NONE
        return values

    def text(self, name: str) -> pa.StringArray:
        """Return a column of text."""
        column = self.columns[name]
        if not pa.types.is_fixed_size_binary(column.type):
            return column
        ends = np.arange(column.offset, column.offset + len(column) + 1, dtype=np.int32) * column.type.byte_width
        return pa.StringArray.from_buffers(len(column), pa.py_buffer(ends), column.buffers()[1])

    def lists(self, name: str, into: Matrix) -> Int64s:
        """Set the first of each row's values; return how many that are."""
        column = self.columns[name]
        counts = np.diff(column.offsets.to_numpy()).astype(np.int64)
        into[np.arange(into.shape[1]) < counts[:, None]] = column.flatten().to_numpy().astype(np.int64) + self.known["base"][name]
        return counts
