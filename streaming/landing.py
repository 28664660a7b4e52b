"""Landing: segments become bronze, once each, in the order of ``received_at``.

Rule 1: every table's commit says up to which row of each bridge it has come, so a crash between two commits repeats nothing.
Rule 2: a row lands in ``messages`` or in ``quarantine``; our own rows in their table as well. Nothing is dropped.
Rule 3: a segment is removed when every table has it; the newest stays, for it is the bridge's memory.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, Final

import pyarrow as pa
import structlog

from fleetpulse.core.decoding import Rejection, decode
from fleetpulse.core.envelope import TOPIC_PREFIX
from fleetpulse.core.messages import BRIDGE, Kind, Origin, Row, hash64
from fleetpulse.core.tables import COVERAGE, DEVICES, MESSAGES, QUARANTINE, TABLES, Table
from fleetpulse.io import delta
from fleetpulse.io.home import Home
from fleetpulse.io.leases import LEASE_MS
from fleetpulse.io.process import Stop, write_status
from fleetpulse.io.segments import SegmentRow
from streaming.bridges import Bridges, tidy
from streaming.merging import PLACES, Part, merged, place

_LOG: Final = structlog.get_logger("landing")
_BEFORE: Final = f"landing:{BRIDGE}"  # counted whole segments of the one bridge there was
_NEWEST: Final = "newest"  # counts milliseconds: the newest received_at that has landed
MAX_ROWS: Final = 20_000  # a commit: it bounds memory, and the rows of one version of bronze
MAX_BYTES: Final = 64 * 1024 * 1024  # that are read of a bridge
_OF_ROW: Final = tuple(field.name for field in fields(Row))
_OF_MESSAGE: Final = (*_OF_ROW, "device_hash", "origin", "recording", "line", "bridge", "segment", "stamped_at_ms", "place")
_values: Final = attrgetter(*_OF_ROW)
_REFUSALS: Final = {"flood": "its device sends more than it may: see the setting flood_limit; what it sent before is judged"}
_ORIGINS: Final = {origin.value: origin for origin in Origin}
_BRIDGE: Final = _OF_MESSAGE.index("bridge")
_Where = tuple[str, int, int | None, int]  # bridge, segment, received_at as the bridge had it where it was lifted, place
Decoder = Callable[[str, bytes, int, Origin], Row | Rejection]


@dataclass(slots=True)
class Landed:
    """The rows of some segments, by the table that they go to.

    Attributes:
        messages: values in the order of `_OF_MESSAGE`: there are many, and a mapping each would cost as much as decoding.
        quarantine, coverage, devices: by column.
    """

    messages: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    quarantine: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    coverage: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    devices: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def by_table(self, places: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[Table, pa.Table]]:
        """Yield tables with their rows; messages last: what the stream reads is complete by then.

        Args:
            places: by table and bridge, up to where it has come already.
        """
        for table, found in ((QUARANTINE, self.quarantine), (COVERAGE, self.coverage), (DEVICES, self.devices)):
            come = places[table.name]
            yield table, delta.to_table(table, (row for row in found if row["place"] >= come[row["bridge"]]))
        come = places[MESSAGES.name]
        fresh = [row for row in self.messages if row[-1] >= come[row[_BRIDGE]]]
        fresh.sort(key=itemgetter(0))
        columns = dict(zip(_OF_MESSAGE, zip(*fresh, strict=True), strict=True)) if fresh else {}
        yield MESSAGES, delta.from_columns(MESSAGES, columns, len(fresh))


def decode_parts(parts: Sequence[Part], decoder: Decoder) -> Landed:
    """Decode what lands at once, row by row.

    Args:
        parts: of segments, see `merging.merged`.
        decoder: makes a row of a message, or says why not.
    """
    landed = Landed()
    for part in parts:
        stamped = repeat(None) if part.stamped is None else part.stamped.to_pylist()
        raws = map(SegmentRow._make, zip(*(column.to_pylist() for column in part.rows.columns), strict=True))
        for at, (raw, stamped_ms) in enumerate(zip(raws, stamped, strict=False), part.first):
            if raw.origin == Origin.REPLAY and raw.topic.startswith(TOPIC_PREFIX):
                continue  # the line after a recording's last: it tells the bridge, not the tables
            _sort_in(landed, raw, (part.bridge, part.segment, stamped_ms, place(part.segment, at)), decoder)
    return landed


def _sort_in(landed: Landed, raw: SegmentRow, where: _Where, decoder: Decoder) -> None:
    if raw.refused is not None:
        row: Row | Rejection = Rejection(raw.refused, _REFUSALS.get(raw.refused, raw.refused))
    else:
        row = decoder(raw.topic, raw.payload, raw.received_at_ms, _ORIGINS[raw.origin])
    if isinstance(row, Row):
        arrival = (raw.origin, raw.recording, raw.line)
        landed.messages.append((*_values(row), hash64(row.device_id), *arrival, *where))
        if row.kind is Kind.GAP:
            landed.coverage.append({**_gap(row), **_arrival(raw, where)})
        elif row.kind is Kind.REGISTRY:
            landed.devices.append({**_change(row), **_arrival(raw, where)})
        return
    refused = {"topic": raw.topic, "payload": raw.payload, "reason": row.reason, "detail": row.detail}
    landed.quarantine.append({**refused, **_arrival(raw, where)})


def _arrival(raw: SegmentRow, where: _Where) -> dict[str, Any]:
    return {
        "received_at_ms": raw.received_at_ms,
        "origin": raw.origin,
        "recording": raw.recording,
        "line": raw.line,
        "bridge": where[0],
        "segment": where[1],
        "place": where[3],
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
    }


def places_of(home: Home, table: Table) -> dict[str, int]:
    """Return up to which row of each bridge a table has come, see `merging.place`."""
    found = {name: delta.landed(home, table, f"rows:{name}") for name in home.bridges()}
    whole = 0 if found[BRIDGE] else delta.landed(home, table, _BEFORE)
    return {**found, BRIDGE: found[BRIDGE] or place(whole + 1, 0)}


class Landing:
    """Lands the segments of a home.

    Args:
        home: the home.
        decoder: makes a row of a message, or says why not.
        lease_ms: how long one of several bridges may say nothing before the others go on without it.
    """

    def __init__(self, home: Home, decoder: Decoder = decode, lease_ms: int = LEASE_MS) -> None:
        self.home = home
        self.decoder = decoder
        for table in TABLES:
            delta.create(home, table)
        self.folders = {name: home.segments_of(name) for name in home.bridges()}
        self.bridges = Bridges(self.folders, _now_ms(), lease_ms)
        self.places = {table.name: places_of(home, table) for table in (QUARANTINE, COVERAGE, DEVICES, MESSAGES)}
        self.newest_ms = delta.landed(home, MESSAGES, _NEWEST) or None
        self.rows = 0
        self.last_line: tuple[str, int] | None = None

    def step(self) -> int:
        """Land what there is, at most one commit a table; return how many segments had rows in it."""
        least = {name: min(places[name] for places in self.places.values()) for name in self.folders}
        backlogs = self.bridges.backlogs(least, _now_ms(), MAX_ROWS, MAX_BYTES)
        parts = merged(backlogs, self.newest_ms, MAX_ROWS)
        if not parts:
            return 0
        ends = {part.bridge: part.end for part in parts}
        newest_ms = max(int(part.rows["received_at_ms"][-1].as_py()) for part in parts)
        for table, rows in decode_parts(parts, self.decoder).by_table(self.places):
            if rows.num_rows or table is MESSAGES:
                numbers = {f"rows:{name}": end for name, end in ends.items()}
                delta.append_of(self.home, table, rows, {**numbers, _NEWEST: newest_ms})
            self.places[table.name] |= ends
            self.rows += rows.num_rows if table is MESSAGES else 0
        self.newest_ms = newest_ms
        self._note(parts[-1].rows)
        tidy(self.folders, {name: min(places[name] for places in self.places.values()) for name in self.folders})
        return len(parts)

    def _note(self, rows: pa.Table) -> None:
        last = rows.slice(rows.num_rows - 1).to_pylist()[0]
        if last["recording"] is not None:
            self.last_line = (last["recording"], last["line"])

    def status(self) -> dict[str, Any]:
        """Return how far landing is."""
        recording, line = self.last_line or (None, None)
        return {
            "pid": os.getpid(),
            "segment": self.places[MESSAGES.name][BRIDGE] // PLACES,
            "rows": self.rows,
            "recording": recording,
            "line": line,
            "received_at_ms": self.newest_ms,
        }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def run_landing(home: Home, decoder: Decoder, stop: Stop, pause_s: float = 0.2, lease_ms: int = LEASE_MS) -> None:
    """Land until stopped; a full disk is waited out."""
    landing = Landing(home, decoder, lease_ms)
    problem = None
    written = 0.0
    while not stop.is_set():
        try:
            idle = landing.step() == 0
            problem = None
        except OSError as error:  # deltalake says OSError for a full disk as well
            problem, idle = f"cannot write: {error}", True
            _LOG.error("landing cannot write; it goes on when it can", error=str(error))
            stop.wait(1.0)
            landing = Landing(home, decoder, lease_ms)
        if time.monotonic() - written > 0.5:
            write_status(home.run("landing"), {**landing.status(), "problem": problem})
            written = time.monotonic()
        if idle:
            stop.wait(pause_s)
    write_status(home.run("landing"), {**landing.status(), "problem": problem})
