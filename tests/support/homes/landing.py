"""Segments of bridges for tests, and a landing that lands all of them."""

import time

from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.leases import Lease, write_lease
from fleetpulse.io.ingest.segments import SegmentRow, rows_table, write_segment
from fleetpulse.io.tables import tables
from streaming.landing.landing import Landing

TOPIC = "fleet/oslo/d/heartbeat"


def write(home: Home, bridge: str, number: int, rows: list[SegmentRow]) -> None:
    write_segment(home.segments_of(bridge), number, rows_table(rows), bridge=bridge, last_canary_ms=None)


def heartbeats(first_ms: int, count: int) -> list[SegmentRow]:
    return [SegmentRow(first_ms + at, TOPIC, b"{}", "mqtt") for at in range(count)]


def landed(home: Home) -> int:
    return tables.query(home, "SELECT count(*) AS rows FROM messages", tables=["messages"])[0]["rows"]


def land_all(home: Home) -> Landing:
    """Start a new landing, and land all segments; each step renews the leases."""
    landing = Landing(home)
    for _ in range(30):
        beat(home)
        if not landing.step():
            break
    return landing


def beat(home: Home) -> None:
    for bridge in home.bridges():
        write_lease(home.segments_of(bridge), Lease(now_ms(), now_ms()))


def now_ms() -> int:
    return time.time_ns() // 1_000_000
