"""Reading of bronze files, and packing of their rows into blocks by key group.

Each key group gets one block of signals and one of other rows. In the row of a block,
``received_at`` is that of the group's newest row, which moves Spark's watermark. ``newest_ms`` is
``received_at`` of the task's newest row, up to which the fold may judge.

Rule: these rows go to every key group: rows that concern all devices, deaths and returns of
gateways (for the devices behind them), and ticks that flush. Any other tick goes to group 0, since
it only moves the watermark.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fleetpulse.columnar.codec.arrow import KINDS, NO_ROWS, ROW_SCHEMA, SIGNAL_SCHEMA, WORDS, to_bytes
from fleetpulse.columnar.codec.wire import to_wires
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.jit.layout import TRUSTS
from fleetpulse.columnar.jit.take import partition_by_hash
from fleetpulse.core.rows import EVERYONE, FLUSH, FROM_DEVICES, Clock, GatewayEvent, Kind, Trust
from fleetpulse.io.delta.corruption import reporting_corruption_of_file

_BLOCK_SCHEMA: Final = pa.schema(
    [
        ("key_group", pa.int32()),
        ("received_at", pa.timestamp("us", tz="UTC")),
        ("newest_ms", pa.int64()),
        ("started_ms", pa.int64()),
        ("signals", pa.binary()),
        ("others", pa.binary()),
    ]
)
_MICROS: Final = pa.timestamp("us", tz="UTC")
_INSTANTS: Final = {"received_at_ms": "received_at", "event_time_ms": "event_time"}  # name in a block -> name in bronze
_READ_LATER: Final = frozenset({"presence_ms", "offset_ms", "trust", "device_clock"})  # derived columns, not in bronze
_NEW: Final = {"session": pa.string(), "position": pa.int64()}  # columns that bronze of version 1 lacks
_EVENT: Final = "gateway_event"
_UNREAD: Final = frozenset({"metrics", "uptime_s"})  # the fold does not read them; metrics may have 256 KB a row
_OF_DEVICES: Final = pa.array(sorted(kind.value for kind in FROM_DEVICES))
_OF_EVERYBODY: Final = pa.array([Kind.GAP.value, Kind.POLICY.value])
_KIND_WORDS: Final = pa.array([kind.value for kind in KINDS])
_ON_TIME, _INVALID = TRUSTS.index(Trust.ON_TIME), TRUSTS.index(Trust.INVALID)


def read_bronze(path: str, row_group: int | None = None) -> pa.Table:
    """Read rows of a bronze file, without columns that the fold does not use.

    Args:
        path: path of the file.
        row_group: number of the row group to read; None reads the whole file.

    Raises:
        DamagedError: the file is damaged or missing.
    """
    names = {_INSTANTS.get(name, name) for name in SIGNAL_SCHEMA.names} - _READ_LATER | {"event_time", _EVENT}
    with reporting_corruption_of_file(Path(path)):
        file = pq.ParquetFile(path, read_dictionary=[*WORDS, "kind", "clock"])
        groups = range(file.num_row_groups) if row_group is None else [row_group]
        table = file.read_row_groups(groups, columns=[*names, "clock", "device_hash"], use_threads=False)
    if _all_are_signals(table):
        return _whole_rows(table)
    everything = [*{*ROW_SCHEMA.names} - {*_INSTANTS} - _UNREAD, *_INSTANTS.values(), "device_hash"]
    with reporting_corruption_of_file(Path(path)):
        return _whole_rows(file.read_row_groups(groups, columns=everything, use_threads=False))


def _whole_rows(table: pa.Table) -> pa.Table:
    """Add columns that older files lack, and convert string views to strings.

    Arrow reads strings of files that deltalake's DELETE rewrote as views, which `take` does not
    support.
    """
    fields = [field.with_type(pa.string()) if pa.types.is_string_view(field.type) else field for field in table.schema]
    table = table.cast(pa.schema(fields))
    for name, kind in _NEW.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
    if _EVENT not in table.column_names:
        table = table.append_column(_EVENT, _events_before(table))
    return table


def _events_before(table: pa.Table) -> pa.ChunkedArray:
    """Return the gateway events of rows of version 1, which has only deaths.

    A gateway's death is a will that names its own device as ``gateway``.
    """
    died = _by_dictionary(table["kind"], lambda kinds: pc.equal(kinds, Kind.DEATH.value))
    is_gateway = pc.fill_null(pc.equal(table["device_id"], table["gateway"].cast(pa.string())), fill_value=False)
    return pc.if_else(pc.and_(died, is_gateway), GatewayEvent.DEATH.value, pa.scalar(None, pa.string()))


def _are_signals(rows: pa.Table) -> pa.ChunkedArray:
    return _by_dictionary(rows["kind"], _of_devices)


def _all_are_signals(rows: pa.Table) -> bool:
    """Return whether all rows are signals.

    The dictionary is checked first. If it has another kind, the rows are checked, since a
    dictionary may have entries that no row uses.
    """
    if all(pc.all(_of_devices(chunk.dictionary), min_count=0).as_py() for chunk in rows["kind"].chunks):
        return True
    return bool(pc.all(_are_signals(rows), min_count=0).as_py())


def _of_devices(kinds: pa.Array) -> pa.Array:
    return pc.is_in(kinds, value_set=_OF_DEVICES)


def _trust(clocks: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(clocks, Clock.INVALID.value), _INVALID, _ON_TIME).cast(pa.int8())


def _by_dictionary(column: pa.ChunkedArray, value: Callable[[pa.Array], pa.Array]) -> pa.ChunkedArray:
    """Map a dictionary-encoded column, computing the value once per dictionary entry."""
    chunks = column.chunks or [pa.array([], column.type)]
    return pa.chunked_array([value(chunk.dictionary).take(chunk.indices) for chunk in chunks])


def _instants(table: pa.Table, name: str) -> pa.Array:
    micros = table[_INSTANTS[name]].cast(_MICROS).cast(pa.int64()).combine_chunks()
    if micros.null_count:
        return pc.divide(micros, 1000)
    return pa.array(micros.to_numpy() // 1000)  # always whole milliseconds; NumPy divides in a quarter of the time


def _signals(rows: pa.Table) -> pa.RecordBatch:
    """Convert rows of bronze to a batch of `SIGNAL_SCHEMA`."""
    columns = {name: rows[name] for name in ("device_id", "site", "boot", "session", "code", "firmware", "gateway")}
    received_ms, event_ms = (_instants(rows, name) for name in _INSTANTS)
    columns |= {"received_at_ms": received_ms, "presence_ms": event_ms}
    if event_ms.null_count:
        columns["presence_ms"] = pc.coalesce(event_ms, received_ms)
    columns["position"] = pc.fill_null(rows["position"], 0) if rows["position"].null_count else rows["position"]
    columns["offset_ms"] = pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)
    columns["trust"] = _by_dictionary(rows["clock"], _trust)
    columns["kind"] = _by_dictionary(rows["kind"], lambda values: pc.index_in(values, value_set=_KIND_WORDS))
    columns["device_clock"] = _by_dictionary(rows["clock"], lambda values: pc.equal(values, Clock.DEVICE.value))
    columns["seq"], columns["digest"] = rows["seq"], pa.nulls(rows.num_rows, pa.int64()).fill_null(0)
    if rows["seq"].null_count:
        columns["seq"] = pc.fill_null(rows["seq"], -1)
        columns["digest"] = pc.if_else(pc.is_null(rows["seq"]), rows["digest"], 0)  # see `distinguishing_digest`
    arrays = [_whole(columns[field.name].cast(field.type)) for field in SIGNAL_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SIGNAL_SCHEMA)


def _array_of(rows: pa.Table, field: pa.Field) -> pa.Array:
    if field.name in _UNREAD:
        return pa.nulls(rows.num_rows, field.type)
    column = _instants(rows, field.name) if field.name in _INSTANTS else rows[field.name]
    return _whole(column.cast(field.type))


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _others(rows: pa.Table) -> pa.RecordBatch:
    """Convert rows of bronze to a batch of `ROW_SCHEMA`."""
    arrays = [_array_of(rows, field) for field in ROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ROW_SCHEMA)


def pack(rows: pa.Table, key_groups: int, started_ms: int) -> pa.RecordBatch:
    """Pack rows of bronze into a block of signals and one of other rows per key group.

    Args:
        rows: rows as returned by `read_bronze`, at least one.
        key_groups: number of key groups.
        started_ms: ``received_at`` of the first row ever, epoch milliseconds.

    Returns:
        One row for each key group that has rows; ``newest_ms`` is null.
    """
    plain = None if _all_are_signals(rows) else _are_signals(rows)
    signals: dict[int, bytes] = {}
    others: dict[int, bytes] = {}
    newest: dict[int, int] = {}
    signal_rows = rows if plain is None else rows.filter(plain)
    if signal_rows.num_rows:
        batch = _signals(signal_rows)
        order, ends = partition_by_hash(signal_rows["device_hash"].to_numpy(), key_groups)
        present = np.flatnonzero(np.diff(ends)).tolist()
        edges = [0, *ends[1:][present].tolist()]
        received = batch["received_at_ms"].to_numpy()[order]
        signals = dict(zip(present, to_wires(batch, order, edges), strict=True))
        spans = zip(present, pairwise(edges), strict=True)
        newest = {group: int(received[start:end].max()) for group, (start, end) in spans}
    events = _gateway_events(rows)
    if plain is not None or events.num_rows:
        rest = rows.slice(0, 0) if plain is None else rows.filter(pc.invert(plain))
        for group, batch in _shared_out(rest, events, key_groups):
            others[group] = to_bytes(batch)
            newest[group] = max(newest.get(group, 0), pc.max(batch["received_at_ms"]).as_py())
    found = sorted(newest)
    return pa.record_batch(
        [
            pa.array(found, pa.int32()),
            pa.array([newest[group] * 1000 for group in found], pa.int64()).cast(_MICROS),
            pa.nulls(len(found), pa.int64()),
            pa.array([started_ms] * len(found), pa.int64()),
            pa.array([signals.get(group) for group in found], pa.binary()),
            pa.array([others.get(group) for group in found], pa.binary()),
        ],
        schema=_BLOCK_SCHEMA,
    )


def with_wake_rows(blocks: pa.RecordBatch, key_groups: int) -> pa.RecordBatch:
    """Set ``newest_ms`` of a task's blocks, and add a row for each absent key group.

    The added rows wake the key groups without data. A batch thus judges all groups up to the newest
    ``received_at`` that the task has read.

    Args:
        blocks: blocks as returned by `pack`, at least one row.
        key_groups: number of key groups.

    Returns:
        The blocks and the added rows, which have no block of signals or of other rows.

    Source: docs/adr/0030-wake-up-of-every-key-group.md
    """
    missing = np.setdiff1d(np.arange(key_groups, dtype=np.int32), blocks["key_group"].to_numpy())
    count, nothing = len(missing), pa.nulls(len(missing), pa.binary())
    newest, started = pc.max(blocks["received_at"]), blocks["started_ms"][0]
    instants = [pa.repeat(newest, count), pa.nulls(count, pa.int64()), pa.repeat(started, count)]
    added = [pa.array(missing), *instants, nothing, nothing]
    woken = pa.concat_batches([blocks, pa.RecordBatch.from_arrays(added, schema=blocks.schema)])
    newest_ms = pa.repeat(pa.scalar(newest.value // 1000, pa.int64()), woken.num_rows)
    return woken.set_column(woken.schema.get_field_index("newest_ms"), "newest_ms", newest_ms)


def _gateway_events(rows: pa.Table) -> pa.RecordBatch:
    """Convert deaths and returns of gateways to rows for every key group.

    Such a row has the gateway as ``gateway``, `EVERYONE` as device, and ``received_at`` as event
    time, see `core.rows.for_everyone`.
    """
    if rows[_EVENT].null_count == rows.num_rows:
        return NO_ROWS
    found = rows.filter(pc.is_valid(rows[_EVENT]))
    for field in ROW_SCHEMA:  # if all rows are signals, `read_bronze` reads fewer columns
        if _INSTANTS.get(field.name, field.name) not in found.column_names:
            found = found.append_column(field, pa.nulls(found.num_rows, field.type))
    everyone = pa.repeat(EVERYONE, found.num_rows)
    for name, column in (("gateway", found["device_id"]), ("device_id", everyone), ("event_time", found["received_at"])):
        found = found.set_column(found.schema.get_field_index(name), name, column)
    return _others(found)


def _shared_out(rows: pa.Table, events: pa.RecordBatch, key_groups: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each key group's rows that are not signals, with all gateway events.

    Args:
        rows: rows of bronze without signals.
        events: deaths and returns of gateways, see `_gateway_events`.
        key_groups: number of key groups.

    Yields:
        Number of the key group, and its rows.
    """
    if not rows.num_rows:
        yield from ((group, events) for group in range(key_groups))
        return
    groups = rows["device_hash"].to_numpy() % key_groups
    ticks = pc.equal(rows["kind"], Kind.TICK.value)
    flushing = pc.and_(ticks, pc.fill_null(pc.match_substring(rows["body"], f'"{FLUSH}"'), fill_value=False))
    shared = pc.or_(pc.is_in(rows["kind"], value_set=_OF_EVERYBODY), flushing).to_numpy()
    groups[ticks.to_numpy()] = 0
    batch = _others(rows)
    for group in range(key_groups) if shared.any() or events.num_rows else np.unique(groups).tolist():
        at = np.flatnonzero((groups == group) | shared)
        if len(at) or events.num_rows:
            yield group, pa.concat_batches([batch.take(pa.array(at)), events])
