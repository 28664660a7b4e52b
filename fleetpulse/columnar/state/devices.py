"""Devices of a key group as a matrix of numbers, with vocabularies for words.

Rule: each device equals a `core.device.Device`, field by field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.jit.context import MODES, NONE, Int64s, Vocabulary
from fleetpulse.columnar.jit.layout import (
    ABSENT,
    CLASS,
    CLOCK,
    CODES,
    CONFIRMED,
    DEVICE_FIELDS,
    FIRMWARE,
    GATEWAY,
    MEMORY,
    MEMORY_WIDTH,
    MODE,
    N_CODES,
    N_TIMES,
    PROGRESS,
    PROGRESS_OF,
    REVIEW,
    SITE,
    SPEAKS_FROM,
    SPOKE_FROM,
    TIMES,
    TRUSTS,
    VELOCITY_COUNT,
    VELOCITY_SINCE,
    Matrix,
)
from fleetpulse.columnar.jit.string_index import places_of, text_of
from fleetpulse.core.device import Device
from fleetpulse.core.policy import DEFAULT_CLASS

_OPTIONAL_WORDS: Final = (("gateway", GATEWAY), ("firmware", FIRMWARE), ("speaks_from", SPEAKS_FROM), ("spoke_from", SPOKE_FROM))
_WORDS: Final = ("site", "device_class", *(name for name, _ in _OPTIONAL_WORDS), "boot", "mode", "clock", "memory")
_PLAIN: Final = tuple((place, name) for place, name in enumerate(DEVICE_FIELDS) if name not in _WORDS)
REVIEWS: Final = {  # fields about the velocity rule and flags -> columns of the error memory
    "velocity_count": VELOCITY_COUNT, "velocity_since_ms": VELOCITY_SINCE, "review_ms": REVIEW, "confirmed_ms": CONFIRMED,
}  # fmt: skip
_NO_REVIEWS: Final = {name: 0 if name == "velocity_count" else None for name in REVIEWS}


def memory_rows(count: int) -> Matrix:
    """Return ``count`` empty rows of error memory."""
    rows = np.zeros((count, MEMORY_WIDTH), np.int64)
    rows[:, PROGRESS:PROGRESS_OF] = NONE
    rows[:, PROGRESS_OF] = -1
    rows[:, VELOCITY_SINCE:] = NONE
    return rows


@dataclass(slots=True)
class Devices:
    """Devices of a key group.

    Attributes:
        ids: string array of device ids.
        boots: string array with nulls: the newest boot of each device.
        rows: int64 matrix, device x `DEVICE_FIELDS`.
        memory: int64 matrix of error memory; the field ``memory`` of a device is its row in it, -1
            without.
        sites, classes, gateways, firmwares, codes, sequences: vocabularies of the numbered fields.
    """

    ids: pa.StringArray = field(default_factory=lambda: pa.array([], pa.string()))
    boots: pa.StringArray = field(default_factory=lambda: pa.array([], pa.string()))
    rows: Matrix = field(default_factory=lambda: np.empty((0, len(DEVICE_FIELDS)), np.int64))
    memory: Matrix = field(default_factory=lambda: memory_rows(0))
    sites: Vocabulary = field(default_factory=Vocabulary)
    classes: Vocabulary = field(default_factory=lambda: Vocabulary([DEFAULT_CLASS]))
    gateways: Vocabulary = field(default_factory=Vocabulary)
    firmwares: Vocabulary = field(default_factory=Vocabulary)
    codes: Vocabulary = field(default_factory=Vocabulary)
    sequences: Vocabulary = field(default_factory=Vocabulary)

    def __len__(self) -> int:
        return len(self.rows)

    def words_of(self, name: str) -> Vocabulary:
        """Return the vocabulary of a field, one of `deltas.WORDS`."""
        sites = ("site", "speaks_from", "spoke_from")
        known = {**dict.fromkeys(sites, self.sites), "device_class": self.classes, "gateway": self.gateways}
        return known.get(name, self.firmwares)

    def admit(self, ids: pa.StringArray) -> None:
        """Append new devices, which are absent until a row gives them a state."""
        if len(ids) == 0:
            return
        fresh = np.full((len(ids), len(DEVICE_FIELDS)), NONE, np.int64)
        fresh[:, MODE], fresh[:, MEMORY] = ABSENT, -1
        self.ids = pa.concat_arrays([self.ids, ids])
        self.boots = pa.concat_arrays([self.boots, pa.nulls(len(ids), pa.string())])
        self.rows = np.concatenate([self.rows, fresh])

    def locate(self, ids: pa.StringArray, chosen: NDArray[np.bool_]) -> Int64s:
        """Return the index of each chosen device, -1 for the others; add devices that are new."""
        texts = text_of(ids)
        places = places_of(texts, chosen, text_of(self.ids))
        unknown = chosen & (places < 0)
        if unknown.any():
            self.admit(pc.unique(ids.filter(pa.array(unknown))))
            places = np.where(unknown, places_of(texts, unknown, text_of(self.ids)), places)
        return places

    def set_boots(self, places: Int64s, boots: pa.StringArray) -> None:
        """Set the boots of the devices at ``places``."""
        chosen = np.arange(len(self))
        chosen[places] = len(self) + np.arange(len(places))
        self.boots = pa.concat_arrays([self.boots, boots]).take(pa.array(chosen))

    def remember(self, places: Int64s) -> None:
        """Add a row of error memory for each device at ``places`` that has none."""
        places = np.unique(places)
        places = places[self.rows[places, MEMORY] < 0]
        if len(places):
            self.rows[places, MEMORY] = np.arange(len(self.memory), len(self.memory) + len(places))
            self.memory = np.concatenate([self.memory, memory_rows(len(places))])

    def drop_absent(self) -> None:
        """Remove devices without state, and their error memory."""
        is_present = self.rows[:, MODE] != ABSENT
        if not is_present.all():
            where = pa.array(np.flatnonzero(is_present))
            self.ids, self.boots, self.rows = self.ids.take(where), self.boots.take(where), self.rows[is_present]
            remembering = self.rows[:, MEMORY] >= 0
            self.memory = self.memory[self.rows[remembering, MEMORY]]
            self.rows[remembering, MEMORY] = np.arange(len(self.memory))

    def by_mode(self) -> dict[str, int]:
        """Return the number of devices in each mode that occurs."""
        counts = np.bincount(self.rows[:, MODE], minlength=len(MODES)) if len(self) else []
        return {mode.value: int(count) for mode, count in zip(MODES, counts, strict=False) if count}

    # --- conversion of one device to and from `core.device.Device`

    def get(self, place: int) -> Device | None:
        """Return a device as a `core.device.Device`; None if it has no state."""
        row = self.rows[place]
        if row[MODE] == ABSENT:
            return None
        values: dict[str, Any] = {name: _instant(row[field]) for field, name in _PLAIN}
        values["seq"] = None if values["seq"] in (None, -1) else values["seq"]
        values |= {"device_id": self.ids[place].as_py(), "boot": self.boots[place].as_py()}
        values |= {"mode": MODES[row[MODE]], "clock": TRUSTS[row[CLOCK]]}
        values |= {"site": self.sites.words[row[SITE]], "device_class": self.classes.words[row[CLASS]]}
        values |= {name: self.words_of(name).words[row[at]] if row[at] >= 0 else None for name, at in _OPTIONAL_WORDS}
        return Device(**values, **self.remembered(place))

    def remembered(self, place: int) -> dict[str, Any]:
        """Return the error memory of a device, by fields of `core.device.Device`.

        Empty if the device has none.
        """
        slot = self.rows[place, MEMORY]
        if slot < 0:
            return {}
        known = self.memory[slot]
        times, codes = known[TIMES : TIMES + known[N_TIMES]], known[CODES : CODES + known[N_CODES]]
        fields: dict[str, Any] = {"error_times_ms": tuple(times.tolist()), "codes": tuple(self.codes.words[one] for one in codes)}
        if known[PROGRESS_OF] >= 0:
            steps = cast("tuple[str, ...]", self.sequences.words[known[PROGRESS_OF]])
            starts = known[PROGRESS : PROGRESS + len(steps) - 1].tolist()
            fields |= {"progress_of": steps, "progress": tuple(None if one == NONE else one for one in starts)}
        return fields | {name: None if known[at] == NONE else int(known[at]) for name, at in REVIEWS.items()}

    def put(self, place: int, device: Device | None) -> None:
        """Write a device from a `core.device.Device`, except its boot (see `set_boots`)."""
        row = self.rows[place]
        if device is None:
            row[MODE], row[MEMORY] = ABSENT, -1
            return
        for field_no, name in _PLAIN:
            value = getattr(device, name)
            row[field_no] = (-1 if name == "seq" else NONE) if value is None else value
        row[MODE], row[CLOCK] = MODES.index(device.mode), TRUSTS.index(device.clock)
        row[SITE] = self.sites.number(device.site)
        row[CLASS] = self.classes.number(device.device_class)
        for name, at in _OPTIONAL_WORDS:
            text = getattr(device, name)
            row[at] = -1 if text is None else self.words_of(name).number(text)
        reviews = {name: getattr(device, name) for name in REVIEWS}
        if device.error_times_ms or device.codes or device.progress or reviews != _NO_REVIEWS:
            self.remember(np.array([place]))
        if row[MEMORY] >= 0:
            self.put_remembered(place, device.error_times_ms, device.codes, device.progress, device.progress_of, **reviews)

    def put_remembered(
        self,
        place: int,
        error_times_ms: Sequence[int] = (),
        codes: Sequence[str] = (),
        progress: Sequence[int | None] = (),
        progress_of: Sequence[str] = (),
        **reviews: int | None,
    ) -> None:
        """Write the error memory of a device that has a row for it, see `remember`."""
        known = self.memory[self.rows[place, MEMORY]]
        known[:] = memory_rows(1)[0]
        known[TIMES : TIMES + len(error_times_ms)] = error_times_ms
        known[CODES : CODES + len(codes)] = [self.codes.number(code) for code in codes]
        known[N_TIMES], known[N_CODES] = len(error_times_ms), len(codes)
        if progress_of:
            known[PROGRESS_OF] = self.sequences.number(tuple(progress_of))
            starts = [NONE if start is None else start for start in progress]
            known[PROGRESS : PROGRESS + len(starts)] = starts
        for name, value in reviews.items():
            known[REVIEWS[name]] = NONE if value is None else value


def _instant(value: Any) -> int | None:
    return None if value == NONE else int(value)
