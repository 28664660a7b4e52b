"""Where two judgings of one history differ: verdicts added, gone and moved, by device.

Rule 1: a verdict is a transition; it is the same where device, mode and event time are, whatever led to it.
Rule 2: of what is left, a verdict is moved where the next or the last one into the same mode of the same device is the other
side's; each belongs to one pair, the earliest first. What has no partner is gone or added.
"""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import JUDGEMENT_SCHEMA
from fleetpulse.columnar.jit.world import Int64s

ADDED, GONE, MOVED = CHANGES = ("added", "gone", "moved")
DIFFERENCE_SCHEMA: Final = pa.schema(
    [
        ("change", pa.string()),  # added, gone, moved
        ("device_id", pa.string()),
        ("site", pa.string()),  # as the new verdict has it; of one that is gone, the old
        ("device_class", pa.string()),  # likewise, and so on
        ("from_mode", pa.string()),
        ("to_mode", pa.string()),
        ("trigger", pa.string()),
        ("before_ms", pa.int64()),  # event time under the policies in force; null where it was added
        ("after_ms", pa.int64()),  # event time under the new policy; null where it is gone
    ]
)
_SHARED: Final = [name for name in DIFFERENCE_SCHEMA.names if name in JUDGEMENT_SCHEMA.names]


def cancelled(before: pa.RecordBatch, after: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the transitions of each side that the other has not.

    Args:
        before: of the one side, columns of `JUDGEMENT_SCHEMA`.
        after: of the other; both judged up to the same frontier.
    """
    if not before.num_rows and not after.num_rows:
        return before, after
    keys, side = _keys(before, after)
    order = np.lexsort((side, *reversed(keys)))
    sorted_keys, side = [key[order] for key in keys], side[order]
    # the first, second ... of those that are alike in all, within each side
    fresh = _differs([*sorted_keys, side])
    nth = np.arange(len(order)) - np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0))
    again = np.lexsort((side, nth, *reversed(sorted_keys)))
    paired = ~_differs([*(key[again] for key in sorted_keys), nth[again]])
    paired[:-1] |= paired[1:]
    left = np.ones(len(order), bool)
    left[order[again[paired]]] = False
    edge = before.num_rows
    return before.filter(pa.array(left[:edge])), after.filter(pa.array(left[edge:]))


def differences(before: pa.RecordBatch, after: pa.RecordBatch) -> pa.RecordBatch:
    """Return what was added, is gone and has moved.

    Args:
        before: transitions that the other side has not (see `cancelled`), columns of `JUDGEMENT_SCHEMA`.
        after: likewise, of the other side.

    Returns:
        Columns of `DIFFERENCE_SCHEMA`, in order of time and device.
    """
    (device, mode, at_ms), side = _keys(before, after)
    order = np.lexsort((side, at_ms, mode, device))
    breaks = _differs([device[order], mode[order]])
    breaks[1:] |= side[order][1:] == side[order][:-1]
    nth = np.arange(len(order)) - np.maximum.accumulate(np.where(breaks, np.arange(len(order)), 0))
    first = np.flatnonzero((nth % 2 == 0)[:-1] & ~breaks[1:])  # of a chain in which the sides take turns, each second one
    one, two = order[first], order[first + 1]
    old, new = np.where(side[one] == 0, one, two), np.where(side[one] == 0, two, one) - before.num_rows
    lone_old = np.setdiff1d(np.arange(before.num_rows), old)
    lone_new = np.setdiff1d(np.arange(after.num_rows), new)
    parts = [
        _described(MOVED, after.take(pa.array(new)), before["event_time_ms"].take(pa.array(old)), None),
        _described(GONE, before.take(pa.array(lone_old)), before["event_time_ms"].take(pa.array(lone_old)), _nothing(lone_old)),
        _described(ADDED, after.take(pa.array(lone_new)), _nothing(lone_new), None),
    ]
    return in_order(pa.concat_batches(parts))


def in_order(changed: pa.RecordBatch) -> pa.RecordBatch:
    """Return differences in order of time, device and mode."""
    columns = {"at": pc.coalesce(changed["before_ms"], changed["after_ms"]), "id": changed["device_id"], "to": changed["to_mode"]}
    columns |= {"change": changed["change"], "after": changed["after_ms"]}
    return changed.take(pc.sort_indices(pa.table(columns), [(name, "ascending") for name in columns]))


def _keys(before: pa.RecordBatch, after: pa.RecordBatch) -> tuple[tuple[Int64s, Int64s, Int64s], Int64s]:
    """Number devices and modes over both sides; return device, mode and event time of each row, and its side (0, 1)."""

    def numbered(name: str) -> Int64s:
        return pa.concat_arrays([before[name], after[name]]).dictionary_encode().indices.to_numpy().astype(np.int64)

    at_ms = np.concatenate([batch["event_time_ms"].to_numpy() for batch in (before, after)])
    side = np.repeat(np.array([0, 1], np.int64), [before.num_rows, after.num_rows])
    return (numbered("device_id"), numbered("to_mode"), at_ms), side


def _differs(keys: list[Int64s]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rows are not like the row before them; the first is not."""
    fresh = np.ones(len(keys[0]), bool)
    if len(fresh):
        fresh[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return fresh


def _nothing(rows: Int64s) -> pa.Array:
    return pa.nulls(len(rows), pa.int64())


def _described(change: str, verdicts: pa.RecordBatch, before_ms: pa.Array, after_ms: pa.Array | None) -> pa.RecordBatch:
    columns = {name: verdicts[name] for name in _SHARED}
    columns |= {"change": pa.repeat(pa.scalar(change), verdicts.num_rows), "before_ms": before_ms}
    columns["after_ms"] = verdicts["event_time_ms"] if after_ms is None else after_ms
    return pa.RecordBatch.from_arrays([columns[name] for name in DIFFERENCE_SCHEMA.names], schema=DIFFERENCE_SCHEMA)
