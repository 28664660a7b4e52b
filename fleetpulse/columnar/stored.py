"""The stored form of a key group's devices: as little as tells them apart.

Rule 1: it is versioned, and whoever reads state reads it through here.
Rule 2: a column is kept as its distance from what it usually equals, in the fewest bytes that hold it, and left out where
all devices share one value. A fleet that is well needs little more than names, last seen and counters.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.blocks import READING, WRITING
from fleetpulse.columnar.devices import Devices, memory_rows
from fleetpulse.columnar.kernel import (
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
from fleetpulse.columnar.world import NONE, Int64s, Vocabulary
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import MAX_SEQUENCE

STORED_VERSION: Final = 2
_WIDTHS: Final = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))
_PLACE: Final[Mapping[str, int]] = {name: place for place, name in enumerate(DEVICE_FIELDS)}
_WORDS: Final = {"site": SITE, "device_class": CLASS, "gateway": GATEWAY}
# In this order they are read: what a column is measured from comes before it.
_NUMBERS: Final = ("life_ms", "last_seen_ms", "quiet_since_ms", "quiet_covered_ms", "mode", "transition_no", "mode_since_ms",
                   "class_since_ms", "seq", "reboots", "runtime_ms", "degraded_until_ms", "flagged_until_ms", "held_until_ms",
                   "death_ms", "death_covered_ms")  # fmt: skip
assert {*_NUMBERS, *_WORDS, "boot", "memory"} == set(DEVICE_FIELDS), "every field is stored"


def _usual(name: str, rows: Int64s) -> Int64s | int:
    """Return what a column usually equals."""

    def column(other: str) -> Int64s:
        return rows[:, _PLACE[other]]

    match name:
        case "quiet_since_ms":
            return np.where(column("last_seen_ms") == NONE, column("life_ms"), column("last_seen_ms"))
        case "quiet_covered_ms":
            return column("quiet_since_ms")
        case "mode_since_ms" | "class_since_ms":
            return column("life_ms")
        case "runtime_ms":
            return column("quiet_since_ms") - column("life_ms")
        case "death_covered_ms":
            return np.where(column("death_ms") == NONE, 0, column("death_ms"))
        case _:
            return 0


class _Packed:
    """Columns on their way into an Arrow batch, and what is said of them once."""

    def __init__(self) -> None:
        self.columns: dict[str, pa.Array] = {}
        self.base: dict[str, int | None] = {}

    def number(self, name: str, values: Int64s) -> None:
        """Keep a column in the fewest bytes; only its value where there is but one."""
        none = values == NONE
        some = values[~none] if none.any() else values
        if not len(some):
            self.base[name] = None
            return
        low, high = int(some.min()), int(some.max())
        self.base[name] = low
        if low == high and len(some) == len(values):
            return
        width = next(kind for bits, kind in _WIDTHS if (high - low).bit_length() <= bits)
        narrow = (np.where(none, low, values) - low if len(some) < len(values) else values - low).astype(width)
        self.columns[name] = pa.array(narrow, mask=none if len(some) < len(values) else None)

    def words(self, name: str, numbers: Int64s, words: Vocabulary) -> list[Any]:
        """Keep a column of numbers of words, counted anew over those in use; return these words."""
        used = np.flatnonzero(np.bincount(numbers + 1, minlength=1)[1:]) if len(numbers) else []
        renumbered = np.full(len(words.words) + 1, -1, np.int64)
        renumbered[used] = np.arange(len(used))
        self.number(name, renumbered[numbers])
        return [words.words[one] for one in used]

    def to_bytes(self, metadata: Mapping[str, Any]) -> bytes:
        """Return an Arrow IPC stream with one batch."""
        known = json.dumps({**metadata, "base": self.base}, separators=(",", ":"))
        batch = pa.RecordBatch.from_pydict(self.columns)
        schema = batch.schema.with_metadata({"fleetpulse": known})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema, options=WRITING) as writer:
            if self.columns:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        return sink.getvalue().to_pybytes()


class _Unpacked:
    """The inverse of `_Packed`."""

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


def to_stored(devices: Devices, metadata: Mapping[str, Any]) -> bytes:
    """Return the stored form of devices, with ``metadata`` (JSON) beside them."""
    packed, known = _Packed(), {**metadata, "version": STORED_VERSION, "count": len(devices)}
    if len(devices):
        packed.columns["device_id"] = devices.ids
    if devices.boots.null_count < len(devices.boots):
        packed.columns["boot"] = devices.boots
    for name in _NUMBERS:
        values = devices.rows[:, _PLACE[name]]
        packed.number(name, np.where(values == NONE, NONE, values - _usual(name, devices.rows)))
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
    packed, known = _Packed(), {"count": len(places), "codes": [], "sequences": []}
    if not len(places):
        return packed.to_bytes(known)
    packed.number("device", places)
    counts = {"times": kept[:, N_TIMES], "codes": kept[:, N_CODES]}
    for name, values in counts.items():
        packed.number(name, values)
    newest = kept[np.arange(len(kept)), TIMES + np.maximum(counts["times"] - 1, 0)]
    packed.number("newest_ms", newest)
    for one in range(counts["times"].max()):
        packed.number(f"time_{one}", np.where(one < counts["times"], newest - kept[:, TIMES + one], 0))
    widest = int(counts["codes"].max())
    numbers = np.where(np.arange(widest) < counts["codes"][:, None], kept[:, CODES : CODES + widest], -1)
    used = np.unique(numbers[numbers >= 0])
    known["codes"] = [devices.codes.words[one] for one in used]
    for one in range(widest):
        packed.number(f"code_{one}", np.where(numbers[:, one] < 0, 0, np.searchsorted(used, numbers[:, one])))
    known["sequences"] = packed.words("progress_of", kept[:, PROGRESS_OF], devices.sequences)
    for one in range(MAX_SEQUENCE):
        packed.number(f"progress_{one}", np.where(kept[:, PROGRESS_OF] >= 0, kept[:, PROGRESS + one], NONE))
    return packed.to_bytes(known)


def from_stored(stored: bytes) -> tuple[Devices, dict[str, Any]]:
    """Return devices and metadata of a stored form.

    Raises:
        FleetError: it was written by a version that this one does not know.
    """
    source = pa.BufferReader(stored)
    packed = _Unpacked(source)
    version, count = packed.known.get("version"), packed.known.get("count", 0)
    if version != STORED_VERSION:
        raise FleetError(
            f"state of stored form {version} cannot be read by this version, which reads {STORED_VERSION}; "
            f"run the fleetpulse that wrote it, or begin with an empty home"
        )
    devices = Devices()
    if count:
        devices.ids = packed.columns["device_id"]
        devices.boots = packed.columns.get("boot", pa.nulls(count, pa.string()))
        devices.rows = rows = np.full((count, len(DEVICE_FIELDS)), -1, np.int64)
        for name in _NUMBERS:
            values = packed.number(name, count)
            rows[:, _PLACE[name]] = np.where(values == NONE, NONE, values + _usual(name, rows))
        for name, place in _WORDS.items():
            rows[:, place] = packed.number(name, count)
    devices.sites, devices.gateways = Vocabulary(packed.known["site"]), Vocabulary(packed.known["gateway"])
    _first_class(devices, packed.known["device_class"])
    _memory_from_stored(devices, _Unpacked(source))
    return devices, packed.known


def _first_class(devices: Devices, words: list[str]) -> None:
    """Number the classes so that the default class is 0, whether a device is of it or not."""
    numbers = np.array([devices.classes.number(word) for word in words] or [0], np.int64)
    if len(devices):
        devices.rows[:, CLASS] = numbers[devices.rows[:, CLASS]]


def _memory_from_stored(devices: Devices, packed: _Unpacked) -> None:
    count = packed.known["count"]
    if not count:
        return
    devices.codes = Vocabulary(packed.known["codes"])
    devices.sequences = Vocabulary([tuple(words) for words in packed.known["sequences"]])
    memory = memory_rows(count)
    memory[:, N_TIMES], memory[:, N_CODES] = packed.number("times", count), packed.number("codes", count)
    newest = packed.number("newest_ms", count)
    for one in range(memory[:, N_TIMES].max()):
        memory[:, TIMES + one] = newest - packed.number(f"time_{one}", count)
    for one in range(memory[:, N_CODES].max()):
        memory[:, CODES + one] = packed.number(f"code_{one}", count)
    memory[:, PROGRESS_OF] = packed.number("progress_of", count)
    for one in range(MAX_SEQUENCE):
        memory[:, PROGRESS + one] = packed.number(f"progress_{one}", count)
    devices.memory = memory
    devices.rows[packed.number("device", count), MEMORY] = np.arange(count)
