"""Decode segments into the rows of the tables that landing writes.

Rule 1: `Decoder` defines the result. Plain messages of devices are decoded column by column, with
equal results.
Rule 2: a message is a row of ``messages`` or of ``quarantine``. A mapped message may be several rows,
or none if a rule ignores it. Gap and registry rows are also in a table of their own.
Rule 3: rows are ordered by ``received_at``; rows of one segment keep their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.hashing import hashes_of
from fleetpulse.columnar.compute import pc
from fleetpulse.core.messages.decode import Rejection, digest64
from fleetpulse.core.messages.mapping import NO_MAPPINGS, Decoded, Decoder, Mappings, rows_of
from fleetpulse.core.messages.replay_envelope import TOPIC_PREFIX, is_end
from fleetpulse.core.presence.coverage import MAX_RECORDED
from fleetpulse.core.presence.gateways import Gateways
from fleetpulse.core.presence.identities import SEPARATOR, DeviceIdentity, identified
from fleetpulse.core.registry.registry import LIMITS, limits
from fleetpulse.core.rows import KEPT_BYTES, SET_WHEN_READ, SPARED_BYTES, Kind, Origin, Reason, Row, hash64
from fleetpulse.core.tables import COVERAGE, DEVICES, GATEWAYS, MESSAGES, QUARANTINE, Table
from fleetpulse.io.ingest.batch_decode import PlainMessages, decode_plain
from fleetpulse.io.ingest.batch_mapping import decode_plain_mapped
from fleetpulse.io.ingest.segments import SegmentRow
from fleetpulse.io.tables import tables
from streaming.landing.gateways import Arrived, with_events
from streaming.landing.merge import Part, place

_OF_ROW: Final = tuple(field.name for field in fields(Row) if field.name not in SET_WHEN_READ)
_OF_MESSAGE: Final = (*_OF_ROW, "device_hash", "origin", "recording", "line")
_OF_SEGMENT: Final = ("origin", "recording", "line")
_OF_END: Final = ("origin", "topic", "recording")
_values: Final = attrgetter(*_OF_ROW)
_REFUSALS: Final[Mapping[Reason, str]] = {
    "flood": "the device exceeds the setting flood_limit or flood_bytes; of its excess messages, only the newest of each second "
    f"is judged, if it has at most {SPARED_BYTES:,} bytes",
    "new_device": "the bridge heard more new devices in an hour than the setting max_new_devices; register the device "
    "(./fleet device add), or raise the setting",
    "field": "a gap row must not share its received_at with another gap row of its bridge; their order would be unknown",
    "size": f"a recording may have at most {MAX_RECORDED:,} bridges with an open gap, or with a gap row at one instant",
    "topic": "a topic must have at most 512 bytes, all of printable characters; it is stored escaped and truncated",
}
_ORIGINS: Final = {origin.value: origin for origin in Origin}


@dataclass(slots=True)
class Landed:
    """Decoded rows of some segments, by table.

    Attributes:
        messages: parts of segments, each with its rows of ``messages`` and their places.
        surplus: for each message that makes not exactly one row: bridge, place, and number of rows minus one.
        quarantine, coverage, devices, gateways: rows of these tables, as values by column name.
    """

    messages: list[tuple[Part, NDArray[np.int64], pa.Table]] = field(default_factory=list[Any])
    surplus: list[tuple[str, int, int]] = field(default_factory=list[Any])
    quarantine: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    coverage: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    devices: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    gateways: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def by_table(self, places: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[Table, pa.Table]]:
        """Yield each table with its new rows, ``messages`` last.

        The lifecycle job reads ``messages``, so the other tables must be complete before.

        Args:
            places: place by table and bridge up to which the table already has the rows.
        """
        of_tables = (QUARANTINE, self.quarantine), (COVERAGE, self.coverage), (DEVICES, self.devices), (GATEWAYS, self.gateways)
        for table, found in of_tables:
            table_places = places[table.name]
            yield table, tables.to_table(table, (row for row in found if row["place"] >= table_places[row["bridge"]]))
        table_places = places[MESSAGES.name]
        fresh = [rows.slice(int(np.searchsorted(at, table_places[part.bridge]))) for part, at, rows in self.messages]
        yield MESSAGES, _by_receipt(pa.concat_tables(fresh)) if fresh else tables.from_columns(MESSAGES, {}, 0)

    def mark_gateway_events(self, gateways: Gateways) -> None:
        """Mark deaths and returns of gateways, see `gateways.with_events`."""
        arrived = [Arrived(places, rows) for _, places, rows in self.messages]
        marked, self.gateways = with_events(arrived, gateways)
        self.messages = [(part, places, rows) for (part, places, _), rows in zip(self.messages, marked, strict=True)]

    def refused(self, places: Mapping[str, int]) -> int:
        """Count the rows that belong in quarantine, from a place of each bridge on.

        Rows that are already in quarantine count, too.

        Args:
            places: place by bridge from which rows count.
        """
        return sum(row["place"] >= places[row["bridge"]] for row in self.quarantine)

    def surplus_rows(self, places: Mapping[str, int]) -> int:
        """Return the number of rows minus the number of messages, from a place of each bridge on.

        Args:
            places: place by bridge from which messages count.
        """
        return sum(rows for bridge, at, rows in self.surplus if at >= places[bridge])


def accepted_rows(parts: Sequence[Part], places: Mapping[str, int]) -> int:
    """Count the rows of segments that belong in ``messages`` or in ``quarantine``.

    The count is taken from the segments, independently of decoding, so it reveals rows that get
    lost.

    Args:
        parts: parts of segments.
        places: place by bridge from which rows count.
    """
    fresh = (part.rows.slice(max(0, places[part.bridge] - place(part.segment, part.first))) for part in parts)
    return sum(rows.num_rows - _ends(rows) for rows in fresh)


def _ends(rows: pa.Table) -> int:
    """Count the end lines of recordings: they concern the bridge and land in no table."""
    played = pc.equal(rows["origin"], Origin.REPLAY.value)
    if not pc.any(played).as_py():
        return 0
    named = rows.select(_OF_END).filter(pc.and_(played, pc.starts_with(rows["topic"], TOPIC_PREFIX)))
    return sum(is_end(**row) for row in named.to_pylist())


def _by_receipt(rows: pa.Table) -> pa.Table:
    received = rows["received_at"].cast(pa.int64()).to_numpy()
    return rows if (np.diff(received) >= 0).all() else rows.take(np.argsort(received, kind="stable"))


def decode_parts(
    parts: Sequence[Part], decoder: Decoder, identity: DeviceIdentity = DeviceIdentity.ID, mappings: Mappings = NO_MAPPINGS
) -> Landed:
    """Decode the parts that land at once.

    Args:
        parts: parts of segments, see `merge.merged`.
        decoder: function from a message to its result; must equal `decode` for topics below ``fleet/``.
        identity: identity scheme of devices.
        mappings: mappings that ``decoder`` uses; plain messages that they match are decoded on columns.
    """
    landed = Landed()
    if identity is not DeviceIdentity.ID:
        decoder = partial(_identified, decoder, identity)
    for part in parts:
        part = replace(part, rows=part.rows.combine_chunks())
        plain, rows = _decode_columns(part, mappings)
        if identity is DeviceIdentity.SITE_AND_ID:
            rows = _with_sites(rows)
        if len(plain) < part.rows.num_rows:
            irregular = np.setdiff1d(np.arange(part.rows.num_rows), plain, assume_unique=True)
            at, others = _decode_rows(landed, part, irregular, decoder)
            plain, rows = _in_order([(plain, rows), (at, others)])
        landed.messages.append((part, plain + place(part.segment, part.first), rows))
    return landed


def _decode_columns(part: Part, mappings: Mappings) -> tuple[NDArray[np.int64], pa.Table]:
    """Decode the plain rows of a part; return their indexes and rows of ``messages``."""
    topics, payloads = (part.rows[name].chunk(0) for name in ("topic", "payload"))
    accepted = part.rows["refused"].is_null().to_numpy().copy()
    received_at_ms = part.rows["received_at_ms"].to_numpy()
    own = decode_plain(topics, payloads, received_at_ms, accepted)
    decoded = [(own.places, _with_segment(own, part))]
    if mappings.rules and len(own.places) < part.rows.num_rows:
        accepted[own.places] = False
        mapped = decode_plain_mapped(mappings, topics, payloads, received_at_ms, accepted)
        decoded.append((mapped.places, _with_segment(mapped, part)))
    return _in_order(decoded)


def _with_segment(read: PlainMessages, part: Part) -> pa.Table:
    """Return plain messages with the columns that are copied from their segment."""
    copied = part.rows.select(["received_at_ms", *_OF_SEGMENT])
    copied = copied if len(read.places) == copied.num_rows else copied.take(read.places)
    columns = {name: table[name] for table in (read.columns, copied) for name in table.column_names}
    return _messages(columns, part, read.places)


def _with_sites(rows: pa.Table) -> pa.Table:
    """Prefix the ids of devices and gateways with their site, see `identified`."""
    for name in ("device_id", "gateway"):
        joined = pc.binary_join_element_wise(rows["site"], rows[name], SEPARATOR)  # null without a gateway
        joined = pc.if_else(pc.match_substring(rows[name], SEPARATOR), rows[name], joined)
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), joined.cast(pa.string()))
    ids = rows["device_id"].combine_chunks().dictionary_encode()
    hashes = pa.array(hashes_of(ids.dictionary)).take(ids.indices)
    return rows.set_column(rows.schema.get_field_index("device_hash"), rows.schema.field("device_hash"), hashes)


def _identified(
    decoder: Decoder, identity: DeviceIdentity, topic: str, payload: bytes, received_at_ms: int, origin: Origin
) -> tuple[Row | Rejection, ...]:
    rows = rows_of(decoder(topic, payload, received_at_ms, origin))
    return tuple(identified(row, identity) if isinstance(row, Row) else row for row in rows)


def _messages(columns: Mapping[str, Any], part: Part, at: NDArray[np.int64]) -> pa.Table:
    where = {"bridge": pa.repeat(pa.scalar(part.bridge), len(at)), "segment": pa.repeat(pa.scalar(part.segment), len(at))}
    stamped = {} if part.stamped is None else {"stamped_at_ms": part.stamped.take(pa.array(at))}
    placed = {"position": pa.array(part.placed()[at])}
    return tables.from_columns(MESSAGES, {**columns, **where, **stamped, **placed}, len(at))


def _in_order(parts: list[tuple[NDArray[np.int64], pa.Table]]) -> tuple[NDArray[np.int64], pa.Table]:
    """Merge rows in the order of their places."""
    filled = [(at, rows) for at, rows in parts if len(at)]
    if len(filled) < 2:
        return filled[0] if filled else parts[0]
    places = np.concatenate([at for at, _ in filled])
    order = np.argsort(places, kind="stable")  # the rows of one message share a place
    return places[order], pa.concat_tables([rows for _, rows in filled]).combine_chunks().take(order)


def _decode_rows(
    landed: Landed, part: Part, irregular: NDArray[np.int64], decoder: Decoder
) -> tuple[NDArray[np.int64], pa.Table]:
    """Decode rows one by one into their tables; return indexes and rows of ``messages``."""
    values: list[tuple[Any, ...]] = []
    indexes: list[int] = []
    columns = (column.to_pylist() for column in part.rows.take(irregular).columns)
    for at, raw in zip(irregular.tolist(), map(SegmentRow._make, zip(*columns, strict=True)), strict=True):
        if is_end(raw.origin, raw.topic, raw.recording):
            continue  # see `_ends`
        rows = rows_of(_decoded(raw, decoder))
        if len(rows) != 1:
            landed.surplus.append((part.bridge, place(part.segment, part.first + at), len(rows) - 1))
        kept = _beginning(raw) if any(isinstance(row, Rejection) for row in rows) else {}
        for row in rows:
            if isinstance(row, Row):
                indexes.append(at)
                values.append((*_values(row), hash64(row.device_id), raw.origin, raw.recording, raw.line))
                _add_own_row(landed, row, _arrival(raw, part, at))
            else:
                refused = {"topic": raw.topic, "reason": row.reason, "detail": row.detail}
                landed.quarantine.append({**refused, **kept, **_arrival(raw, part, at)})
                kept |= {"payload": b""}  # only the first refused row of a message keeps its payload
    by_name = dict(zip(_OF_MESSAGE, zip(*values, strict=True), strict=True)) if values else {}
    places = np.array(indexes, np.int64)
    return places, _messages(by_name, part, places)


def _decoded(raw: SegmentRow, decoder: Decoder) -> Decoded:
    if raw.refused is not None:
        reason = cast("Reason", raw.refused)
        return Rejection(reason, _REFUSALS.get(reason, reason))
    return decoder(raw.topic, raw.payload, raw.received_at_ms, _ORIGINS[raw.origin])


def _beginning(raw: SegmentRow) -> dict[str, Any]:
    """Return the kept beginning of a refused payload, with size and digest of the whole payload."""
    whole = raw.payload_bytes is None
    return {
        "payload": raw.payload[:KEPT_BYTES],
        "payload_bytes": len(raw.payload) if whole else raw.payload_bytes,
        "payload_digest": digest64(raw.payload) if whole else raw.payload_digest,
        "messages": raw.messages or 1,
    }


def _add_own_row(landed: Landed, row: Row, arrival: Mapping[str, Any]) -> None:
    if row.kind is Kind.GAP:
        landed.coverage.append({**_gap(row), **arrival})
    elif row.kind is Kind.REGISTRY:
        landed.devices.append({**_change(row), **arrival})


def _arrival(raw: SegmentRow, part: Part, at: int) -> dict[str, Any]:
    return {
        "received_at_ms": raw.received_at_ms,
        "origin": raw.origin,
        "recording": raw.recording,
        "line": raw.line,
        "bridge": part.bridge,
        "segment": part.segment,
        "place": place(part.segment, part.first + at),
    }


def _gap(row: Row) -> dict[str, Any]:
    content = row.contents()
    opened = content.get("op") == "open"
    at_ms = content.get("from" if opened else "until")
    return {"op": str(content.get("op")), "at_ms": at_ms if type(at_ms) is int else None, "why": content.get("why")}


def _change(row: Row) -> dict[str, Any]:
    content = row.contents()
    return {
        "effective_from_ms": row.event_time_ms,
        "device_id": row.device_id,
        "site": row.site,
        "op": str(content.get("op")),
        "device_class": content.get("class"),
        "gateway": content.get("gateway"),
        **dict(zip(LIMITS, _limits(content), strict=True)),
    }


def _limits(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    try:
        return limits(content)
    except ValueError:
        return None, None  # the lifecycle job refuses the row
