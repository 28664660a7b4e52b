"""Differences between two replays of one history: verdicts added, gone or moved.

Rule 1: a verdict is a transition. Two verdicts are equal if device, mode and event time are equal,
whatever their trigger. Equal verdicts of the two sides cancel out.
Rule 2: the remaining verdicts of one device and mode are ordered by event time. Two neighbours of
different sides are one moved verdict. Pairs are formed from the earliest verdict on, and a verdict is
in one pair only. A verdict without a partner is gone or added.
"""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import JUDGEMENT_SCHEMA
from fleetpulse.columnar.jit.context import Int64s
from fleetpulse.core.operations.backtests import ADDED, GONE, MOVED

DIFFERENCE_SCHEMA: Final = pa.schema(
    [
        ("change", pa.string()),  # added, gone, moved
        ("device_id", pa.string()),
        # the columns from site to trigger are those of the new verdict, or of the old one if gone
        ("site", pa.string()),
        ("device_class", pa.string()),
        ("from_mode", pa.string()),
        ("to_mode", pa.string()),
        ("trigger", pa.string()),
        ("before_ms", pa.int64()),  # event time under the policies in force; null if added
        ("after_ms", pa.int64()),  # event time under the new policy; null if gone
    ]
)
_SHARED: Final = [name for name in DIFFERENCE_SCHEMA.names if name in JUDGEMENT_SCHEMA.names]


def without_common_transitions(before: pa.RecordBatch, after: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the transitions of each side that the other side lacks.

    Args:
        before: transitions of one side, columns of `JUDGEMENT_SCHEMA`.
        after: transitions of the other side, judged up to the same frontier.
    """
    if not before.num_rows and not after.num_rows:
        return before, after
    keys, side = _keys(before, after)
    order = np.lexsort((side, *reversed(keys)))
    sorted_keys, side = [key[order] for key in keys], side[order]
    # occurrence number among the equal transitions of each side
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
    """Return the verdicts that were added, are gone or have moved.

    Args:
        before: transitions that only the old side has (see `without_common_transitions`), columns of
            `JUDGEMENT_SCHEMA`.
        after: transitions that only the new side has, columns of `JUDGEMENT_SCHEMA`.

    Returns:
        Columns of `DIFFERENCE_SCHEMA`, in order of time and device.
    """
    (device, mode, at_ms), side = _keys(before, after)
    order = np.lexsort((side, at_ms, mode, device))
    breaks = _differs([device[order], mode[order]])
    breaks[1:] |= side[order][1:] == side[order][:-1]
    nth = np.arange(len(order)) - np.maximum.accumulate(np.where(breaks, np.arange(len(order)), 0))
    first = np.flatnonzero((nth % 2 == 0)[:-1] & ~breaks[1:])  # every second row of a chain in which sides alternate
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
    """Return the sort keys and the side of each row of both sides.

    Returns:
        Number of the device, number of the mode and event time of each row; and its side (0 or 1).
    """

    def numbered(name: str) -> Int64s:
        return pa.concat_arrays([before[name], after[name]]).dictionary_encode().indices.to_numpy().astype(np.int64)

    at_ms = np.concatenate([batch["event_time_ms"].to_numpy() for batch in (before, after)])
    side = np.repeat(np.array([0, 1], np.int64), [before.num_rows, after.num_rows])
    return (numbered("device_id"), numbered("to_mode"), at_ms), side


def _differs(keys: list[Int64s]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the rows that differ from the row before; the first row is marked."""
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
