"""What a device's field usually equals, and how far it is from it: what the stored form keeps.

Rule: a field is measured from fields that come before it in `NUMBERS`, so that what is read back can be restored in order.
"""

from typing import Final

import numpy as np

from fleetpulse.columnar.jit.cache import jit_no_refcount
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
from fleetpulse.columnar.jit.world import NONE, Int64s

NUMBERS: Final = ("life_ms", "last_seen_ms", "quiet_since_ms", "quiet_covered_ms", "mode", "transition_no", "mode_since_ms",
                  "class_since_ms", "seq", "reboots", "runtime_ms", "degraded_until_ms", "flagged_until_ms", "held_until_ms",
                  "death_ms", "death_covered_ms", "outage_ms", "outage_covered_ms", "excused_ms", "session", "heard_arrival",
                  "proved_arrival", "clock", "clock_offset_ms", "timeout_ms", "death_grace_ms", "moved_ms",
                  "conflict_ms")  # fmt: skip
WORDS: Final = ("site", "device_class", "gateway", "firmware", "speaks_from", "spoke_from")  # by number
FIELDS: Final = (*NUMBERS, *WORDS)
_PLACES: Final = np.array([DEVICE_FIELDS.index(name) for name in FIELDS])
_DERIVED: Final = (QUIET_SINCE, QUIET_COVERED, MODE_SINCE, CLASS_SINCE, RUNTIME, DEATH_COVERED, OUTAGE_COVERED, PROVED)
_AS_THEY_ARE: Final = np.array([number for number, place in enumerate(_PLACES) if place not in _DERIVED])
_MEASURED: Final = np.array([number for number, place in enumerate(_PLACES) if place in _DERIVED])
LOW, HIGH, NONES = range(3)


@jit_no_refcount
def _usual(field: int, row: Int64s) -> int:
    """Return what a field usually equals."""
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
    """Return how far each field is from what it usually equals.

    Args:
        devices: device x `layout.DEVICE_FIELDS`, at least one.

    Returns:
        `FIELDS` x device, `NONE` where the field is nothing; and `FIELDS` x (`LOW`, `HIGH`, `NONES`): the least, the
        greatest, and how many are nothing.
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
                value -= _usual(field, devices[i])
                extent[number, LOW] = min(extent[number, LOW], value)
                extent[number, HIGH] = max(extent[number, HIGH], value)
            found[number, i] = value


@jit_no_refcount
def restore(found: Matrix, differs: Int64s, devices: Matrix) -> None:
    """Set ``devices``, without boots and memory.

    Args:
        found: what `distances` returned.
        differs: of each field whether devices differ in it; 0 where they do not: the first value is that of all.
        devices: device x `layout.DEVICE_FIELDS`.
    """
    for i in range(len(devices)):
        for number in _AS_THEY_ARE:
            devices[i, _PLACES[number]] = found[number, i * differs[number]]
        for number in _MEASURED:
            field, value = _PLACES[number], found[number, i * differs[number]]
            devices[i, field] = NONE if value == NONE else value + _usual(field, devices[i])
        devices[i, BOOT] = devices[i, MEMORY] = -1
