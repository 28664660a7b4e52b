"""Snapshot rows of key groups, and key groups from such rows.

Rule 1: all key groups of a snapshot are judged up to the same row, so they share coverage, frontiers
and policies. Judgements of groups that were behind this row are stored as pending. The run that
resumes from the snapshot emits them once.
Rule 2: rows belong to devices, not to key groups. The resuming run can have another number of
groups.
Rule 3: devices restored from the rows equal the original ones, field by field
(``tests/property/columnar/snapshot/test_rows.py``).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.codec.arrow import NO_SIGNALS, ROW_SCHEMA, SIGNAL_SCHEMA, batch_to_rows, batch_to_signals, from_bytes
from fleetpulse.columnar.codec.context_json import context_from_plain, context_to_plain
from fleetpulse.columnar.codec.hashing import digests, hashes_of
from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import event_times
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.jit.context import MODES, NONE, Vocabulary
from fleetpulse.columnar.jit.layout import BOOT, CLOCK, DEVICE_FIELDS, MEMORY, MODE, SEQ, TRUSTS
from fleetpulse.columnar.snapshot.bootstrap import BOOTSTRAP_SCHEMA
from fleetpulse.columnar.state.deltas import WORDS
from fleetpulse.columnar.state.devices import Devices
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment, Outcome
from fleetpulse.core.rows import EVERYONE, SET_WHEN_READ, Row, Trust
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, Column

DEVICE, SIGNAL, OWN_ROW, PENDING, GROUP = "device", "signal", "row", "pending", "group"
OF_ONE_GROUP: Final = ("bytes", "form", "devices")  # keys that differ by group in the content of a part `GROUP`
COMPARED_PARTS: Final = (DEVICE, SIGNAL, OWN_ROW)  # devices, and pending rows of devices
_WORDS: Final = {name: DEVICE_FIELDS.index(name) for name in WORDS}
_ARROW: Final = {"string": pa.string(), "long": pa.int64(), "int": pa.int32(), "timestamp": pa.timestamp("us", tz="UTC")}
SNAPSHOT_SCHEMA: Final = pa.schema([(column.name, _ARROW[column.type]) for column in DEVICE_SNAPSHOTS.columns])


def _declared(name: str) -> Column:
    return next(column for column in DEVICE_SNAPSHOTS.columns if column.name == name)


_INSTANTS: Final = {
    name: name.removesuffix("_ms")
    for name in DEVICE_FIELDS
    if name.endswith("_ms") and name.removesuffix("_ms") in SNAPSHOT_SCHEMA.names
}
_NUMBERS: Final = tuple(
    (place, _INSTANTS.get(name, name))
    for place, name in enumerate(DEVICE_FIELDS)
    if name not in (*_WORDS, "mode", "clock", "boot", "memory")
)
_OF_SIGNALS: Final = {  # snapshot column by column of `SIGNAL_SCHEMA`; offset_ms is converted to and from the event time
    "received_at_ms": "received_at", "presence_ms": "presence", "kind": "message_kind", "trust": "clock", "session": "connection",
    "offset_ms": "event_time",
}  # fmt: skip
_TIMES: Final = ("received_at_ms", "presence_ms")
_TRUST_WORDS: Final = pa.array([trust.value for trust in TRUSTS])
assert all(_declared(name) for _, name in _NUMBERS), "every field of a device has a column"


def snapshot_rows(
    key_group: int, block: bytes, chunks: Mapping[int, bytes], newest_ms: int, deployment: Deployment
) -> list[pa.RecordBatch]:
    """Return a key group as snapshot rows, judged up to the newest row of any group.

    Args:
        key_group: number of the key group.
        block: stored form of the key group.
        chunks: chunks of its pending rows, by number.
        newest_ms: ``received_at`` of the newest row that any group has read.
        deployment: lateness, clock lead and jitter.

    Returns:
        Batches of `SNAPSHOT_SCHEMA`.
    """
    group, written = KeyGroup.from_bytes(block), dict(chunks)
    step = group.fold(NO_SIGNALS, [], max(newest_ms, group.shards.newest_ms), deployment, written.__getitem__)
    written |= dict(step.chunks)
    signals, others = _left(group, written)
    group_facts = {"bytes": len(block), "form": head_of(block)["version"], "devices": len(group.devices)}
    context = {**context_to_plain(group.shards, group.policies), **group_facts}
    return [
        _devices(key_group, group.devices),
        *[_signals(key_group, one) for one in signals if one.num_rows],
        _plain(key_group, OWN_ROW, [_row_to_plain(row) for row in others], [row.device_id for row in others]),
        _plain(key_group, PENDING, step.judgements.to_pylist(), step.judgements["device_id"].to_pylist()),
        _plain(key_group, GROUP, [context], [EVERYONE]),
    ]


def head_of(block: bytes) -> dict[str, Any]:
    """Return the header of a stored form: format version, counts, coverage, chunks."""
    with pa.ipc.open_stream(block) as reader:
        return json.loads((reader.schema.metadata or {})[b"fleetpulse"])


def _left(group: KeyGroup, written: Mapping[int, bytes]) -> tuple[list[pa.RecordBatch], list[Row]]:
    """Return the pending signals and the other pending rows, without duplicates.

    A row that is pending in several shards is returned once.
    """
    signals: list[pa.RecordBatch] = []
    others: list[Row] = []
    for after_ms, waiting in zip(group.shards.frontiers_ms, group.waiting, strict=True):
        for chunk in waiting.chunks:
            batch = from_wire(written[chunk.number]) if chunk.signals else from_bytes(written[chunk.number])
            if after_ms is not None:
                instants = batch["presence_ms" if chunk.signals else "event_time_ms"]
                batch = batch.filter(pa.array(instants.to_numpy() > after_ms))
            if chunk.signals:
                signals.append(batch)
            else:
                others += batch_to_rows(batch)
    events = {(row.gateway, row.arrival): row for row in others if row.is_for_everyone}
    return signals, [*(row for row in others if not row.is_for_everyone), *events.values()]


def _whole(key_group: int, part: str, count: int, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    columns |= {"part": pa.repeat(part, count), "key_group": pa.repeat(pa.scalar(key_group, pa.int32()), count)}
    arrays = [columns[field.name].cast(field.type) if field.name in columns else pa.nulls(count, field.type)
              for field in SNAPSHOT_SCHEMA]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=SNAPSHOT_SCHEMA)


def _devices(key_group: int, devices: Devices) -> pa.RecordBatch:
    rows = devices.rows
    columns: dict[str, pa.Array] = {"device_id": devices.ids, "boot": devices.boots}
    columns["device_hash"] = pa.array(hashes_of(devices.ids))
    columns["mode"] = pa.array([mode.value for mode in MODES], pa.string()).take(pa.array(rows[:, MODE]))
    columns["clock"] = _TRUST_WORDS.take(pa.array(rows[:, CLOCK]))
    for name, place in _WORDS.items():
        numbers = rows[:, place]
        columns[name] = pa.array(devices.words_of(name).words, pa.string()).take(pa.array(numbers, mask=numbers < 0))
    for place, name in _NUMBERS:
        values = pa.array(rows[:, place], mask=(rows[:, place] == NONE) | ((rows[:, place] < 0) & (place == SEQ)))
        columns[name] = pc.multiply(values, 1000).cast(_ARROW["timestamp"]) if name in _INSTANTS.values() else values
    columns["errors"] = _errors(devices)
    return _whole(key_group, DEVICE, len(devices), columns)


def _errors(devices: Devices) -> pa.Array:
    encoded = np.full(len(devices), None, object)
    for place in np.flatnonzero(devices.rows[:, MEMORY] >= 0).tolist():
        known = {name: value for name, value in devices.remembered(place).items() if value}
        encoded[place] = json.dumps(known) if known else None
    return pa.array(encoded, pa.string())


def _signals(key_group: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = {}
    for field in SIGNAL_SCHEMA:
        column = batch[field.name]
        if pa.types.is_dictionary(field.type):
            column = column.dictionary_decode()
        if field.name == "offset_ms":
            column = event_times(batch)
        if field.name in (*_TIMES, "offset_ms"):
            column = pc.multiply(column, 1000).cast(_ARROW["timestamp"])
        if field.name == "trust":
            column = _TRUST_WORDS.take(column)
        columns[_OF_SIGNALS.get(field.name, field.name)] = column
    columns["device_hash"] = pa.array(hashes_of(batch["device_id"]))
    columns["message_kind"] = pc.cast(columns["message_kind"], pa.int32())
    columns["device_clock"] = columns["device_clock"].cast(pa.int32())
    columns["seq"] = pc.if_else(pc.less(columns["seq"], 0), None, columns["seq"])
    return _whole(key_group, SIGNAL, batch.num_rows, columns)


def _plain(key_group: int, part: str, contents: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> pa.RecordBatch:
    columns = {
        "content": pa.array([json.dumps(one) for one in contents], pa.string()),
        "device_id": pa.array(ids, pa.string()),
        "device_hash": pa.array(digests(map(str.encode, ids))),
    }
    return _whole(key_group, part, len(contents), columns)


def _row_to_plain(row: Row) -> dict[str, Any]:
    values = {name: value for name, value in asdict(row).items() if name not in SET_WHEN_READ}
    return {**values, "kind": row.kind.value, "clock": row.clock.value}


def shared_context(groups: Iterable[str]) -> str:
    """Return the coverage, frontiers and policies that all groups of a snapshot share.

    Args:
        groups: contents of the snapshot's rows of part ``group``.

    Returns:
        JSON text.

    Raises:
        FleetError: there is no group, or the groups differ.
    """
    contents = (json.loads(one).items() for one in groups)
    contexts = {json.dumps({name: value for name, value in one if name not in OF_ONE_GROUP}, sort_keys=True) for one in contents}
    if len(contexts) != 1:
        raise FleetError(
            f"the key groups of a snapshot must share coverage, frontiers and policies; got {len(contexts)} different ones; "
            f"the snapshot is damaged or mixed from several: use another snapshot",
            code="snapshot-damaged",
        )
    return contexts.pop()


def restore_group(
    key_group: int, rows: pa.Table, shared: Sequence[Row], context: str, deployment: Deployment, form: int
) -> pa.Table:
    """Create a key group from snapshot rows, as one row of `BOOTSTRAP_SCHEMA`.

    Args:
        key_group: number of the key group.
        rows: its devices, signals and own rows, columns of `SNAPSHOT_SCHEMA`; rows of other parts
            are ignored.
        shared: rows that are pending in every group.
        context: coverage, frontiers and policies, see `shared_context`.
        deployment: lateness, clock lead and jitter.
        form: format version of the stored form.
    """
    shards, policies = context_from_plain(json.loads(context))
    group = KeyGroup(shards, policies, _to_devices(rows.filter(pc.equal(rows["part"], DEVICE))))
    signals = _to_signals(rows.filter(pc.equal(rows["part"], SIGNAL)))
    own = rows.filter(pc.and_(pc.equal(rows["part"], OWN_ROW), pc.not_equal(rows["device_id"], EVERYONE)))
    chunks = group.store_pending(signals, [*_to_rows(own), *shared], max(deployment.allowed_lateness_ms, 1))
    written = [{"number": number, "rows": content} for number, content in chunks]
    return pa.table([[key_group], [group.to_bytes(form)], [written]], schema=BOOTSTRAP_SCHEMA)


def outcome_of(rows: pa.Table) -> Outcome:
    """Return the outcome at a snapshot, from which `core.replay` can resume.

    The outcome has no judgements.

    Args:
        rows: snapshot rows of some devices, of all devices (`EVERYONE`) and of part ``group``,
            columns of `SNAPSHOT_SCHEMA`; rows of part ``pending`` are ignored.

    Raises:
        FleetError: the snapshot is damaged, see `shared_context`.
    """

    def of(part: str) -> pa.Table:
        return rows.filter(pc.equal(rows["part"], part))

    shards, policies = context_from_plain(json.loads(shared_context(of(GROUP)["content"].to_pylist())))
    devices = _to_devices(of(DEVICE))
    known = (devices.get(place) for place in range(len(devices)))
    others = _to_rows(of(OWN_ROW))
    waiting = [*batch_to_signals(_to_signals(of(SIGNAL))), *(row for row in others if not row.is_for_everyone)]
    waiting += {(row.gateway, row.arrival): row for row in others if row.is_for_everyone}.values()  # every group has them
    return Outcome([], {one.device_id: one for one in known if one is not None}, waiting, shards, policies)


def shared_rows(contents: Iterable[str]) -> list[Row]:
    """Parse pending rows from the contents of snapshot rows of part ``row``."""
    return [_row_from_plain(json.loads(one)) for one in contents]


def _to_rows(rows: pa.Table) -> list[Row]:
    return shared_rows(rows["content"].to_pylist())


def _row_from_plain(plain: Mapping[str, Any]) -> Row:
    batch = pa.RecordBatch.from_pylist([dict(plain)], schema=ROW_SCHEMA)
    return batch_to_rows(batch)[0]


def _to_devices(rows: pa.Table) -> Devices:
    devices = Devices()
    rows = rows.combine_chunks()
    devices.admit(_one(rows["device_id"]))
    matrix = devices.rows
    for place, name in _NUMBERS:
        values = rows[name].cast(pa.int64()) if name not in _INSTANTS.values() else pc.divide(rows[name].cast(pa.int64()), 1000)
        matrix[:, place] = pc.fill_null(values, -1 if place == SEQ else NONE).to_numpy()
    for name, place in _WORDS.items():
        matrix[:, place] = devices.words_of(name).numbers(_one(rows[name]).dictionary_encode())
    modes, trusts = Vocabulary([mode.value for mode in MODES]), Vocabulary([trust.value for trust in TRUSTS])
    matrix[:, MODE] = modes.numbers(_one(rows["mode"]).dictionary_encode())
    matrix[:, CLOCK] = trusts.numbers(_one(pc.fill_null(rows["clock"], Trust.ON_TIME.value)).dictionary_encode())
    matrix[:, [BOOT, MEMORY]] = -1
    devices.boots = _one(rows["boot"])
    has_errors = rows["errors"].is_valid().to_numpy()
    places = np.flatnonzero(has_errors)
    devices.remember(places)
    for place, known in zip(places.tolist(), rows["errors"].drop_null().to_pylist(), strict=True):
        devices.put_remembered(place, **json.loads(known))
    return devices


def _to_signals(rows: pa.Table) -> pa.RecordBatch:
    arrays: list[pa.Array] = []
    for field in SIGNAL_SCHEMA:
        column = rows[_OF_SIGNALS.get(field.name, field.name)]
        if field.name in _TIMES:
            column = _millis(column)
        elif field.name == "offset_ms":
            column = pc.fill_null(pc.subtract(_millis(column), _millis(rows["presence"])), 0)
        elif field.name == "trust":
            column = pc.index_in(column, value_set=_TRUST_WORDS)
        array = _one(pc.fill_null(column, -1) if field.name == "seq" else column)
        arrays.append(
            array.dictionary_encode().cast(field.type) if pa.types.is_dictionary(field.type) else array.cast(field.type)
        )
    return pa.RecordBatch.from_arrays(arrays, schema=SIGNAL_SCHEMA)


def _millis(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(column.cast(pa.int64()), 1000)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
