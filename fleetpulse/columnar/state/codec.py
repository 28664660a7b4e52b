"""Stored form of a key group's devices: a compact, versioned encoding.

Rule 1: the stored form has a format version, and all reads of state go through this module. An
older version is upgraded step by step, one version at a time. A generation is written in its own
format version until the state is migrated.
Rule 2: a column is stored as its difference from a predicted value (see `deltas`), in the fewest
bytes. It is left out if all devices share one value. A healthy fleet needs little more than ids,
last seen and counters.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.codec.packing import Packed, Unpacked, firsts, in_use, set_firsts
from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.columnar.jit.context import MODES, NONE, Int64s, Vocabulary
from fleetpulse.columnar.jit.layout import (
    CLASS,
    CODES,
    CONFIRMED,
    DEATH,
    DEATH_COVERED,
    DEVICE_FIELDS,
    MEMORY,
    MODE,
    N_CODES,
    N_TIMES,
    OUTAGE,
    OUTAGE_COVERED,
    PROGRESS,
    PROGRESS_OF,
    REVIEW,
    SPEAKS_FROM,
    SPOKE_FROM,
    TIMES,
    VELOCITY_COUNT,
    Matrix,
)
from fleetpulse.columnar.state.deltas import FIELDS, NUMBERS, WORDS, distances, restore
from fleetpulse.columnar.state.devices import REVIEWS, Devices, memory_rows
from fleetpulse.core.errors import FleetError
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.policy import MAX_SEQUENCE

assert {*FIELDS, "boot", "memory"} == set(DEVICE_FIELDS), "every field is stored"


def to_stored(devices: Devices, metadata: Mapping[str, Any], form: int = STORED_FORM) -> bytes:
    """Return the stored form of devices, with ``metadata`` as JSON in its header.

    Args:
        devices: devices of the key group.
        metadata: other state of the key group, see `KeyGroup.to_bytes`.
        form: format version, one of `versions.WRITTEN_FORMS`.
    """
    packed, known = Packed(), {**metadata, "version": form, "count": len(devices)}
    if len(devices):
        packed.text("device_id", devices.ids)
    if devices.boots.null_count < len(devices.boots):
        packed.columns["boot"] = devices.boots
    found, extents = distances(devices.rows)
    numbers = dict(zip(FIELDS, zip(found, extents.tolist(), strict=True), strict=True))
    for name in NUMBERS:
        packed.measured(name, *numbers[name])
    for name in WORDS:
        known[name] = packed.words(name, numbers[name][0], devices.words_of(name))
    if form < _WITH_OUTAGES:
        packed.base[_GATEWAY_DIED] = 0
    return packed.to_bytes(known) + _memory_to_stored(devices)


def _memory_to_stored(devices: Devices) -> bytes:
    slots, memory = devices.rows[:, MEMORY], devices.memory
    places = np.flatnonzero(slots >= 0)
    slots = slots[places]
    is_used = (memory[slots, N_TIMES] > 0) | (memory[slots, N_CODES] > 0) | (memory[slots, PROGRESS_OF] >= 0)
    reviewed = (memory[slots, VELOCITY_COUNT] > 0) | (memory[slots, REVIEW] != NONE) | (memory[slots, CONFIRMED] != NONE)
    is_used |= reviewed
    places, slots = places[is_used], slots[is_used]
    packed = Packed()
    known: dict[str, Any] = {"count": len(places), "codes": [], "sequences": []}
    if not len(places):
        return packed.to_bytes(known)
    packed.number("device", places)
    times, codes, progress_of = (memory[slots, column] for column in (N_TIMES, N_CODES, PROGRESS_OF))
    newest = np.where(times > 0, memory[slots, TIMES + np.maximum(times - 1, 0)], NONE)
    packed.number("newest_ms", newest)
    packed.lists("times", times, np.repeat(newest, times) - firsts(memory, slots, TIMES, times))
    numbers = firsts(memory, slots, CODES, codes)
    used, renumbered = in_use(numbers, len(devices.codes.words))
    known["codes"] = [devices.codes.words[one] for one in used]
    packed.lists("codes", codes, renumbered)
    known["sequences"] = packed.words("progress_of", progress_of, devices.sequences)
    steps = np.where(progress_of >= 0, MAX_SEQUENCE, 0)
    starts = firsts(memory, slots, PROGRESS, steps)
    started = starts[starts != NONE]
    since_ms = known["since_ms"] = int(started.min()) - 1 if len(started) else 0  # offsets start at 1; 0 is null
    packed.lists("progress", steps, np.where(starts == NONE, 0, starts - since_ms))
    if reviewed.any():
        for name, column in REVIEWS.items():
            packed.number(name, memory[slots, column])
    return packed.to_bytes(known)


def _without_presence(packed: Unpacked) -> None:
    """Upgrade format version 4 to 5: add the fields about presence, with defaults.

    These are session, clock, arrival order, outages, limits of devices, firmware and other sites. A
    stored form of version 4 already has them if a release that supports version 5 wrote it.
    """
    if "outage_ms" in packed.known["base"]:
        packed.known["base"].pop(_GATEWAY_DIED, None)
    packed.known["base"] = {**_UNKNOWN_BEFORE, **packed.known["base"]}
    packed.known |= {name: packed.known.get(name, []) for name in WORDS}


def _without_reviews(packed: Unpacked) -> None:
    """Upgrade format version 5 to 6: nothing to do, since columns about velocity rules are absent without values."""


def _gateway_deaths(rows: Matrix, died: Int64s) -> None:
    """Turn gateway deaths, stored as wills of the devices in version 4, into outages.

    An offline device remains offline.
    """
    has_died, is_connected = died != 0, rows[:, MODE] != MODES.index(Mode.OFFLINE)
    rows[has_died & is_connected, OUTAGE], rows[has_died & is_connected, OUTAGE_COVERED] = (
        rows[has_died & is_connected, DEATH],
        rows[has_died & is_connected, DEATH_COVERED],
    )
    rows[has_died, DEATH] = rows[has_died, DEATH_COVERED] = NONE


_WITH_OUTAGES: Final = 5  # first format version with `outage_ms`
_GATEWAY_DIED: Final = "gateway_died"  # column of version 4: whether the will is that of the device's gateway
_UNKNOWN_BEFORE: Final = {
    **dict.fromkeys(("session", "heard_arrival", "proved_arrival", "clock_offset_ms", "outage_ms", "outage_covered_ms")),
    **dict.fromkeys(("timeout_ms", "death_grace_ms", "moved_ms", "conflict_ms")),
    **dict.fromkeys(("clock", "excused_ms"), 0),
    **dict.fromkeys(("firmware", "speaks_from", "spoke_from"), -1),
}
UPGRADES: Final = {4: _without_presence, 5: _without_reviews}  # upgrade step by source version


def from_stored(stored: bytes) -> tuple[Devices, dict[str, Any]]:
    """Return devices and metadata of a stored form.

    Raises:
        FleetError: the format version is unknown.
    """
    source = pa.BufferReader(stored)
    packed = Unpacked(source)
    form, count = packed.known.get("version"), packed.known.get("count", 0)
    if form != STORED_FORM and form not in UPGRADES:
        raise FleetError(
            f"cannot read state of format version {form}: this release reads {min(UPGRADES)} to {STORED_FORM}; "
            f"run the release that wrote the state, or create a new home",
            code="state-version-unsupported",
        )
    for step in range(form, STORED_FORM):
        UPGRADES[step](packed)
    devices = Devices()
    if count:
        devices.ids = packed.text("device_id")
        devices.boots = packed.columns.get("boot", pa.nulls(count, pa.string()))
        found = np.empty((len(FIELDS), count), np.int64)
        constants = [packed.same(name) for name in FIELDS]
        for number, (name, one) in enumerate(zip(FIELDS, constants, strict=True)):
            if one is None:
                packed.put(name, found[number])
            else:
                found[number, 0] = one
        devices.rows = np.empty((count, len(DEVICE_FIELDS)), np.int64)
        restore(found, np.array([one is None for one in constants], np.int64), devices.rows)
        if _GATEWAY_DIED in packed.known["base"]:
            _gateway_deaths(devices.rows, packed.number(_GATEWAY_DIED, count))
    devices.sites, devices.gateways = Vocabulary(packed.known["site"]), Vocabulary(packed.known["gateway"])
    devices.firmwares = Vocabulary(packed.known["firmware"])
    _renumber(devices, CLASS, devices.classes, packed.known["device_class"])
    for name, field in (("speaks_from", SPEAKS_FROM), ("spoke_from", SPOKE_FROM)):
        _renumber(devices, field, devices.sites, packed.known[name])
    _memory_from_stored(devices, Unpacked(source))
    return devices, packed.known


def _renumber(devices: Devices, field: int, known: Vocabulary, names: list[str]) -> None:
    """Renumber the words of a field by another vocabulary, extending it; -1 stays."""
    numbers = np.array([*map(known.number, names), -1], np.int64)
    if len(devices) and names:
        devices.rows[:, field] = numbers[devices.rows[:, field]]


def _memory_from_stored(devices: Devices, packed: Unpacked) -> None:
    count = packed.known["count"]
    if not count:
        return
    devices.codes = Vocabulary(packed.known["codes"])
    devices.sequences = Vocabulary([tuple(sequence) for sequence in packed.known["sequences"]])
    memory = memory_rows(count)
    memory[:, N_TIMES], times = packed.lists("times")
    newest = packed.number("newest_ms", count)
    set_firsts(memory, TIMES, memory[:, N_TIMES], np.repeat(newest, memory[:, N_TIMES]) - times)
    memory[:, N_CODES], codes = packed.lists("codes")
    set_firsts(memory, CODES, memory[:, N_CODES], codes)
    memory[:, PROGRESS_OF] = packed.number("progress_of", count)
    steps, starts = packed.lists("progress")
    set_firsts(memory, PROGRESS, steps, np.where(starts == 0, NONE, starts + packed.known["since_ms"]))
    for name, column in REVIEWS.items():
        if name in packed.known["base"]:
            memory[:, column] = packed.number(name, count)
    devices.memory = memory
    devices.rows[packed.number("device", count), MEMORY] = np.arange(count)
