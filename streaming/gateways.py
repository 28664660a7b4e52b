"""What landing finds of gateways: the deaths and returns that the devices behind them heed, and what it remembers for that.

Rule 1: rows are read in the order in which they land; ``core.gateways`` says what each is.
Rule 2: what is remembered is in the table ``gateways``, and is written before the messages: a landing that starts again goes on
from the rows up to which the messages have come.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from fleetpulse.core.gateways import Gateway, Gateways
from fleetpulse.core.messages import SIGNALS, Clock, GatewayEvent, Kind, Row
from fleetpulse.core.tables import GATEWAYS
from fleetpulse.io import delta
from fleetpulse.io.home import Home

pc: Any = pyarrow.compute  # its functions are made at run time: no checker knows them
_SIGNALS: Final = pa.array(sorted(SIGNALS))
_EVENT: Final = "gateway_event"
_SESSION: Final = "session"  # the event of a row that only names another session or boot
_OF_ARRIVAL: Final = ("origin", "recording", "line", "bridge", "segment")


def known_gateways(home: Home, come: Mapping[str, int]) -> list[Gateway]:
    """Return what is remembered of gateways.

    Args:
        home: the home.
        come: up to which row of each bridge the messages have come.
    """
    if not delta.paths_of(home, GATEWAYS):
        return []
    beyond = " AND ".join("NOT (bridge = ? AND place >= ?)" for _ in come)
    sql = f"""SELECT device_id, epoch_ms(dead_since) AS dead_since_ms, session, boot FROM gateways WHERE {beyond}
        QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY received_at DESC, place DESC) = 1"""
    wanted = [value for pair in come.items() for value in pair]
    return [Gateway(**found) for found in delta.query(home, sql, wanted, tables=[GATEWAYS.name])]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages of one bridge that land.

    Attributes:
        places: of each, see `merging.place`.
        rows: columns of `MESSAGES`.
    """

    places: NDArray[np.int64]
    rows: pa.Table


def with_events(parts: Sequence[Arrived], gateways: Gateways) -> tuple[list[pa.Table], list[dict[str, Any]]]:
    """Find deaths and returns of gateways among messages.

    Args:
        parts: what lands at once.
        gateways: what is remembered; it takes the messages in.

    Returns:
        The messages of each part with their events, and rows of `GATEWAYS`.
    """
    dead = {name for name, known in gateways.known.items() if known.dead_since_ms is not None}
    named = [_names_itself(part.rows) for part in parts]
    for part, itself in zip(parts, named, strict=True):
        died = part.rows.filter(pc.and_(itself, pc.equal(part.rows["kind"], Kind.DEATH.value)))
        dead |= {*died["device_id"].to_pylist()}
    found: list[dict[str, Any]] = []
    events: list[dict[int, GatewayEvent]] = [{} for _ in parts]
    for number, at, row, arrival in _in_order(parts, named, pa.array(sorted(dead), pa.string())):
        before = gateways.known.get(row.device_id)
        event = gateways.read(row)
        after = gateways.known.get(row.device_id)
        if event is not None:
            events[number][at] = event
        if event is not None or after != before:
            stands = after or Gateway(row.device_id)
            known = {"dead_since_ms": stands.dead_since_ms, "session": stands.session, "boot": stands.boot}
            what = {"received_at_ms": row.received_at_ms, "device_id": row.device_id, "event": event or _SESSION}
            found.append({**what, **known, **arrival})
    return [_marked(part.rows, its) for part, its in zip(parts, events, strict=True)], found


def _names_itself(rows: pa.Table) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(rows["gateway"], rows["device_id"]), fill_value=False)


def _in_order(
    parts: Sequence[Arrived], named: Sequence[pa.ChunkedArray], dead: pa.Array
) -> Iterator[tuple[int, int, Row, dict[str, Any]]]:
    """Yield the messages that matter, in the order in which they land: number of the part, place there, row, arrival."""
    found: list[tuple[int, int, int]] = []
    chosen: list[list[dict[str, Any]]] = []
    for number, (part, itself) in enumerate(zip(parts, named, strict=True)):
        rows = part.rows
        says = pc.or_(pc.or_(pc.is_valid(rows["session"]), pc.is_valid(rows["boot"])), pc.equal(rows["kind"], Kind.DEATH.value))
        returns = pc.and_(pc.is_in(rows["device_id"], value_set=dead), pc.is_in(rows["kind"], value_set=_SIGNALS))
        places = pc.indices_nonzero(pc.or_(pc.and_(itself, says), returns)).to_pylist()
        some = rows.take(pa.array(places, pa.int64())).to_pylist()
        received = [_millis(row["received_at"]) for row in some]
        found += ((at_ms, number, nth) for nth, at_ms in enumerate(received))
        arrivals = zip(some, places, part.places[places].tolist(), strict=True)
        chosen.append([{**row, "at": at, "place": place} for row, at, place in arrivals])
    for _, number, nth in sorted(found, key=lambda one: one[0]):  # stable: of one instant in the order of the parts
        one = chosen[number][nth]
        yield number, one["at"], _row(one), {**{name: one[name] for name in _OF_ARRIVAL}, "place": one["place"]}


def _row(found: Mapping[str, Any]) -> Row:
    event_time = found["event_time"]
    return Row(
        _millis(found["received_at"]),
        Kind(found["kind"]),
        found["device_id"],
        found["site"],
        None if event_time is None else _millis(event_time),
        Clock(found["clock"]),
        boot=found["boot"],
        gateway=found["gateway"],
        session=found["session"],
    )


def _millis(instant: Any) -> int:
    return round(instant.timestamp() * 1000)


def _marked(rows: pa.Table, events: Mapping[int, GatewayEvent]) -> pa.Table:
    if not events:
        return rows
    words: list[str | None] = [None] * rows.num_rows
    for at, event in events.items():
        words[at] = event.value
    place = rows.schema.get_field_index(_EVENT)
    return rows.set_column(place, rows.schema.field(place), pa.array(words, rows.schema.field(place).type))
