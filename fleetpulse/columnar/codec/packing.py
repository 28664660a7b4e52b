"""Frame-of-reference encoding of columns into Arrow IPC streams.

Numbers are stored as distances from their least value, in the fewest bytes. A column with only one
value is left out.

Rule: the base values that decoding needs are written as JSON into the schema of the same stream.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.arrow import READING, WRITING
from fleetpulse.columnar.jit.cache import jit_cached, jit_no_refcount
from fleetpulse.columnar.jit.context import NONE, Int64s, Vocabulary
from fleetpulse.columnar.jit.layout import Matrix
from fleetpulse.columnar.jit.take import as_text, of_one_length

_WIDTHS: Final = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))


class Packed:
    """Encoder of columns into one Arrow batch with metadata.

    Attributes:
        columns: encoded columns by name; a column with only one value is missing.
        base: base value of each number column; None if all values are `NONE`.
    """

    def __init__(self) -> None:
        self.columns: dict[str, pa.Array] = {}
        self.base: dict[str, int | None] = {}

    def number(self, name: str, values: Int64s) -> None:
        """Add a column of numbers."""
        some = values[values != NONE]
        nones = len(values) - len(some)
        self.measured(name, values, (int(some.min()), int(some.max()), nones) if len(some) else (0, 0, nones))

    def measured(self, name: str, values: Int64s, extent: Sequence[int]) -> None:
        """Add a column of numbers whose extent is known.

        Args:
            name: name of the column.
            values: the numbers.
            extent: least value, greatest value, and count of `NONE`.
        """
        low, high, nones = extent
        self.base[name] = None if nones == len(values) else low
        if nones == len(values) or (low == high and not nones):
            return
        narrowed, none = narrow(values, low, high), None
        if nones:
            none = values == NONE
            narrowed[none] = 0
        self.columns[name] = pa.array(narrowed, mask=none)

    def lists(self, name: str, counts: Int64s, flat: Int64s) -> None:
        """Add a column of lists: row by row, the next ``counts[row]`` values of ``flat``."""
        low, high = (int(flat.min()), int(flat.max())) if len(flat) else (0, 0)
        self.base[name] = low
        ends = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
        self.columns[name] = pa.ListArray.from_arrays(ends, pa.array(narrow(flat, low, high)))

    def text(self, name: str, values: pa.StringArray) -> None:
        """Add a column of text; without offsets if all texts have the same length."""
        fixed = of_one_length(values)
        self.columns[name] = values if fixed is None else fixed

    def words(self, name: str, numbers: Int64s, vocabulary: Vocabulary) -> list[Any]:
        """Add a column of indices into a vocabulary, renumbered over the words in use.

        Returns:
            The words in use, in the order of their new indices.
        """
        used, renumbered = in_use(numbers, len(vocabulary.words))
        extent = (int(renumbered.min()), len(used) - 1, 0) if len(numbers) else (0, 0, 0)
        self.measured(name, renumbered, extent)
        return [vocabulary.words[one] for one in used]

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


def in_use(numbers: Int64s, known: int) -> tuple[Int64s, Int64s]:
    """Map indices to 0 to n - 1 over the n values in use; -1 is unchanged.

    Args:
        numbers: indices from -1 to ``known`` - 1.
        known: size of the vocabulary.

    Returns:
        The indices that occur, ascending; and ``numbers`` as positions in that list.
    """
    seen = np.zeros(known + 1, bool)  # the last element is for -1
    seen[numbers] = True
    used = np.flatnonzero(seen[:known])
    new_numbers = np.full(known + 1, -1, np.int64)
    new_numbers[used] = np.arange(len(used))
    return used, new_numbers[numbers]


@jit_cached
def firsts(values: Matrix, rows: Int64s, column: int, counts: Int64s) -> Int64s:
    """Concatenate ``values[rows[k], column : column + counts[k]]`` over all k."""
    flat = np.empty(counts.sum(), np.int64)
    at = 0
    for k in range(len(rows)):
        for one in range(counts[k]):
            flat[at] = values[rows[k], column + one]
            at += 1
    return flat


@jit_cached
def set_firsts(values: Matrix, column: int, counts: Int64s, flat: Int64s) -> None:
    """Inverse of `firsts` for all rows: write ``flat`` into ``values``."""
    at = 0
    for k in range(len(values)):
        for one in range(counts[k]):
            values[k, column + one] = flat[at]
            at += 1


def narrow(values: Int64s, low: int, high: int, order: Int64s | None = None) -> NDArray[Any]:
    """Return numbers as distances from ``low``, in as few bytes as ``high`` allows.

    Args:
        values: numbers from ``low`` to ``high``.
        low: least value.
        high: greatest value.
        order: indices of the values to return; None returns all.
    """
    width = next(kind for bits, kind in _WIDTHS if (high - low).bit_length() <= bits)
    found = np.empty(len(values) if order is None else len(order), width)
    if order is None:
        return np.subtract(values, low, out=found, casting="unsafe")  # in one pass
    _distances(values, order, low, found)
    return found


def extent(values: Int64s, order: Int64s | None = None) -> tuple[int, int]:
    """Return the least and the greatest of at least one number.

    Args:
        values: the numbers.
        order: indices of the numbers to compare, without repetition; None compares all.
    """
    if order is None or len(order) == len(values):
        return int(values.min()), int(values.max())
    low, high = _extent(values, order)
    return low, high


@jit_no_refcount
def _extent(values: Int64s, order: Int64s) -> Any:
    low = high = values[order[0]]
    for k in range(len(order)):
        low, high = min(low, values[order[k]]), max(high, values[order[k]])
    return low, high


@jit_no_refcount
def _distances(values: Int64s, order: Int64s, low: int, found: NDArray[Any]) -> None:
    for k in range(len(order)):
        found[k] = values[order[k]] - low


class Unpacked:
    """Decoder of a stream that `Packed` wrote.

    Attributes:
        known: metadata, with the base values under ``base``.
        columns: encoded columns by name.
    """

    def __init__(self, source: pa.BufferReader) -> None:
        with pa.ipc.open_stream(source, options=READING) as reader:
            self.known: dict[str, Any] = json.loads((reader.schema.metadata or {})[b"fleetpulse"])
            self.columns = {name: column for batch in reader for name, column in zip(reader.schema.names, batch, strict=True)}

    def number(self, name: str, count: int, width: Any = np.int64) -> NDArray[Any]:
        """Return a column of numbers with dtype ``width``."""
        one, values = self.same(name), np.empty(count, width)
        if one is None:
            self.put(name, values)
        else:
            values[:] = one
        return values

    def same(self, name: str) -> int | None:
        """Return the value of a constant column of numbers; None if it was stored."""
        low = self.known["base"][name]
        if low is None:
            return NONE
        return None if name in self.columns else low

    def put(self, name: str, values: NDArray[Any]) -> None:
        """Decode a stored column of numbers into ``values``."""
        low, column = self.known["base"][name], self.columns[name]
        found = (column.fill_null(0) if column.null_count else column).to_numpy()
        np.add(found, low, out=values, dtype=np.int64, casting="unsafe")  # in one pass
        if column.null_count:
            values[column.is_null().to_numpy(zero_copy_only=False)] = NONE

    def text(self, name: str) -> pa.StringArray:
        """Return a column of text."""
        column = self.columns[name]
        return as_text(column) if pa.types.is_fixed_size_binary(column.type) else column

    def lists(self, name: str) -> tuple[Int64s, Int64s]:
        """Return the length of each row's list, and the concatenated items."""
        column = self.columns[name]
        counts = np.diff(column.offsets.to_numpy()).astype(np.int64)
        return counts, column.flatten().to_numpy().astype(np.int64) + self.known["base"][name]
