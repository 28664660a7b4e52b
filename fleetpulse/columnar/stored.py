"""The stored form of a key group's devices: as little as tells them apart.

Rule 1: it is versioned, and whoever reads state reads it through here.
Rule 2: a column is kept as its distance from what it usually equals, in the fewest bytes that hold it, and left out where
all devices share one value. A fleet that is well needs little more than names, last seen and counters.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.devices import Devices, memory_rows
from fleetpulse.columnar.layout import (
    CLASS,
    CODES,
    DEVICE_FIELDS,
    GATEWAY,
    MEMORY,
    N_CODES,
    N_TIMES,
    PROGRESS,
    PROGRESS_OF,
    SITE,
    TIMES,
)
from fleetpulse.columnar.packing import Packed, Unpacked
from fleetpulse.columnar.usual import NUMBERS, distances, restore
from fleetpulse.columnar.world import NONE, Vocabulary
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import MAX_ERRORS, MAX_SEQUENCE

STORED_VERSION: Final = 3
_READ: Final = (2, STORED_VERSION)
_SINCE: Final = {"gateway_died": 3}  # fields that younger forms have; they are 0 in those before
_WORDS: Final = {"site": SITE, "device_class": CLASS, "gateway": GATEWAY}
assert {*NUMBERS, *_WORDS, "boot", "memory"} == set(DEVICE_FIELDS), "every field is stored"


def to_stored(devices: Devices, metadata: Mapping[str, Any]) -> bytes:
    """Return the stored form of devices, with ``metadata`` (JSON) beside them."""
    packed, known = Packed(), {**metadata, "version": STORED_VERSION, "count": len(devices)}
    if len(devices):
        packed.columns["device_id"] = devices.ids
    if devices.boots.null_count < len(devices.boots):
        packed.columns["boot"] = devices.boots
    found, extents = distances(devices.rows)
    for name, values, extent in zip(NUMBERS, found, extents.tolist(), strict=True):
        packed.measured(name, values, extent)
    vocabularies = {"site": devices.sites, "device_class": devices.classes, "gateway": devices.gateways}
    for name, place in _WORDS.items():
        known[name] = packed.words(name, devices.rows[:, place], vocabularies[name])
    return packed.to_bytes(known) + _memory_to_stored(devices)


def _memory_to_stored(devices: Devices) -> bytes:
    slots = devices.rows[:, MEMORY]
    places = np.flatnonzero(slots >= 0)
    kept = devices.memory[slots[places]]
    told = (kept[:, N_TIMES] > 0) | (kept[:, N_CODES] > 0) | (kept[:, PROGRESS_OF] >= 0)
    places, kept = places[told], kept[told]
    packed = Packed()
    known: dict[str, Any] = {"count": len(places), "codes": [], "sequences": []}
    if not len(places):
        return packed.to_bytes(known)
    packed.number("device", places)
    times, codes = kept[:, N_TIMES], kept[:, N_CODES]
    newest = np.where(times > 0, kept[np.arange(len(kept)), TIMES + np.maximum(times - 1, 0)], NONE)
    packed.number("newest_ms", newest)
    packed.lists("times", times, newest[:, None] - kept[:, TIMES : TIMES + MAX_ERRORS])
    used = np.unique(kept[:, CODES : CODES + MAX_ERRORS][np.arange(MAX_ERRORS) < codes[:, None]])
    known["codes"] = [devices.codes.words[one] for one in used]
    packed.lists("codes", codes, np.searchsorted(used, kept[:, CODES : CODES + MAX_ERRORS]))
    known["sequences"] = packed.words("progress_of", kept[:, PROGRESS_OF], devices.sequences)
    starts = kept[:, PROGRESS : PROGRESS + MAX_SEQUENCE]
    begun = starts[starts != NONE]
    since_ms = known["since_ms"] = int(begun.min()) - 1 if len(begun) else 0  # 0 stands for nothing
    packed.lists("progress", np.where(kept[:, PROGRESS_OF] >= 0, MAX_SEQUENCE, 0), np.where(starts == NONE, 0, starts - since_ms))
    return packed.to_bytes(known)


def from_stored(stored: bytes) -> tuple[Devices, dict[str, Any]]:
    """Return devices and metadata of a stored form.

    Raises:
        FleetError: it was written by a version that this one does not know.
    """
    source = pa.BufferReader(stored)
    packed = Unpacked(source)
    version, count = packed.known.get("version"), packed.known.get("count", 0)
    if version not in _READ:
        raise FleetError(
            f"state of stored form {version} cannot be read by this version, which reads {' and '.join(map(str, _READ))}; "
            f"run the fleetpulse that wrote it, or begin with an empty home"
        )
    devices = Devices()
    if count:
        devices.ids = packed.columns["device_id"]
        devices.boots = packed.columns.get("boot", pa.nulls(count, pa.string()))
        devices.rows = rows = np.full((count, len(DEVICE_FIELDS)), -1, np.int64)
        found = np.empty((len(NUMBERS), count), np.int64)
        for number, name in enumerate(NUMBERS):
            found[number] = packed.number(name, count) if version >= _SINCE.get(name, 0) else 0
        restore(found, rows)
        for name, place in _WORDS.items():
            rows[:, place] = packed.number(name, count)
    devices.sites, devices.gateways = Vocabulary(packed.known["site"]), Vocabulary(packed.known["gateway"])
    _first_class(devices, packed.known["device_class"])
    _memory_from_stored(devices, Unpacked(source))
    return devices, packed.known


def _first_class(devices: Devices, words: list[str]) -> None:
    """Number the classes so that the default class is 0, whether a device is of it or not."""
    numbers = np.array([devices.classes.number(word) for word in words] or [0], np.int64)
    if len(devices):
        devices.rows[:, CLASS] = numbers[devices.rows[:, CLASS]]


def _memory_from_stored(devices: Devices, packed: Unpacked) -> None:
    count = packed.known["count"]
    if not count:
        return
    devices.codes = Vocabulary(packed.known["codes"])
    devices.sequences = Vocabulary([tuple(words) for words in packed.known["sequences"]])
    memory = memory_rows(count)
    memory[:, N_TIMES] = packed.lists("times", memory[:, TIMES : TIMES + MAX_ERRORS])
    memory[:, N_CODES] = packed.lists("codes", memory[:, CODES : CODES + MAX_ERRORS])
    remembered = np.arange(MAX_ERRORS) < memory[:, N_TIMES, None]
    times = memory[:, TIMES : TIMES + MAX_ERRORS]
    times[remembered] = (packed.number("newest_ms", count)[:, None] - times)[remembered]
    memory[:, PROGRESS_OF] = packed.number("progress_of", count)
    starts = memory[:, PROGRESS : PROGRESS + MAX_SEQUENCE]
    begun = np.arange(MAX_SEQUENCE) < packed.lists("progress", starts)[:, None]
    starts[begun] = np.where(starts[begun] == 0, NONE, starts[begun] + packed.known["since_ms"])
    devices.memory = memory
    devices.rows[packed.number("device", count), MEMORY] = np.arange(count)
