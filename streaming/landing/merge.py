"""Merge the rows of several bridges by ``received_at``, up to the bridges' leases.

Rule 1: rows with the same ``received_at`` land together, so that an instant is always read whole.
Rule 2: a row at or before the newest landed instant is *lifted*: it gets the instant after that. A
lifted gap row gets an instant of its own if rows precede it. The order within each bridge is
preserved.
Rule 3: a row that opens a coverage gap gets the instant of the row before it, of any bridge, as
``after``. The value that a bridge wrote covers only its own rows, and a recording may lack the field.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.compute import pc
from fleetpulse.core.rows import EVERYONE, Kind, Origin
from fleetpulse.io.ingest.segments import SEGMENT_SCHEMA, positions_within_instant

MAX_SEGMENT_ROWS: Final = 2**20  # exceeds the number of rows in a segment
_NEVER: Final = np.iinfo(np.int64).max
_GAPS: Final = (f"fleet/{EVERYONE}/", f"/{Kind.GAP.value}")


def place(segment: int, rows: int) -> int:
    """Encode a position as one number, ordered across segments: a segment, and a number of its rows."""
    assert rows < MAX_SEGMENT_ROWS, "a segment must have fewer rows"
    return segment * MAX_SEGMENT_ROWS + rows


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one segment.

    Attributes:
        bridge: name of the segment's bridge.
        segment: number of the segment.
        first: number of rows of the segment before these.
        rows: columns of `SEGMENT_SCHEMA`.
        positions: position of each row, see `Row.position`; None if no row before these has the
            instant of the first.
        stamped: original ``received_at_ms`` of lifted rows, null for others; None if none was
            lifted.
    """

    bridge: str
    segment: int
    first: int
    rows: pa.Table
    positions: NDArray[np.int64] | None = None
    stamped: pa.Array | None = None

    def placed(self) -> NDArray[np.int64]:
        """Return ``positions``; without them, count the rows of each instant."""
        return positions_within_instant(_received(self)) if self.positions is None else self.positions

    @property
    def end(self) -> int:
        """The `place` after the rows."""
        return place(self.segment, self.first + self.rows.num_rows)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Rows of a bridge that have not landed.

    Attributes:
        parts: parts of segments, in order.
        through_ms: instant up to which the bridge's rows are complete, by its lease; None if the
            bridge is not awaited.
        more: whether there are rows beyond those read; the rows read then have more than one
            instant.
    """

    parts: Sequence[Part]
    through_ms: int | None = None
    more: bool = False


def merged(backlogs: Sequence[Backlog], landed_ms: int | None, max_rows: int) -> list[Part]:
    """Return the parts that land next, with late rows lifted.

    Args:
        backlogs: backlog of every bridge; the rows of a single bridge are in order and land as they
            were read.
        landed_ms: newest ``received_at`` that has landed; None before the first.
        max_rows: limit of rows that land at once, unless a single instant has more.
    """
    if len(backlogs) == 1:
        return _with_after(backlogs[0].parts, landed_ms, alone=True)
    lifted = [_lifted(backlog, landed_ms) for backlog in backlogs]
    limit_ms = min((backlog.through_ms for backlog in backlogs if backlog.through_ms is not None), default=_NEVER)
    limit_ms = min([limit_ms, *(_read_through(backlog, landed_ms) for backlog in lifted if backlog.more)])
    ready = [part for backlog in lifted for part in _until(backlog.parts, limit_ms)]
    if sum(part.rows.num_rows for part in ready) > max_rows:
        instants = np.sort(np.concatenate([_received(part) for part in ready]))
        limit_ms = int(instants[max_rows])
        limit_ms = limit_ms - 1 if instants[0] < limit_ms else limit_ms
        ready = [part for backlog in lifted for part in _until(backlog.parts, limit_ms)]
    return _with_after(ready, landed_ms)


def _received(part: Part) -> NDArray[np.int64]:
    return part.rows["received_at_ms"].to_numpy()


def _column(part: Part, name: str, values: pa.Array) -> pa.Table:
    return part.rows.set_column(SEGMENT_SCHEMA.get_field_index(name), SEGMENT_SCHEMA.field(name), values)


def _lifted(backlog: Backlog, landed_ms: int | None) -> Backlog:
    first = backlog.parts[0].rows if backlog.parts else None
    if landed_ms is None or first is None or first["received_at_ms"][0].as_py() > landed_ms:
        return backlog
    parts: list[Part] = []
    reached_ms, gap_count = landed_ms, 0  # previous row's instant minus the number of gap rows up to it; that number
    for part in backlog.parts:
        stamps = _received(part)
        gaps = np.zeros(len(stamps), np.int64)
        gaps[_gaps(part)] = 1  # a gap row gets a later instant than the row before it: rows of one instant have no order
        numbers = gap_count + np.cumsum(gaps)
        reached = np.maximum.accumulate(np.maximum(np.maximum(stamps, landed_ms + 1) - numbers, reached_ms))
        reached_ms, gap_count = int(reached[-1]), int(numbers[-1])
        lifted = reached + numbers
        rows = _column(part, "received_at_ms", pa.array(lifted))
        parts.append(replace(part, rows=rows, stamped=pa.array(stamps, mask=stamps == lifted)))
    return replace(backlog, parts=_placed(parts))


def _placed(parts: Sequence[Part]) -> list[Part]:
    """Set the positions of lifted parts: rows lifted to one instant keep their order."""
    places = positions_within_instant(np.concatenate([_received(part) for part in parts]))
    edges = np.cumsum([0, *(part.rows.num_rows for part in parts)])
    return [replace(part, positions=places[start:end]) for part, (start, end) in zip(parts, pairwise(edges), strict=True)]


def _read_through(backlog: Backlog, landed_ms: int | None) -> int:
    """Return the instant up to which all rows of a bridge were read.

    The newest instant does not count, since only a part of its rows may have been read. The instant
    after ``landed_ms`` always counts: unread rows up to it are lifted to the next one.
    """
    newest_ms = int(_received(backlog.parts[-1])[-1]) - 1
    return newest_ms if landed_ms is None else max(newest_ms, landed_ms + 1)


def _until(parts: Sequence[Part], limit_ms: int) -> list[Part]:
    taken_parts: list[Part] = []
    for part in parts:
        count = int(np.searchsorted(_received(part), limit_ms, side="right"))
        if count:
            stamped = None if part.stamped is None else part.stamped.slice(0, count)
            taken_parts.append(replace(part, rows=part.rows.slice(0, count), positions=part.placed()[:count], stamped=stamped))
        if count < part.rows.num_rows:
            break
    return taken_parts


def _with_after(parts: Sequence[Part], landed_ms: int | None, *, alone: bool = False) -> list[Part]:
    """Set ``after`` of gap rows to the instant of the row before them, of any bridge.

    A single bridge has already set it, unless no row came before. A recording may contain an earlier
    instant, of the home in which it was recorded.
    """
    gaps = [_gaps(part) for part in parts]
    if not any(gaps):
        return list(parts)
    received = np.concatenate([_received(part) for part in parts])
    instants = received if alone else np.unique(received)  # one bridge: in order, instants may repeat
    completed: list[Part] = []
    first = 0
    for part, places in zip(parts, gaps, strict=True):
        payloads = part.rows["payload"].to_pylist() if places else []
        for at in places:
            before = first + at if alone else int(np.searchsorted(instants, _received(part)[at]))
            after_ms = int(instants[before - 1]) if before else landed_ms
            payloads[at] = _set_after(payloads[at], after_ms, at_least=alone)
        first += part.rows.num_rows
        completed.append(replace(part, rows=_column(part, "payload", pa.array(payloads, pa.binary()))) if places else part)
    return completed


def _gaps(part: Part) -> list[int]:
    """Return the indexes of gap rows from bridges and recordings.

    Decoding refuses gap rows of any other origin.
    """
    topics, origins = part.rows["topic"], part.rows["origin"]
    is_own = pc.or_(pc.equal(origins, Origin.BRIDGE.value), pc.equal(origins, Origin.REPLAY.value))
    if not pc.any(is_own).as_py():
        return []
    named = pc.and_(pc.starts_with(topics, _GAPS[0]), pc.ends_with(topics, _GAPS[1]))
    return pc.indices_nonzero(pc.and_(named, is_own)).to_pylist()


def _set_after(payload: bytes, after_ms: int | None, *, at_least: bool) -> bytes:
    """Set ``after`` in the payload of a gap row; ``at_least`` keeps a later instant."""
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError):
        return payload  # from a recording: decoding will refuse it
    if not isinstance(content, dict) or content.get("op") != "open":
        return payload
    recorded_ms: object = content.get("after")
    if at_least and type(recorded_ms) is int and (after_ms is None or recorded_ms >= after_ms):
        return payload
    return json.dumps({**content, "after": after_ms}, separators=(",", ":")).encode()
