"""Mark deaths and returns of gateways in messages; keep records of gateways.

Rule 1: messages are processed in landing order; ``core.presence.gateways`` defines the events.
Rule 2: the table ``gateways`` is written before the messages of the same commit. After a restart,
landing restores the records as of the last message that has landed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fleetpulse.columnar.compute import pc
from fleetpulse.core.presence.gateways import Gateway, Gateways
from fleetpulse.core.rows import Clock, GatewayEvent, Kind, Row
from fleetpulse.core.tables import GATEWAYS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

_EVENT: Final = "gateway_event"
_SESSION: Final = "session"  # event of a row that only names another session or boot
_INSTANTS: Final = ("received_at", "event_time")
_OF_ROW: Final = ("device_id", "site", "kind", "clock", "boot", "gateway", "session", "seq")
_OF_ARRIVAL: Final = ("origin", "recording", "line", "bridge", "segment")
_NAMES: Final = ("session", "boot")
_TIMES: Final = ("dead_since", "event_time")
_RECORD: Final = ("dead_since", *_NAMES, "site", "seq", "event_time")  # as in `Gateway`
_NEWEST: Final = [(name, "last", pc.ScalarAggregateOptions(skip_nulls=False)) for name in _RECORD]


def known_gateways(home: Home, places: Mapping[str, int]) -> list[Gateway]:
    """Read the newest record of each gateway from the table ``gateways``.

    Args:
        home: home of the tables.
        places: place (`merge.place`) by bridge up to which messages have landed; later records are
            ignored.
    """
    paths = tables.paths_of(home, GATEWAYS)
    if not paths:
        return []
    names = ["received_at", "bridge", "place", "device_id", *_RECORD]
    records = pa.concat_tables([pq.ParquetFile(path).read(names) for path in paths])
    for bridge, place in places.items():
        beyond = pc.and_(pc.equal(records["bridge"], bridge), pc.greater_equal(records["place"], place))
        records = records.filter(pc.invert(beyond))
    records = records.sort_by([("received_at", "ascending"), ("place", "ascending")])
    newest = records.group_by("device_id", use_threads=False).aggregate(_NEWEST)
    values = [newest[f"{name}_last"] for name in _RECORD]
    columns = [_millis(column) if name in _TIMES else column for name, column in zip(_RECORD, values, strict=True)]
    records = (newest["device_id"], *columns)
    return [Gateway(*fields) for fields in zip(*(column.to_pylist() for column in records), strict=True)]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages of one segment that land.

    Attributes:
        places: place of each message, see `merge.place`.
        rows: columns of `MESSAGES`.
    """

    places: NDArray[np.int64]
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Message that may change the record of a gateway.

    Attributes:
        part: index of its part in the call.
        index: index of its row in the part.
        row: the message, decoded.
        arrival: columns for the record, from origin to place.
    """

    part: int
    index: int
    row: Row
    arrival: Mapping[str, Any]


def with_events(parts: Sequence[Arrived], gateways: Gateways) -> tuple[list[pa.Table], list[dict[str, Any]]]:
    """Mark deaths and returns of gateways in messages.

    Args:
        parts: messages that land at once.
        gateways: records of all gateways; updated in place.

    Returns:
        The messages of each part with the column ``gateway_event``, and rows of `GATEWAYS`.
    """
    records: list[dict[str, Any]] = []
    events: list[dict[int, GatewayEvent]] = [{} for _ in parts]
    for one in _candidates(parts, gateways):
        before = gateways.known.get(one.row.device_id)
        event = gateways.read(one.row)
        after = gateways.known.get(one.row.device_id)
        if event is not None:
            events[one.part][one.index] = event
        if event is not None or after != before:
            records.append({**_record(one.row, event, after or Gateway(one.row.device_id)), **one.arrival})
    return [_marked(part.rows, part_events) for part, part_events in zip(parts, events, strict=True)], records


def _record(row: Row, event: GatewayEvent | None, gateway: Gateway) -> dict[str, Any]:
    return {
        "received_at_ms": row.received_at_ms,
        "device_id": row.device_id,
        "event": event or _SESSION,
        "dead_since_ms": gateway.dead_since_ms,
        "session": gateway.session,
        "boot": gateway.boot,
        "site": gateway.site,
        "seq": gateway.seq,
        "event_time_ms": gateway.event_time_ms,
    }


def _candidates(parts: Sequence[Arrived], gateways: Gateways) -> Iterator[_Candidate]:
    """Yield the messages that may change a record, in landing order.

    Nearly all messages change none, so the candidates are selected on columns. They are the
    messages of two sets of gateways:

    - gateways that are dead, or die in this call;
    - gateways with a message that names another session or boot than the record.
    """
    chosen = {name for name, record in gateways.known.items() if record.dead_since_ms is not None}
    known = pa.array(sorted(gateways.known), pa.string())
    for part in parts:
        rows = part.rows.select(["device_id", *_NAMES])
        itself = pc.fill_null(pc.equal(part.rows["gateway"], rows["device_id"]), fill_value=False)
        died = pc.and_(itself, pc.equal(part.rows["kind"], Kind.DEATH.value))
        chosen.update(pc.unique(rows["device_id"].filter(died)).to_pylist())
        named = pc.or_(*(pc.is_valid(rows[name]) for name in _NAMES))
        is_gateway = pc.or_(itself, pc.is_in(rows["device_id"], value_set=known))
        chosen.update(_with_another_name(rows.filter(pc.and_(is_gateway, named)), gateways))
    if not chosen:
        return
    found: list[_Candidate] = []
    for number, part in enumerate(parts):
        is_chosen = pc.is_in(part.rows["device_id"], value_set=pa.array(sorted(chosen)))
        found += _candidates_of(part, number, pc.indices_nonzero(is_chosen))
    yield from sorted(found, key=lambda one: one.row.received_at_ms)  # stable: equal instants keep the order of parts


def _with_another_name(rows: pa.Table, gateways: Gateways) -> Iterator[str]:
    """Yield gateways with a message that names another session or boot than their record.

    Each combination of gateway, session and boot is checked once.
    """
    for device_id, *names in zip(*rows.group_by(rows.column_names).aggregate([]).to_pydict().values(), strict=True):
        record = gateways.known.get(device_id, Gateway(device_id))
        if any(name not in (None, known) for name, known in zip(names, (record.session, record.boot), strict=True)):
            yield device_id


def _candidates_of(part: Arrived, number: int, indexes: pa.Array) -> Iterator[_Candidate]:
    rows = part.rows.select([*_INSTANTS, *_OF_ROW, *_OF_ARRIVAL]).take(indexes)
    received, happened = (_millis(rows[name]).to_pylist() for name in _INSTANTS)
    places = part.places[indexes.to_numpy()].tolist()
    values = rows.select([*_OF_ROW, *_OF_ARRIVAL]).to_pylist()
    for index, at_ms, event_ms, place, fields in zip(indexes.to_pylist(), received, happened, places, values, strict=True):
        row_fields: dict[str, Any] = {name: fields[name] for name in _OF_ROW}
        row = Row(
            at_ms, event_time_ms=event_ms, **{**row_fields, "kind": Kind(row_fields["kind"]), "clock": Clock(row_fields["clock"])}
        )
        yield _Candidate(number, index, row, {**{name: fields[name] for name in _OF_ARRIVAL}, "place": place})


def _millis(instants: pa.ChunkedArray) -> pa.ChunkedArray:
    return instants.cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())


def _marked(rows: pa.Table, events: Mapping[int, GatewayEvent]) -> pa.Table:
    if not events:
        return rows
    values: list[str | None] = [None] * rows.num_rows
    for index, event in events.items():
        values[index] = event.value
    place = rows.schema.get_field_index(_EVENT)
    return rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))
