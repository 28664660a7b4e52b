"""Delta encoding of device fields against a predicted value.

Rule: the prediction of a field depends only on fields before it in `NUMBERS`, or on fields that are
stored as they are. So fields can be restored in order.
"""

from typing import Final

import numpy as np

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.columnar.jit.context import NONE, Int64s
from fleetpulse.columnar.jit.layout import (
    BOOT,
    CLASS_SINCE,
    DEATH,
    DEATH_COVERED,
    DEVICE_FIELDS,
    HEARD,
    LAST_SEEN,
    LIFE,
    MEMORY,
    MODE_SINCE,
    OUTAGE,
    OUTAGE_COVERED,
    PROVED,
    QUIET_COVERED,
    QUIET_SINCE,
    RUNTIME,
    Matrix,
)

NUMBERS: Final = ("life_ms", "last_seen_ms", "quiet_since_ms", "quiet_covered_ms", "mode", "transition_no", "mode_since_ms",
                  "class_since_ms", "seq", "reboots", "runtime_ms", "degraded_until_ms", "flagged_until_ms", "held_until_ms",
                  "death_ms", "death_covered_ms", "outage_ms", "outage_covered_ms", "excused_ms", "session", "heard_arrival",
                  "proved_arrival", "clock", "clock_offset_ms", "timeout_ms", "death_grace_ms", "moved_ms",
                  "conflict_ms")  # fmt: skip
WORDS: Final = ("site", "device_class", "gateway", "firmware", "speaks_from", "spoke_from")  # stored as numbers
FIELDS: Final = (*NUMBERS, *WORDS)
_PLACES: Final = np.array([DEVICE_FIELDS.index(name) for name in FIELDS])
_DERIVED: Final = (QUIET_SINCE, QUIET_COVERED, MODE_SINCE, CLASS_SINCE, RUNTIME, DEATH_COVERED, OUTAGE_COVERED, PROVED)
_AS_THEY_ARE: Final = np.array([number for number, place in enumerate(_PLACES) if place not in _DERIVED])
_MEASURED: Final = np.array([number for number, place in enumerate(_PLACES) if place in _DERIVED])
LOW, HIGH, NONES = range(3)


@jit_no_refcount
def _predicted(field: int, row: Int64s) -> int:
    """Return the predicted value of a field."""
    if field == QUIET_SINCE:
        return row[LIFE] if row[LAST_SEEN] == NONE else row[LAST_SEEN]
    if field == QUIET_COVERED:
        return row[QUIET_SINCE]
    if field in (MODE_SINCE, CLASS_SINCE):
        return row[LIFE]
    if field == RUNTIME:
        return row[QUIET_SINCE] - row[LIFE]
    if field == DEATH_COVERED:
        return 0 if row[DEATH] == NONE else row[DEATH]
    if field == OUTAGE_COVERED:
        return 0 if row[OUTAGE] == NONE else row[OUTAGE]
    if field == PROVED:
        return 0 if row[HEARD] == NONE else row[HEARD]
    return 0


def distances(devices: Matrix) -> tuple[Matrix, Matrix]:
    """Return the difference of each field from its predicted value.

    Args:
        devices: device x `layout.DEVICE_FIELDS`, at least one.

    Returns:
        Differences, `FIELDS` x device, `NONE` if the field is null; and extents, `FIELDS` x (`LOW`,
        `HIGH`, `NONES`): least difference, greatest difference, and number of nulls.
    """
    found = np.empty((len(_PLACES), len(devices)), np.int64)
    extent = np.empty((len(_PLACES), 3), np.int64)
    extent[:, LOW], extent[:, HIGH], extent[:, NONES] = 2**62, -(2**62), 0
    _measure(devices, found, extent)
    return found, extent


@jit_no_refcount
def _measure(devices: Matrix, found: Matrix, extent: Matrix) -> None:
    for i in range(len(devices)):
        for number in range(len(_PLACES)):
            field = _PLACES[number]
            value = devices[i, field]
            if value == NONE:
                extent[number, NONES] += 1
            else:
                value -= _predicted(field, devices[i])
                extent[number, LOW] = min(extent[number, LOW], value)
                extent[number, HIGH] = max(extent[number, HIGH], value)
            found[number, i] = value


@jit_no_refcount
def restore(found: Matrix, differs: Int64s, devices: Matrix) -> None:
    """Restore ``devices`` from differences, without boots and error memory.

    Args:
        found: differences, as returned by `distances`.
        differs: 1 for each field in which devices differ; 0 if the first value holds for all.
        devices: output, device x `layout.DEVICE_FIELDS`.
    """
    for i in range(len(devices)):
        for number in _AS_THEY_ARE:
            devices[i, _PLACES[number]] = found[number, i * differs[number]]
        for number in _MEASURED:
            field, value = _PLACES[number], found[number, i * differs[number]]
            devices[i, field] = NONE if value == NONE else value + _predicted(field, devices[i])
        devices[i, BOOT] = devices[i, MEMORY] = -1
