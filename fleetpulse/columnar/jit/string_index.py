"""Hash index over Arrow strings, compiled, for device ids and boots.

Rule 1: text is compared in Arrow's buffers, eight bytes at a time; no Python objects are created.
Rule 2: indices are given in the order in which ids were first met, never by hash value. Each
process has a random hash seed, so ids that collide in one process do not collide in the next. Ids
chosen to collide make a search slower, but never wrong.
"""

import secrets
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.columnar.jit.context import Int64s

_SEED: Final = np.uint64(secrets.randbits(64))
_FIRST, _SECOND, _SHORT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(29)  # odd, without pattern
_BYTE: Final = np.uint64(8)
NOTHING, KNOWN, OTHER = -1, 0, 1  # boot of a message: none, equal to its device's, another


class Text(NamedTuple):
    """String array in the form that compiled functions take.

    Attributes:
        ends: offset of each text in ``letters``, and the end of the last.
        letters: concatenated texts in UTF-8.
        present: mask of the texts that are not null.
    """

    ends: NDArray[np.int32]
    letters: NDArray[np.uint8]
    present: NDArray[np.bool_]


def text_of(values: pa.StringArray) -> Text:
    """Return a string array in the form that compiled functions take, without a copy."""
    _, ends, data = values.buffers()
    present = np.ones(len(values), bool) if not values.null_count else np.array(values.is_valid())
    places = np.frombuffer(ends, np.int32)[values.offset :][: len(values) + 1] if len(values) else np.zeros(1, np.int32)
    found = Text(places, np.frombuffer(b"" if data is None else data, np.uint8), present)
    for array in found:
        array.flags.writeable = False  # numba compiles writable and read-only arrays separately; Arrow has both
    return found


def _load(_context: Any, data: Any, at: Any) -> Any:
    """Return the eight bytes at an index as one number, without a bounds check."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, values[0])
        place = context.cast(builder, values[1], signature.args[1], types.intp)
        found = builder.bitcast(builder.gep(array.data, [place]), context.get_value_type(types.uint64).as_pointer())
        return builder.load(found, align=1)

    return types.uint64(data, at), generate


_eight: Any = intrinsic(_load)


@jit_no_refcount
def _hashed(data: NDArray[np.uint8], start: int, end: int, seed: np.uint64) -> np.uint64:
    mixed, at = seed ^ np.uint64(end - start), start
    while at + 8 <= end:
        mixed = (mixed ^ _eight(data, at)) * _FIRST
        mixed ^= mixed >> _SHORT
        at += 8
    if at < end:
        left = np.uint64(0)
        if end - start >= 8:
            left = _eight(data, end - 8)
        else:
            for one in range(at, end):
                left = left << _BYTE | np.uint64(data[one])
        mixed = (mixed ^ left) * _SECOND
    return (mixed ^ mixed >> _SHORT) * _FIRST >> _SHORT


@jit_no_refcount
def _same(
    left: NDArray[np.uint8], left_start: int, left_end: int, right: NDArray[np.uint8], right_start: int, right_end: int
) -> bool:
    size, at = left_end - left_start, 0
    if size != right_end - right_start:
        return False
    while at + 8 <= size:
        if _eight(left, left_start + at) != _eight(right, right_start + at):
            return False
        at += 8
    if size >= 8:
        return at == size or _eight(left, left_end - 8) == _eight(right, right_end - 8)
    while at < size and left[left_start + at] == right[right_start + at]:
        at += 1
    return at == size


def places_of(texts: Text, chosen: NDArray[np.bool_], known: Text) -> Int64s:
    """Return the index of each chosen text among known texts.

    Args:
        texts: texts to find.
        chosen: mask of the texts to find.
        known: distinct texts.

    Returns:
        Index of each text; -1 if it is unknown or not chosen.
    """
    places = np.full(len(chosen), -1, np.int64)
    table = np.full(1 << max(4, (2 * len(known.present)).bit_length()), -1, np.int32)  # at most half full
    _find(texts, chosen, known, _SEED, table, places)
    return places


@jit_no_refcount
def _find(texts: Text, chosen: NDArray[np.bool_], known: Text, seed: np.uint64, table: NDArray[np.int32], places: Int64s) -> None:
    last = np.uint64(len(table) - 1)
    for one in range(len(known.present)):
        slot = np.int64(_hashed(known.letters, known.ends[one], known.ends[one + 1], seed) & last)
        while table[slot] >= 0:
            slot = (slot + 1) & np.int64(last)
        table[slot] = one
    for row in range(len(chosen)):
        if not chosen[row]:
            continue
        start, end = texts.ends[row], texts.ends[row + 1]
        slot = np.int64(_hashed(texts.letters, start, end, seed) & last)
        while table[slot] >= 0:
            one = table[slot]
            if _same(known.letters, known.ends[one], known.ends[one + 1], texts.letters, start, end):
                places[row] = one
                break
            slot = (slot + 1) & np.int64(last)


@jit_no_refcount
def compare(text: Text, places: Int64s, known: Text, found: Int64s) -> None:
    """Compare each text with the known text at its index.

    Args:
        text: texts of the rows.
        places: index of each row's known text; rows with -1 are skipped.
        known: known texts.
        found: output: `NOTHING` if the text is null, `KNOWN` if it is equal, else `OTHER`.
    """
    for row in range(len(places)):
        place = places[row]
        if place < 0:
            continue
        start, end = text.ends[row], text.ends[row + 1]
        if not text.present[row]:
            found[row] = NOTHING
        elif known.present[place] and _same(known.letters, known.ends[place], known.ends[place + 1], text.letters, start, end):
            found[row] = KNOWN
        else:
            found[row] = OTHER
