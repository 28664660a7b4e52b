"""Sessions of the devices of a key group, folded over blocks of signals.

Rule 1: `core.streams.sessions` has every rule about sessions. Heartbeats, telemetry and errors that continue an
open session without changing its names are counted as columns. The rows of all other devices become objects, and
the definition is applied to them.
Rule 2: the state has the open sessions and the coverage, so it is bounded by the number of devices.
Rule 3: the coverage is that of all rows read, so it is equal in all key groups after a batch. The states of all key
groups can therefore be joined, and split again into any number of key groups.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.arrow import KINDS, READING, WRITING, batch_to_signals
from fleetpulse.columnar.codec.context_json import context_from_plain, context_to_plain
from fleetpulse.columnar.codec.hashing import hashes_of
from fleetpulse.columnar.compute import pc
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.rows import SIGNALS, Kind, Row
from fleetpulse.core.streams.sessions import (
    EndedBy,
    Session,
    StartedBy,
    after,
    arrival_order,
    settled_after_ms,
    with_gap,
)

FORM: Final = 1  # format version of the state; a recording of each is in tests/golden
_TEXTS: Final = ("device_id", "site", "gateway", "session", "boot", "firmware", "started_by", "ended_by")
CHANGE_SCHEMA: Final = pa.schema(  # rows to write: the fields of `Session`
    [(field.name, pa.string() if field.name in _TEXTS else pa.int64()) for field in fields(Session)]
)
OPEN_SCHEMA: Final = pa.schema([field for field in CHANGE_SCHEMA if not field.name.startswith("ended_")])
_FILLED: Final = ("gateway", "session", "boot", "firmware")  # names that a later signal adds to a session
_COUNTED: Final = np.isin(range(len(KINDS)), [KINDS.index(kind) for kind in SIGNALS - {Kind.BIRTH}])
_NEVER: Final = -(2**62)
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class SessionGroup:
    """Open sessions of a key group, and the coverage.

    Args:
        open_sessions: open sessions, columns of `OPEN_SCHEMA`, at most one for each device.
        shards: coverage and frontiers, see `core.streams.sessions.with_gap`.
    """

    def __init__(self, open_sessions: pa.RecordBatch, shards: Shards) -> None:
        self.open, self.shards = open_sessions, shards

    @classmethod
    def begin(cls, started_ms: int) -> "SessionGroup":
        """Return the state before the first row, with coverage from ``started_ms``, epoch milliseconds."""
        return cls(pa.RecordBatch.from_pylist([], schema=OPEN_SCHEMA), Shards.begin(started_ms))

    def fold(self, signals: pa.RecordBatch, gaps: Iterable[Row], newest_ms: int, silence_ms: int) -> pa.RecordBatch:
        """Apply the rows of a batch, and end the sessions of silent devices.

        Args:
            signals: rows of devices in any order, columns of `SIGNAL_SCHEMA`.
            gaps: gap rows.
            newest_ms: newest ``received_at`` that the batch has read, epoch milliseconds.
            silence_ms: limit of silence, milliseconds.

        Returns:
            Rows to write, columns of `CHANGE_SCHEMA`.
        """
        changes: list[pa.RecordBatch] = []
        for gap in sorted(gaps, key=arrival_order):
            before = signals["received_at_ms"].to_numpy() < gap.received_at_ms
            changes.append(self._apply(signals.filter(pa.array(before)), silence_ms))
            signals = signals.filter(pa.array(~before))
            self.shards = with_gap(self.shards, gap, silence_ms)
        changes.append(self._apply(signals, silence_ms))
        self.shards = self.shards.read(newest_ms, settled_after_ms(silence_ms))
        changes.append(self._expire())
        self.shards = self.shards.forget_before([_or_never(frontier_ms) for frontier_ms in self.shards.frontiers_ms])
        return pa.concat_batches(changes)

    def _apply(self, signals: pa.RecordBatch, silence_ms: int) -> pa.RecordBatch:
        if not signals.num_rows:
            return _NOTHING
        known = self.open.num_rows
        at = pc.fill_null(pc.index_in(signals["device_id"], value_set=self.open["device_id"]), -1).to_numpy()
        received = signals["received_at_ms"].to_numpy()
        changed = np.zeros(known + 1, bool)  # by session; the last is for devices without one, whose index is -1
        changed[-1] = True
        last_seen = np.append(self.open["last_seen_ms"].to_numpy(), 0)
        changed[at[self._may_change(signals, at)]] = True
        changed[at[_is_after_silence(at, received, last_seen, silence_ms)]] = True
        plain = ~changed[at]
        np.maximum.at(last_seen, at[plain], received[plain])
        messages = self.open["messages"].to_numpy() + np.bincount(at[plain], minlength=known)
        self.open = _with(self.open, last_seen_ms=last_seen[:known], messages=messages)
        rest = np.flatnonzero(~plain)
        if not len(rest):
            return _NOTHING
        return self._apply_each(batch_to_signals(signals.take(pa.array(rest))), changed[:known], silence_ms)

    def _may_change(self, signals: pa.RecordBatch, at: NDArray[np.int32]) -> Bools:
        """Return which signals may change more of a session than its newest signal and its number of messages."""
        changes = ~_COUNTED[signals["kind"].to_numpy()]
        if not self.open.num_rows:
            return changes
        places = pa.array(np.maximum(at, 0))
        sites = signals["site"].cast(pa.string())
        changes |= pc.not_equal(self.open["site"].take(places), sites).to_numpy(zero_copy_only=False)
        for name in _FILLED:
            column = signals[name]
            if column.null_count < len(column) and self.open[name].null_count:
                unnamed = pc.is_null(self.open[name]).take(places)
                changes |= pc.and_(unnamed, pc.is_valid(column)).to_numpy(zero_copy_only=False)
        return changes

    def _apply_each(self, rows: Sequence[Row], changed: Bools, silence_ms: int) -> pa.RecordBatch:
        """Apply rows to the sessions of their devices by the definition.

        Args:
            rows: all rows of devices that need it, in any order.
            changed: which open sessions these devices have.
            silence_ms: limit of silence, milliseconds.
        """
        current = {one.device_id: one for one in _to_sessions(self.open.filter(pa.array(changed)))}
        written: list[Session] = []
        left: list[Session] = []
        for device_id, its in groupby(
            sorted(rows, key=lambda row: (row.device_id, arrival_order(row))), lambda row: row.device_id
        ):
            session = current.get(device_id)
            for row in its:
                session, changes = after(session, row, silence_ms, self._coverage_of)
                written += changes
            if session is not None:
                left.append(session)
        self.open = pa.concat_batches([self.open.filter(pa.array(~changed)), _to_batch(left, OPEN_SCHEMA)])
        return _to_batch(written, CHANGE_SCHEMA)

    def _coverage_of(self, site: str) -> Any:
        return self.shards.of(site).coverage

    def _expire(self) -> pa.RecordBatch:
        """End the sessions whose newest signals lie at or before the frontier of their site."""
        frontiers = np.array([*map(_or_never, self.shards.frontiers_ms)], np.int64)
        limit: Any = frontiers[0]
        if len(frontiers) > 1:
            sites = self.open["site"].dictionary_encode()
            numbers = np.array([self.shards.number(site) for site in sites.dictionary.to_pylist()], np.int64)
            limit = frontiers[numbers[sites.indices.to_numpy()]]
        silent = pa.array(self.open["last_seen_ms"].to_numpy() <= limit)
        if not pc.any(silent, min_count=0).as_py():
            return _NOTHING
        gone = self.open.filter(silent)
        self.open = self.open.filter(pc.invert(silent))
        more = [gone["last_seen_ms"], pa.repeat(EndedBy.SILENCE.value, gone.num_rows)]
        return pa.RecordBatch.from_arrays([*gone.columns, *more], schema=CHANGE_SCHEMA)

    @classmethod
    def joined(cls, groups: Sequence["SessionGroup"]) -> "SessionGroup":
        """Return the state of all devices from those of all key groups after one batch."""
        return cls(pa.concat_batches([one.open for one in groups]), groups[0].shards)

    def split(self, key_groups: int) -> list["SessionGroup"]:
        """Return the state of each key group, the inverse of `joined` for any number of key groups."""
        numbers = hashes_of(self.open["device_id"]) % key_groups
        return [SessionGroup(self.open.filter(pa.array(numbers == group)), self.shards) for group in range(key_groups)]

    def unread(self, signals: pa.RecordBatch, gaps: Iterable[Row], *, repeats: bool = True) -> tuple[pa.RecordBatch, list[Row]]:
        """Return the signals and gap rows that this state has not read yet: those received after its newest row.

        Args:
            signals: rows of devices, columns of `SIGNAL_SCHEMA`.
            gaps: gap rows.
            repeats: whether they include rows that the state has read; if not, all rows of the instant of its newest row
                are unread, since a version of bronze may end within an instant.
        """
        from_ms = self.shards.newest_ms + 1 if repeats else self.shards.newest_ms
        unread = signals["received_at_ms"].to_numpy() >= from_ms
        return signals.filter(pa.array(unread)), [gap for gap in gaps if gap.received_at_ms >= from_ms]

    def to_bytes(self, more: Mapping[str, Any] | None = None) -> bytes:
        """Return the stored form: an Arrow stream with the coverage in its metadata.

        Args:
            more: further JSON values for the metadata, see `stored_metadata`.
        """
        context = json.dumps({"form": FORM, **context_to_plain(self.shards, Policies(())), **(more or {})}, separators=(",", ":"))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, OPEN_SCHEMA.with_metadata({"fleetpulse": context}), options=WRITING) as writer:
            writer.write_batch(self.open)
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_bytes(cls, stored: bytes) -> "SessionGroup":
        """Read the stored form.

        Raises:
            FleetError: it has another format version.
        """
        context = context_from_plain(stored_metadata(stored))
        with pa.ipc.open_stream(stored, options=READING) as reader:
            return cls(reader.read_next_batch().replace_schema_metadata(None), context[0])


def stored_metadata(stored: bytes) -> dict[str, Any]:
    """Return the metadata of a stored form.

    Raises:
        FleetError: it has another format version.
    """
    with pa.ipc.open_stream(stored, options=READING) as reader:
        known = json.loads((reader.schema.metadata or {})[b"fleetpulse"])
    if known["form"] != FORM:
        raise FleetError(
            f"the state of the stream sessions has format version {known['form']}; this release reads version {FORM}; run the "
            f"release that wrote it, or, if only the checkpoint has that version: ./fleet stream rebuild sessions",
            code="session-state-unknown",
        )
    return known


def _is_after_silence(at: NDArray[np.int32], received: Int64s, last_seen: Int64s, silence_ms: int) -> Bools:
    """Return which signals follow the one before by more than the limit, coverage gaps included."""
    order = np.lexsort((received, at))
    of, then = at[order], received[order]
    before = np.append(np.int64(0), then[:-1])
    first = np.append(True, of[1:] != of[:-1])
    before[first] = last_seen[of[first]]
    found = np.zeros(len(at), bool)
    found[order] = then - before > silence_ms
    return found


def _with(batch: pa.RecordBatch, **columns: Int64s) -> pa.RecordBatch:
    for name, values in columns.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(values, pa.int64()))
    return batch


def _to_batch(sessions: Sequence[Session], schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array([getattr(one, field.name) for one in sessions], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _to_sessions(batch: pa.RecordBatch) -> list[Session]:
    return [Session(**{**one, "started_by": StartedBy(one["started_by"])}) for one in batch.to_pylist()]


def _or_never(frontier_ms: int | None) -> int:
    return _NEVER if frontier_ms is None else frontier_ms


_NOTHING: Final = _to_batch([], CHANGE_SCHEMA)
