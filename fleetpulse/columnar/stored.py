"""The stored form of a key group's devices: as little as tells them apart.

Rule 1: it is versioned, and whoever reads state reads it through here.
Rule 2: a column is kept as its distance from what it usually equals, in the fewest bytes that hold it, and left out where
all devices share one value. A fleet that is well needs little more than names, last seen and counters.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.blocks import READING, WRITING
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
    Matrix,
)
from fleetpulse.columnar.usual import NUMBERS, distances, restore
from fleetpulse.columnar.world import NONE, Int64s, Vocabulary
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import MAX_ERRORS, MAX_SEQUENCE

STORED_VERSION: Final = 2
_WIDTHS: Final = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))
_WORDS: Final = {"site": SITE, "device_class": CLASS, "gateway": GATEWAY}
assert {*NUMBERS, *_WORDS, "boot", "memory"} == set(DEVICE_FIELDS), "every field is stored"


class _Packed:
    """Columns on their way into an Arrow batch, and what is said of them once."""

    def __init__(self) -> None:
        self.columns: dict[str, pa.Array] = {}
        self.base: dict[str, int | None] = {}

    def number(self, name: str, values: Int64s) -> None:
        """Keep a column in the fewest bytes; only its value where there is but one."""
        some = values[values != NONE]
        nones = len(values) - len(some)
        self.measured(name, values, (int(some.min()), int(some.max()), nones) if len(some) else (0, 0, nones))

    def measured(self, name: str, values: Int64s, extent: Sequence[int]) -> None:
        """Keep a column whose least and greatest value, and number of values that are nothing, are known."""
        low, high, nones = extent
        self.base[name] = None if nones == len(values) else low
        if nones == len(values) or (low == high and not nones):
            return
        if nones:
            none = values == NONE
            self.columns[name] = pa.array(_narrow(np.where(none, low, values), low, high), mask=none)
        else:
            self.columns[name] = pa.array(_narrow(values, low, high))

    def lists(self, name: str, counts: Int64s, values: Matrix) -> None:
        """Keep the first of each row's values, as many as ``counts`` says."""
        flat = values[np.arange(values.shape[1]) < counts[:, None]]
        low, high = (int(flat.min()), int(flat.max())) if len(flat) else (0, 0)
        self.base[name] = low
        ends = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
        self.columns[name] = pa.ListArray.from_arrays(ends, pa.array(_narrow(flat, low, high)))

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


def _narrow(values: Int64s, low: int, high: int) -> NDArray[Any]:
    width = next(kind for bits, kind in _WIDTHS if (high - low).bit_length() <= bits)
    return (values - low).astype(width)


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

    def lists(self, name: str, into: Matrix) -> Int64s:
        """Set the first of each row's values; return how many that are."""
        column = self.columns[name]
        counts = np.diff(column.offsets.to_numpy()).astype(np.int64)
        into[np.arange(into.shape[1]) < counts[:, None]] = column.flatten().to_numpy().astype(np.int64) + self.known["base"][name]
        return counts


def to_stored(devices: Devices, metadata: Mapping[str, Any]) -> bytes:
    """Return the stored form of devices, with ``metadata`` (JSON) beside them."""
    packed, known = _Packed(), {**metadata, "version": STORED_VERSION, "count": len(devices)}
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
    packed = _Packed()
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
        found = np.empty((len(NUMBERS), count), np.int64)
        for number, name in enumerate(NUMBERS):
            found[number] = packed.number(name, count)
        restore(found, rows)
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
