"""Arrow schemas of rows, as sent to a key group and as stored in pending chunks.

Rule 1: signals and wills are columns of `SIGNAL_SCHEMA` and never become objects. All other rows
are rare and become `Row` objects: rows of operators, of the registry and of the bridge, and the
gateway events, which concern all devices behind a gateway.
Rule 2: the columns of `ROW_SCHEMA` are the fields of `Row` that bronze has.
Rule 3: before `ordering.split_late` has processed a signal, its presence time is its event time, or
``received_at`` if it has none.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

import pyarrow as pa

from fleetpulse.columnar.jit.layout import TRUSTS
from fleetpulse.core.rows import (
    EVERYONE,
    FROM_DEVICES,
    SET_WHEN_READ,
    Clock,
    GatewayEvent,
    Kind,
    Row,
    Trust,
    distinguishing_digest,
)

# Blocks are small and many workers run side by side: threads would only contend with each other.
WRITING: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
READING: Final = pa.ipc.IpcReadOptions(use_threads=False)
KINDS: Final = tuple(Kind)  # the number of a kind is its index here, which is its rank
_INVALID: Final = TRUSTS.index(Trust.INVALID)
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
        ("session", pa.string()),
        ("position", pa.int64()),
        ("gateway_event", pa.string()),
    ]
)
assert [field.name for field in fields(Row)] == [*ROW_SCHEMA.names, *SET_WHEN_READ], "ROW_SCHEMA lists the fields of Row in order"

_WORD: Final = pa.dictionary(pa.int32(), pa.string())  # few distinct values, each in many rows
SIGNAL_SCHEMA: Final = pa.schema(
    [
        ("device_id", pa.string()),
        ("site", _WORD),
        ("received_at_ms", pa.int64()),
        ("position", pa.int64()),  # see `Row.position`
        ("presence_ms", pa.int64()),  # the instant at which it is judged
        ("offset_ms", pa.int64()),  # event time minus presence time; 0 if the event time is invalid
        ("trust", pa.int8()),  # index in `TRUSTS`
        ("kind", pa.int8()),  # index in `KINDS`
        ("device_clock", pa.bool_()),  # whether the event time is from the device's clock
        ("boot", pa.string()),
        ("session", pa.string()),
        ("seq", pa.int64()),  # -1 if there is none
        ("code", _WORD),
        ("firmware", _WORD),
        ("gateway", _WORD),
        ("digest", pa.int64()),  # 0 if there is a seq
    ]
)
WORDS: Final = tuple(field.name for field in SIGNAL_SCHEMA if field.type == _WORD)
NO_SIGNALS: Final = pa.RecordBatch.from_pylist([], schema=SIGNAL_SCHEMA)
NO_ROWS: Final = pa.RecordBatch.from_pylist([], schema=ROW_SCHEMA)


def is_signal(row: Row) -> bool:
    """Whether a row is a signal or a will, which are sent as columns."""
    return row.device_id != EVERYONE and row.kind in FROM_DEVICES


def rows_to_batch(rows: Iterable[Row]) -> pa.RecordBatch:
    """Return rows as one record batch of `ROW_SCHEMA`."""
    all_rows = list(rows)
    columns = [pa.array([getattr(row, field.name) for row in all_rows], field.type) for field in ROW_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def batch_to_rows(batch: pa.RecordBatch | pa.Table) -> list[Row]:
    """Return the rows of a batch of `ROW_SCHEMA`.

    Other columns are ignored. Columns that a batch of format version 1 lacks are null.
    """
    names, nothing = batch.schema.names, [None] * batch.num_rows
    columns = {name: batch.column(name).to_pylist() if name in names else nothing for name in ROW_SCHEMA.names}
    columns["position"] = [place or 0 for place in columns["position"]]
    columns["kind"] = [Kind(value) for value in columns["kind"]]
    columns["gateway_event"] = [value and GatewayEvent(value) for value in columns["gateway_event"]]
    columns["clock"] = [Clock(value) for value in columns["clock"]]
    return [Row(*values) for values in zip(*columns.values(), strict=True)]


def signals_to_batch(rows: Iterable[Row]) -> pa.RecordBatch:
    """Return rows (see `is_signal`) as one record batch of `SIGNAL_SCHEMA`."""
    all_rows = list(rows)
    derived = ("device_clock", "presence_ms", "offset_ms", "trust")
    columns: dict[str, list[Any]] = {
        name: [getattr(row, name) for row in all_rows] for name in SIGNAL_SCHEMA.names if name not in derived
    }
    columns["presence_ms"] = [_presence_ms(row) for row in all_rows]
    columns["offset_ms"] = [0 if row.event_time_ms is None else row.event_time_ms - _presence_ms(row) for row in all_rows]
    columns["trust"] = [_INVALID if row.event_time_ms is None else TRUSTS.index(row.trust) for row in all_rows]
    columns["kind"] = [KINDS.index(row.kind) for row in all_rows]
    columns["seq"] = [-1 if row.seq is None else row.seq for row in all_rows]
    columns["digest"] = [distinguishing_digest(row) for row in all_rows]
    columns["device_clock"] = [row.clock is Clock.DEVICE for row in all_rows]
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in SIGNAL_SCHEMA], schema=SIGNAL_SCHEMA
    )


def _presence_ms(row: Row) -> int:
    if row.presence_ms is None and row.event_time_ms is None:
        return row.received_at_ms
    return row.at_ms


def batch_to_signals(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of a batch of `SIGNAL_SCHEMA`, with the fields that it has."""
    columns = {name: batch.column(name).to_pylist() for name in SIGNAL_SCHEMA.names}
    columns["trust"] = [TRUSTS[number] for number in columns["trust"]]
    clocks = [
        Clock.INVALID if trust is Trust.INVALID else Clock.DEVICE if own else Clock.RECEIVED
        for own, trust in zip(columns.pop("device_clock"), columns["trust"], strict=True)
    ]
    columns["event_time_ms"] = [
        None if clock is Clock.INVALID else presence_ms + offset_ms
        for clock, presence_ms, offset_ms in zip(clocks, columns["presence_ms"], columns.pop("offset_ms"), strict=True)
    ]
    columns["kind"] = [KINDS[number] for number in columns["kind"]]
    columns["seq"] = [None if number < 0 else number for number in columns["seq"]]
    values = zip(*columns.values(), strict=True)
    return [Row(**dict(zip(columns, one, strict=True)), clock=clock) for one, clock in zip(values, clocks, strict=True)]


def to_bytes(batch: pa.RecordBatch) -> bytes:
    """Write one batch as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=WRITING) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def from_bytes(stored: bytes) -> pa.RecordBatch:
    """Read a batch that `to_bytes` wrote."""
    with pa.ipc.open_stream(stored, options=READING) as reader:
        return reader.read_next_batch()
