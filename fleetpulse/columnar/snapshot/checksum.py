"""Fingerprints of snapshot rows, to compare two sets of rows without joining them.

Rule 1: each row has a 64-bit hash over all columns but the key group, since the key group is only
the location of the row. A null and an empty text differ.
Rule 2: hashes are summed by part as unbounded integers. The sum does not depend on the order of
rows, on batches or on key groups.
Rule 3: columns are cast to `SNAPSHOT_SCHEMA` before hashing, whatever the source of the rows.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.jit.cache import jit_cached
from fleetpulse.columnar.snapshot.rows import COMPARED_PARTS, SNAPSHOT_SCHEMA

UInt64s = NDArray[np.uint64]
Fingerprint = Mapping[str, tuple[int, int]]
_HASHED_FIELDS: Final = tuple(field for field in SNAPSHOT_SCHEMA if field.name != "key_group")
_PARTS: Final = pa.array(COMPARED_PARTS, pa.string())
_HALF: Final = 32


@jit_cached
def _mixed(bits: np.uint64) -> np.uint64:
    """Mix 64 bits: each output bit depends on all input bits (splitmix64, bijective)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@jit_cached
def _mix_numbers(hashes: UInt64s, values: UInt64s, valid: NDArray[np.bool_]) -> None:
    """Mix a column of numbers into the hashes of the rows."""
    for i in range(len(hashes)):
        if valid[i]:
            hashes[i] = _mixed(_mixed(hashes[i] + np.uint64(1)) ^ values[i])
        else:
            hashes[i] = _mixed(hashes[i])


@jit_cached
def _mix_texts(hashes: UInt64s, ends: NDArray[np.int32], data: NDArray[np.uint8], valid: NDArray[np.bool_]) -> None:
    """Mix a column of text into the hashes of the rows, eight bytes at a time.

    The length of each text is mixed in last.
    """
    for i in range(len(hashes)):
        if not valid[i]:
            hashes[i] = _mixed(hashes[i])
            continue
        mixed, word, shift = _mixed(hashes[i] + np.uint64(1)), np.uint64(0), np.uint64(0)
        for at in range(ends[i], ends[i + 1]):
            word |= np.uint64(data[at]) << shift
            shift += np.uint64(8)
            if shift == np.uint64(64):
                mixed, word, shift = _mixed(mixed ^ word), np.uint64(0), np.uint64(0)
        mixed = _mixed(mixed ^ word)
        hashes[i] = _mixed(mixed ^ np.uint64(ends[i + 1] - ends[i]))


def row_hashes(rows: pa.RecordBatch) -> UInt64s:
    """Return a 64-bit hash of each row.

    Args:
        rows: columns of `SNAPSHOT_SCHEMA`.
    """
    if not rows.num_rows:  # columns of an empty batch may lack buffers
        return np.zeros(0, np.uint64)
    hashes = np.zeros(rows.num_rows, np.uint64)
    for field in _HASHED_FIELDS:
        column = rows[field.name].cast(field.type)
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_string(field.type):
            column = pa.concat_arrays([column]) if column.offset else column
            _, ends, data = column.buffers()
            known = np.frombuffer(data if data is not None and data.size else b"\0", np.uint8)
            _mix_texts(hashes, np.frombuffer(ends, np.int32), known, valid)
        else:
            values = column.cast(pa.int64()).fill_null(0).to_numpy()
            _mix_numbers(hashes, values.view(np.uint64), valid)
    return hashes


def fingerprint(rows: pa.RecordBatch) -> Fingerprint:
    """Return number of rows and sum of hashes for each part in `COMPARED_PARTS`."""
    parts = pc.fill_null(pc.index_in(rows["part"], value_set=_PARTS), -1).to_numpy()
    hashes, found = row_hashes(rows), dict[str, tuple[int, int]]()
    for number, part in enumerate(COMPARED_PARTS):
        part_hashes = hashes[parts == number]
        if len(part_hashes):
            high, low = int((part_hashes >> np.uint64(_HALF)).sum()), int((part_hashes & np.uint64(2**_HALF - 1)).sum())
            found[part] = len(part_hashes), (high << _HALF) + low
    return found


def added(some: Iterable[Fingerprint]) -> Fingerprint:
    """Return the sum of fingerprints, which is the fingerprint of all rows."""
    found: dict[str, tuple[int, int]] = {}
    for one in some:
        for part, (count, hashes) in one.items():
            before = found.get(part, (0, 0))
            found[part] = before[0] + count, before[1] + hashes
    return found
