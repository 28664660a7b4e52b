"""Histories of connections, and the rows of the table ``sessions`` that follow from them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, Final

import pyarrow as pa

from fleetpulse.columnar.streams.sessions import CHANGE_SCHEMA
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.streams.sessions import Session, sessions
from fleetpulse.core.streams.tables import SESSIONS
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.sessions import to_rows
from fleetpulse.io.tables import tables
from tests.support.histories.histories import any_internal_row, any_signal, stamped_by_bridge, tick

KINDS: Final = ("heartbeat", "heartbeat", "telemetry", "error", "birth", "birth", "death")
SILENCES_MS: Final = (10_000, 20_000, 60_000)


def connections(random: Random) -> list[Row]:
    """Return rows with births, wills, clean disconnects, copies, wrong clocks and coverage gaps."""
    choose = random.choice
    devices = [f"device-{number}" for number in range(choose([1, 3, 8]))]
    count = choose([30, 60, 300])
    steps = max(10, round(count / len(devices) / choose([0.1, 0.5, 2])))
    rows = [any_signal(choose, devices, steps, KINDS) for _ in range(count)]
    rows = [replace(one, code=choose([one.code, "disconnect", "logout"])) if one.kind is Kind.DEATH else one for one in rows]
    rows += [replace(one, received_at_ms=one.received_at_ms + choose([0, 5_000, 60_000])) for one in rows[:: choose([5, 40])]]
    gaps = {
        one.received_at_ms: one for one in (any_internal_row(choose, devices, steps, ["gap"]) for _ in range(choose([0, 3, 30])))
    }
    return stamped_by_bridge([*rows, *gaps.values(), tick(steps * 5 + choose([20, 500]))])


def counted(rows: Iterable[Mapping[str, Any]]) -> Counter[tuple[Any, ...]]:
    """Return rows of the table as a multiset."""
    return Counter(tuple(one[column.name] for column in SESSIONS.columns) for one in rows)


def defined(rows: Iterable[Row], silence_ms: int) -> Counter[tuple[Any, ...]]:
    """Return the rows of the table by the definition."""
    return counted(table_of(rows, silence_ms).to_pylist())


def table_of(rows: Iterable[Row], silence_ms: int) -> pa.Table:
    """Return the rows of the table by the definition, with its columns."""
    return to_rows(pa.Table.from_batches([_batch([*sessions(rows, silence_ms)])]))


def _batch(changes: list[Session]) -> pa.RecordBatch:
    columns = [pa.array([getattr(one, field.name) for one in changes], field.type) for field in CHANGE_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


def written(home: Home) -> Counter[tuple[Any, ...]]:
    """Return the rows of the table of a home."""
    return counted(tables.query(home, "SELECT * FROM sessions", tables=[SESSIONS.name]))
