"""Landing: segments become bronze, once each.

Rule 1: every table's commit says up to which segment it has come, so a crash between two commits repeats nothing.
Rule 2: a row lands in ``messages`` or in ``quarantine``; our own rows in their table as well. Nothing is dropped.
Rule 3: a segment is removed when every table has it; the newest stays, for it is the bridge's memory.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog

from fleetpulse.core.decoding import Rejection, decode
from fleetpulse.core.envelope import TOPIC_PREFIX
from fleetpulse.core.messages import Kind, Origin, Row, hash64
from fleetpulse.core.tables import COVERAGE, DEVICES, MESSAGES, QUARANTINE, TABLES, Table
from fleetpulse.io import delta
from fleetpulse.io.home import BRIDGE, Home
from fleetpulse.io.process import Stop, write_status
from fleetpulse.io.segments import SegmentRow, list_segments, read_segment

_LOG: Final = structlog.get_logger("landing")
WRITER: Final = f"landing:{BRIDGE}"
MAX_ROWS: Final = 20_000  # a commit: it bounds memory, and the rows of one version of bronze
_OF_ROW: Final = tuple(field.name for field in fields(Row))
_OF_MESSAGE: Final = (*_OF_ROW, "device_hash", "origin", "recording", "line", "bridge", "segment")
_values: Final = attrgetter(*_OF_ROW)
_REFUSALS: Final = {"flood": "its device sends more than it may: see the setting flood_limit; what it sent before is judged"}
_ORIGINS: Final = {origin.value: origin for origin in Origin}
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

    def by_table(self, landed: Mapping[str, int]) -> Iterator[tuple[Table, pa.Table]]:
        """Yield tables with their rows; messages last: what the stream reads is complete by then.

        Args:
            landed: up to which segment each table has come already.
        """
        for table, found in ((QUARANTINE, self.quarantine), (COVERAGE, self.coverage), (DEVICES, self.devices)):
            yield table, delta.to_table(table, (row for row in found if row["segment"] > landed[table.name]))
        fresh = [row for row in self.messages if row[-1] > landed[MESSAGES.name]]
        columns = dict(zip(_OF_MESSAGE, zip(*fresh, strict=True), strict=True)) if fresh else {}
        yield MESSAGES, delta.from_columns(MESSAGES, columns, len(fresh))


def decode_segments(segments: list[tuple[int, Path]], decoder: Decoder) -> Landed:
    """Decode segments, row by row.

    Args:
        segments: number and path, in order.
        decoder: makes a row of a message, or says why not.
    """
    landed = Landed()
    for number, path in segments:
        table = read_segment(path)
        for raw in map(SegmentRow._make, zip(*(column.to_pylist() for column in table.columns), strict=True)):
            if raw.origin == Origin.REPLAY and raw.topic.startswith(TOPIC_PREFIX):
                continue  # the line after a recording's last: it tells the bridge, not the tables
            _sort_in(landed, raw, number, decoder)
    return landed


def _sort_in(landed: Landed, raw: SegmentRow, number: int, decoder: Decoder) -> None:
    if raw.refused is not None:
        row: Row | Rejection = Rejection(raw.refused, _REFUSALS.get(raw.refused, raw.refused))
    else:
        row = decoder(raw.topic, raw.payload, raw.received_at_ms, _ORIGINS[raw.origin])
    if isinstance(row, Row):
        arrival = (raw.origin, raw.recording, raw.line, BRIDGE, number)
        landed.messages.append((*_values(row), hash64(row.device_id), *arrival))
        if row.kind is Kind.GAP:
            landed.coverage.append({**_gap(row), **_arrival(raw, number)})
        elif row.kind is Kind.REGISTRY:
            landed.devices.append({**_change(row), **_arrival(raw, number)})
        return
    refused = {"topic": raw.topic, "payload": raw.payload, "reason": row.reason, "detail": row.detail}
    landed.quarantine.append({**refused, **_arrival(raw, number)})


def _arrival(raw: SegmentRow, number: int) -> dict[str, Any]:
    return {
        "received_at_ms": raw.received_at_ms,
        "origin": raw.origin,
        "recording": raw.recording,
        "line": raw.line,
        "bridge": BRIDGE,
        "segment": number,
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


class Landing:
    """Lands the segments of a home.

    Args:
        home: the home.
        decoder: makes a row of a message, or says why not.
    """

    def __init__(self, home: Home, decoder: Decoder = decode) -> None:
        self.home = home
        self.decoder = decoder
        for table in TABLES:
            delta.create(home, table)
        self.landed = {table.name: delta.landed(home, table, WRITER) for table in (QUARANTINE, COVERAGE, DEVICES, MESSAGES)}
        self.rows = 0
        self.last_line: tuple[str, int] | None = None
        self.newest_ms: int | None = None

    def step(self) -> int:
        """Land what there is, at most one commit a table; return how many segments."""
        least = min(self.landed.values())
        waiting = [(number, path) for number, path in list_segments(self.home.segments) if number > least]
        taken = waiting[: self._how_many(waiting)]
        if not taken:
            return 0
        newest = taken[-1][0]
        for table, rows in decode_segments(taken, self.decoder).by_table(self.landed):
            if rows.num_rows or table is MESSAGES:
                delta.append(self.home, table, rows, WRITER, newest)
            self.landed[table.name] = newest
            self.rows += rows.num_rows if table is MESSAGES else 0
        self._note(taken[-1][1])
        self._tidy()
        return len(taken)

    def _how_many(self, waiting: list[tuple[int, Path]]) -> int:
        rows = 0
        for count, (_, path) in enumerate(waiting, 1):
            rows += read_segment(path).num_rows
            if rows >= MAX_ROWS:
                return count
        return len(waiting)

    def _note(self, newest: Path) -> None:
        table = read_segment(newest)
        last = table.slice(max(0, table.num_rows - 1)).to_pylist()
        if last:
            self.newest_ms = last[0]["received_at_ms"]
            if last[0]["recording"] is not None:
                self.last_line = (last[0]["recording"], last[0]["line"])

    def _tidy(self) -> None:
        everywhere = min(self.landed.values())
        for number, path in list_segments(self.home.segments)[:-1]:
            if number <= everywhere:
                path.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """Return how far landing is."""
        recording, line = self.last_line or (None, None)
        return {
            "pid": os.getpid(),
            "segment": self.landed[MESSAGES.name],
            "rows": self.rows,
            "recording": recording,
            "line": line,
            "received_at_ms": self.newest_ms,
        }


def run_landing(home: Home, decoder: Decoder, stop: Stop, pause_s: float = 0.2) -> None:
    """Land until stopped; a full disk is waited out."""
    landing = Landing(home, decoder)
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
            landing = Landing(home, decoder)
        if time.monotonic() - written > 0.5:
            write_status(home.run("landing"), {**landing.status(), "problem": problem})
            written = time.monotonic()
        if idle:
            stop.wait(pause_s)
    write_status(home.run("landing"), {**landing.status(), "problem": problem})
