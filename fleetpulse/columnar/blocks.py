"""Rows and devices as Arrow columns: the form in which they travel and are kept.

Rule: the columns are the fields of `Row` and of `Device`; a field that is added there is stored here, and the
version of the stored form changes with it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

import pyarrow as pa

from fleetpulse.core.device import Device
from fleetpulse.core.machine import Mode
from fleetpulse.core.messages import Clock, Kind, Row

STORED_VERSION: Final = 1

ROW_SCHEMA: Final = pa.schema(
    [
        ("received_at_ms", pa.int64()),
        ("kind", pa.string()),
        ("device_id", pa.string()),
        ("site", pa.string()),
        ("event_time_ms", pa.int64()),
        ("clock", pa.string()),
        ("boot", pa.string()),
        ("seq", pa.int64()),
        ("uptime_s", pa.int64()),
        ("code", pa.string()),
        ("firmware", pa.string()),
        ("gateway", pa.string()),
        ("metrics", pa.string()),
        ("body", pa.string()),
        ("note", pa.string()),
        ("digest", pa.int64()),
    ]
)

DEVICE_SCHEMA: Final = pa.schema(
    [
        ("device_id", pa.string()),
        ("site", pa.string()),
        ("device_class", pa.string()),
        ("gateway", pa.string()),
        ("life_ms", pa.int64()),
        ("quiet_since_ms", pa.int64()),
        ("quiet_covered_ms", pa.int64()),
        ("mode", pa.string()),
        ("transition_no", pa.int64()),
        ("mode_since_ms", pa.int64()),
        ("class_since_ms", pa.int64()),
        ("last_seen_ms", pa.int64()),
        ("boot", pa.string()),
        ("seq", pa.int64()),
        ("reboots", pa.int64()),
        ("runtime_ms", pa.int64()),
        ("error_times_ms", pa.list_(pa.int64())),
        ("codes", pa.list_(pa.string())),
        ("progress", pa.list_(pa.int64())),
        ("progress_of", pa.list_(pa.string())),
        ("degraded_until_ms", pa.int64()),
        ("flagged_until_ms", pa.int64()),
        ("held_until_ms", pa.int64()),
        ("death_ms", pa.int64()),
        ("death_covered_ms", pa.int64()),
    ]
)

assert [field.name for field in fields(Row)] == ROW_SCHEMA.names, "rows are stored as they are declared"
assert [field.name for field in fields(Device)] == DEVICE_SCHEMA.names, "devices are stored as they are declared"


def _columns(values: Iterable[Any], schema: pa.Schema) -> list[pa.Array]:
    kept = list(values)
    return [pa.array([getattr(value, field.name) for value in kept], field.type) for field in schema]


def rows_to_batch(rows: Iterable[Row]) -> pa.RecordBatch:
    """Return rows as one record batch of `ROW_SCHEMA`."""
    return pa.RecordBatch.from_arrays(_columns(rows, ROW_SCHEMA), schema=ROW_SCHEMA)


def batch_to_rows(batch: pa.RecordBatch | pa.Table) -> list[Row]:
    """Return the rows of a batch of `ROW_SCHEMA`; further columns are passed over."""
    columns = {name: batch.column(name).to_pylist() for name in ROW_SCHEMA.names}
    columns["kind"] = [Kind(word) for word in columns["kind"]]
    columns["clock"] = [Clock(word) for word in columns["clock"]]
    return [Row(*values) for values in zip(*columns.values(), strict=True)]


def devices_to_batch(devices: Iterable[Device]) -> pa.RecordBatch:
    """Return devices as one record batch of `DEVICE_SCHEMA`."""
    return pa.RecordBatch.from_arrays(_columns(devices, DEVICE_SCHEMA), schema=DEVICE_SCHEMA)


def batch_to_devices(batch: pa.RecordBatch) -> list[Device]:
    """Return the devices of a batch of `DEVICE_SCHEMA`."""
    columns = {name: batch.column(name).to_pylist() for name in DEVICE_SCHEMA.names}
    columns["mode"] = [Mode(word) for word in columns["mode"]]
    for name in ("error_times_ms", "codes", "progress", "progress_of"):
        columns[name] = [tuple(items) for items in columns[name]]
    return [Device(*values) for values in zip(*columns.values(), strict=True)]


def to_bytes(batch: pa.RecordBatch, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Write one batch as an Arrow IPC stream, with JSON metadata in its schema."""
    schema = batch.schema
    if metadata is not None:
        schema = schema.with_metadata({"fleetpulse": json.dumps(metadata, separators=(",", ":"))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch.cast(schema) if metadata is not None else batch)
    return sink.getvalue().to_pybytes()


def from_bytes(stored: bytes) -> tuple[pa.RecordBatch, Mapping[str, Any]]:
    """Read what `to_bytes` wrote: the batch and its metadata."""
    with pa.ipc.open_stream(stored) as reader:
        batch = reader.read_next_batch()
        metadata = reader.schema.metadata or {}
    return batch, json.loads(metadata.get(b"fleetpulse", b"{}"))
