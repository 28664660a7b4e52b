"""Arrow batches of judgements: compiled fold, definition, rejected rows.

Rule: the columns are those of `core.tables.JUDGEMENTS` without `ADDED_BY_THE_SINK`, which the sink
adds. Timestamps are epoch milliseconds, and their names end in ``_ms``.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.codec.arrow import KINDS
from fleetpulse.columnar.codec.packing import firsts, in_use
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.jit.context import MODES, NONE, TRIGGERS, Int64s
from fleetpulse.columnar.jit.layout import (
    T_AT,
    T_CLASS,
    T_CODES,
    T_DEVICE,
    T_FROM,
    T_GATEWAY,
    T_LAST_SEEN,
    T_LIFE,
    T_NUMBER,
    T_POLICY,
    T_ROW,
    T_RUNTIME,
    T_SHOWN,
    T_SITE,
    T_TO,
    T_TRIGGER,
    TRUSTS,
    Matrix,
)
from fleetpulse.columnar.state.devices import Devices
from fleetpulse.core.judgements import NEWEST, SUMMED, Judgement, JudgementKind
from fleetpulse.core.policy import Policies
from fleetpulse.core.rows import FOR_EVERYONE, Kind, Trust
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import MINUTE_MS

ADDED_BY_THE_SINK: Final = ("judged_at", "generation")
_TYPES: Final = {"string": pa.string(), "long": pa.int64(), "int": pa.int32(), "timestamp": pa.int64()}
JUDGEMENT_SCHEMA: Final = pa.schema(
    [
        (f"{column.name}_ms" if column.type == "timestamp" else column.name, _TYPES[column.type])
        for column in JUDGEMENTS.columns
        if column.name not in ADDED_BY_THE_SINK
    ]
)
_OF_EVERYBODY: Final = pa.array(sorted(kind.value for kind in FOR_EVERYONE))
_SUMMED: Final = pa.array([kind.value for kind in SUMMED])
_INVALID: Final = TRUSTS.index(Trust.INVALID)
_KIND_WORDS: Final = pa.array([kind.value for kind in KINDS])
_MODE_WORDS: Final = pa.array([mode.value for mode in MODES])
_TRIGGER_WORDS: Final = pa.array([trigger.value for trigger in TRIGGERS])


def _batch(count: int, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    arrays = [columns.get(field.name) for field in JUDGEMENT_SCHEMA]
    filled = [
        pa.nulls(count, field.type) if array is None else array for array, field in zip(arrays, JUDGEMENT_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(filled, schema=JUDGEMENT_SCHEMA)


def _same(value: Any, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value), count)


def _instants(values: Int64s) -> pa.Array:
    return pa.array(values, mask=values == NONE)


def _texts(texts: Sequence[Any], numbers: Int64s) -> pa.Array:
    return pa.array(list(texts), pa.string()).take(pa.array(numbers, mask=numbers < 0))


def judgements_to_batch(judgements: Iterable[Judgement]) -> pa.RecordBatch:
    """Convert judgements of the definition (`core.replay`) to an Arrow batch."""
    ordered = list(judgements)
    columns: dict[str, pa.Array] = {}
    for field in JUDGEMENT_SCHEMA:
        values = [getattr(one, field.name) for one in ordered]
        if field.name == "last_errors":
            values = [json.dumps(codes) if codes else None for codes in values]
        columns[field.name] = pa.array(values, field.type)
    return _batch(len(ordered), columns)


def drop_broadcast_copies(key_group: int, judgements: pa.RecordBatch) -> pa.RecordBatch:
    """Keep judgements of broadcast rows only in key group 0: each is emitted once."""
    if not key_group or not judgements.num_rows:
        return judgements
    return judgements.filter(pc.invert(pc.is_in(judgements["message_kind"], value_set=_OF_EVERYBODY)))


def sum_repeats(judgements: pa.RecordBatch, received_until_ms: int) -> pa.RecordBatch:
    """Replace judgements about messages, but the `NEWEST` of a kind, device and minute, by counting rows.

    This applies to the kinds of `SUMMED`. Signals take precedence over wills: the newest signal of a
    device keeps its row. The messages that a row counts have one kind, and either all or none of them
    have an event time.

    Args:
        judgements: judgements of one call about a key group, columns of `JUDGEMENT_SCHEMA`, one for
            each message.
        received_until_ms: ``received_at`` up to which the call had read, epoch milliseconds.
    """
    places = np.flatnonzero(pc.is_in(judgements["kind"], value_set=_SUMMED).to_numpy(zero_copy_only=False))
    if len(places) <= NEWEST:
        return judgements
    rows = judgements.take(pa.array(places))
    received_ms = rows["received_at_ms"].to_numpy()
    message_kind = _numbers(rows["message_kind"])
    is_signal = pc.not_equal(rows["message_kind"], Kind.DEATH.value).to_numpy(zero_copy_only=False)
    shared = (_numbers(rows["device_id"]), _numbers(rows["kind"]), received_ms // MINUTE_MS)
    order = np.lexsort((received_ms, is_signal, *shared))
    starts = _starts(shared, order)
    ends = np.append(starts[1:], len(order))
    further = order[np.repeat(ends, ends - starts) - np.arange(len(order)) > NEWEST]
    if not len(further):
        return judgements
    keys = (*shared, message_kind, rows["event_time_ms"].is_null().to_numpy(zero_copy_only=False))
    further = further[np.lexsort((received_ms[further], *(key[further] for key in keys)))]
    kept = np.ones(judgements.num_rows, bool)
    kept[places[further]] = False
    counted = _counting(rows.take(pa.array(further)), _starts(keys, further), received_until_ms)
    return pa.concat_batches([judgements.filter(pa.array(kept)), counted])


def _counting(rows: pa.RecordBatch, starts: Int64s, received_until_ms: int) -> pa.RecordBatch:
    """Return a row for each group of rows.

    Args:
        rows: judgements about messages, by group, and by ``received_at`` in it.
        starts: index of the first row of each group.
        received_until_ms: ``received_at`` up to which the job had read, epoch milliseconds.
    """
    count, first = len(starts), rows.take(pa.array(starts))
    messages = np.diff(np.append(starts, rows.num_rows))
    event_ms, late_by_ms = (pc.fill_null(rows[name], 0).to_numpy() for name in ("event_time_ms", "late_by_ms"))
    timed = first["event_time_ms"].is_valid()
    kinds = [JudgementKind(kind) for kind in first["kind"].to_pylist()]
    reasons = [f"further {SUMMED[kind]} in this minute: {n:,}" for n, kind in zip(messages.tolist(), kinds, strict=True)]
    return _batch(
        count,
        {
            **{name: first[name] for name in ("kind", "device_id", "site", "received_at_ms", "message_kind")},
            "event_time_ms": pc.if_else(timed, pa.array(np.minimum.reduceat(event_ms, starts)), None),
            "reason": pa.array(reasons),
            "late_by_ms": pc.if_else(first["late_by_ms"].is_valid(), pa.array(np.maximum.reduceat(late_by_ms, starts)), None),
            "messages": pa.array(messages),
            "event_time_until_ms": pc.if_else(timed, pa.array(np.maximum.reduceat(event_ms, starts)), None),
            "received_until_ms": _same(received_until_ms, count),
        },
    )


def _numbers(texts: pa.Array) -> Int64s:
    return texts.dictionary_encode().indices.to_numpy().astype(np.int64)


def _starts(keys: Sequence[Any], order: Int64s) -> Int64s:
    """Return the index of the first row of each group, for rows in an order that groups them."""
    differs = np.logical_or.reduce([key[order[1:]] != key[order[:-1]] for key in keys])
    return np.append(0, np.flatnonzero(differs) + 1)


def event_times(signals: pa.RecordBatch) -> pa.Array:
    """Return the event times of signals; null if invalid."""
    event_ms = signals["presence_ms"].to_numpy() + signals["offset_ms"].to_numpy()
    return pa.array(event_ms, mask=signals["trust"].to_numpy() == _INVALID)


def rejections(
    signals: pa.RecordBatch, verdict: JudgementKind, reasons: Sequence[str], late_by_ms: Int64s | None = None
) -> pa.RecordBatch:
    """Return judgements that list signals with a reason.

    Args:
        signals: columns of `SIGNAL_SCHEMA`.
        verdict: kind of the judgements.
        reasons: one reason for each signal, or one for all.
        late_by_ms: distance of each event time behind the frontier, milliseconds.
    """
    count = signals.num_rows
    seq = signals["seq"].to_numpy()
    columns = {
        "kind": _same(verdict.value, count),
        "device_id": signals["device_id"],
        "site": signals["site"].dictionary_decode(),
        "event_time_ms": event_times(signals),
        "gateway": signals["gateway"].dictionary_decode(),
        "received_at_ms": signals["received_at_ms"],
        "message_kind": _KIND_WORDS.take(signals["kind"]),
        "boot": signals["boot"],
        "seq": pa.array(seq, mask=seq < 0),
        "reason": _same(reasons[0], count) if len(reasons) == 1 else pa.array(reasons, pa.string()),
    }
    if late_by_ms is not None:
        columns["late_by_ms"] = pa.array(late_by_ms)
    return _batch(count, columns)


def transitions_to_batch(out: Matrix, devices: Devices, policies: Policies, signals: pa.RecordBatch) -> pa.RecordBatch:
    """Return the transitions that the compiled fold emitted.

    Args:
        out: output rows of the kernel, columns of `layout.OUT_FIELDS`; ``row`` is an index into
            ``signals``.
        devices: devices of the key group.
        policies: policies of the fold.
        signals: signals that were folded.
    """
    count, row = len(out), out[:, T_ROW]
    at = pa.array(row, mask=row < 0)
    seq = signals["seq"].take(at)
    versions = pa.array([dated.policy.version for dated in policies.dated])
    return _batch(
        count,
        {
            "kind": _same(JudgementKind.TRANSITION.value, count),
            "device_id": devices.ids.take(pa.array(out[:, T_DEVICE])),
            "site": _texts(devices.sites.words, out[:, T_SITE]),
            "event_time_ms": pa.array(out[:, T_AT]),
            "device_class": _texts(devices.classes.words, out[:, T_CLASS]),
            "life_ms": pa.array(out[:, T_LIFE]),
            "transition_no": pa.array(out[:, T_NUMBER]),
            "from_mode": _MODE_WORDS.take(pa.array(out[:, T_FROM])),
            "to_mode": _MODE_WORDS.take(pa.array(out[:, T_TO])),
            "trigger": _TRIGGER_WORDS.take(pa.array(out[:, T_TRIGGER])),
            "last_seen_ms": _instants(out[:, T_LAST_SEEN]),
            "runtime_ms": pa.array(out[:, T_RUNTIME]),
            "last_errors": _last_errors(out, devices.codes.words),
            "gateway": _texts(devices.gateways.words, out[:, T_GATEWAY]),
            "policy_version": versions.take(pa.array(out[:, T_POLICY])),
            "received_at_ms": signals["received_at_ms"].take(at),
            "message_kind": _KIND_WORDS.take(signals["kind"].take(at)),
            "boot": signals["boot"].take(at),
            "seq": pc.if_else(pc.less(seq, 0), None, seq),
        },
    )


def _last_errors(out: Matrix, error_codes: Sequence[str]) -> pa.Array:
    shown = np.ascontiguousarray(out[:, T_SHOWN])
    if not shown.any():
        return pa.nulls(len(out), pa.string())
    codes = firsts(out, np.arange(len(out)), T_CODES, shown)
    used, renumbered = in_use(codes, len(error_codes))
    quoted = pa.array([json.dumps(error_codes[one]) for one in used]).take(pa.array(renumbered))
    lists = pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(shown)), pa.int32()), quoted)
    texts = pc.binary_join_element_wise("[", pc.binary_join(lists, ", "), "]", "")
    return pc.if_else(pa.array(shown > 0), texts, None)
