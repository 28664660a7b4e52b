"""Landing: append segments to the bronze tables, each row once, by received_at.

Rule 1: every commit of a table stores the position reached in the segments of each bridge. So a
crash between the commits of two tables repeats no row.
Rule 2: a row lands in ``messages`` or in ``quarantine``; gap and registry rows also land in tables
of their own. Nothing is dropped: each commit of ``messages`` stores how many rows were taken and
how many of them were refused, which reveals missing rows.
Rule 3: a segment is deleted once every table has its rows. The newest segment stays, since it holds
the bridge's position.
"""

import os
import time
from functools import partial
from typing import Any, Final

import pyarrow as pa
import structlog

from fleetpulse.core.catalog import TABLES
from fleetpulse.core.messages.mapping import NO_MAPPINGS, Mappings
from fleetpulse.core.presence.gateways import Gateways
from fleetpulse.core.rows import BRIDGE
from fleetpulse.core.tables import COVERAGE, DEVICES, GATEWAYS, MESSAGES, QUARANTINE, Table
from fleetpulse.io.delta.appender import Appender
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.leases import LEASE_MS
from fleetpulse.io.mqtt.sparkplug.codec import decode_any
from fleetpulse.io.system.process import StopSignal, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.adaptive_batching import NEWEST, is_live
from fleetpulse.io.tables.row_accounting import IngestCounters, count_from_tables, read_counters
from streaming.landing.backlog import Bridges, delete_landed_segments
from streaming.landing.gateways import known_gateways
from streaming.landing.merge import MAX_SEGMENT_ROWS, merged, place
from streaming.landing.rows import accepted_rows, decode_parts

_LOG: Final = structlog.get_logger("landing")
_BEFORE: Final = f"landing:{BRIDGE}"  # transaction id in older homes: last segment landed of the only bridge
COMMIT_ROWS: Final = 20_000  # per commit: limits memory, and the rows of one version of bronze
POLL_S: Final = 0.2  # between two polls for segments
SMALL_COMMIT_ROWS: Final = COMMIT_ROWS // 4  # a commit with fewer rows is small; after a larger one, more are probably ready
READ_BYTES: Final = 64 * 1024 * 1024  # read per bridge and step


def landed_places(home: Home, table: Table) -> dict[str, int]:
    """Return the position of a table in the rows of each bridge, see `merge.place`."""
    found = {name: tables.landed(home, table, f"rows:{name}") for name in home.bridges()}
    whole = 0 if found[BRIDGE] else tables.landed(home, table, _BEFORE)
    return {**found, BRIDGE: found[BRIDGE] or place(whole + 1, 0)}


LANDED: Final = (QUARANTINE, COVERAGE, DEVICES, GATEWAYS, MESSAGES)


class Landing:
    """Process that lands the segments of a home.

    Args:
        home: home of the segments and tables.
        mappings: mappings of the home.
        lease_ms: time without a lease renewal after which a bridge is fenced, if there are several.
        takes_foreign: whether the first bridge takes topics of other formats.
    """

    def __init__(
        self, home: Home, mappings: Mappings = NO_MAPPINGS, lease_ms: int = LEASE_MS, *, takes_foreign: bool = True
    ) -> None:
        self.home = home
        self.mappings, self.decoder = mappings, partial(decode_any, mappings)
        self.identity = home.identity()
        for table in TABLES:
            tables.create(home, table)
        self.folders = {name: home.segments_of(name) for name in home.bridges()}
        self.bridges = Bridges(self.folders, wall_clock_ms(), lease_ms, home.sites_of_bridges(), takes_foreign=takes_foreign)
        # Opened before the positions are read: if another landing commits later, the next commit here fails.
        self.appenders = {table.name: Appender(home.table(table.name)) for table in LANDED}
        through = landed_places(home, MESSAGES)  # written last, in each step: the other tables are complete up to there
        self.places = {
            table.name: {name: max(at, through[name]) for name, at in landed_places(home, table).items()} for table in LANDED
        }
        messages = open_table(home.table(MESSAGES.name))
        self.gateways = Gateways(home.deployment().allowed_lateness_ms)
        self.gateways.restore(known_gateways(home, through))
        self.newest_ms = messages.transaction_version(NEWEST) or None
        self.counted = read_counters(messages) or self._counted_before(through)
        self.rows = 0
        self.last_line: tuple[str, int] | None = None

    def _counted_before(self, through: dict[str, int]) -> IngestCounters:
        """Return the initial counters: zero in a new home, else the rows counted in the tables.

        Tables of older homes have no counters, so their rows are counted once.
        """
        full = any(tables.paths_of(self.home, table) for table in (MESSAGES, QUARANTINE))
        return count_from_tables(self.home, through) if full else IngestCounters(0, 0)

    def step(self) -> int:
        """Land the available rows with at most one commit per table.

        Returns:
            Number of segments with rows in the commit; 0 if there was nothing to land.
        """
        least = {name: min(places[name] for places in self.places.values()) for name in self.folders}
        backlogs = self.bridges.backlogs(least, wall_clock_ms(), COMMIT_ROWS, READ_BYTES)
        parts = merged(backlogs, self.newest_ms, COMMIT_ROWS)
        if not parts:
            return 0
        ends = {part.bridge: part.end for part in parts}
        newest_ms = max(int(part.rows["received_at_ms"][-1].as_py()) for part in parts)
        found, message_places = decode_parts(parts, self.decoder, self.identity, self.mappings), self.places[MESSAGES.name]
        found.mark_gateway_events(self.gateways)
        expected = accepted_rows(parts, message_places) + found.surplus_rows(message_places)
        counted = self.counted.more(expected, found.refused(message_places))  # some may be in quarantine already, uncounted
        for table, rows in found.by_table(self.places):
            if rows.num_rows or table is MESSAGES:
                numbers = {f"rows:{name}": end for name, end in ends.items()}
                more = counted.numbers() if table is MESSAGES else {}
                tables.append_of(self.home, table, rows, {**numbers, NEWEST: newest_ms, **more}, self.appenders[table.name])
            self.places[table.name] |= ends
            self.rows += rows.num_rows if table is MESSAGES else 0
        self.newest_ms, self.counted = newest_ms, counted
        self._note(parts[-1].rows)
        delete_landed_segments(
            self.folders, {name: min(places[name] for places in self.places.values()) for name in self.folders}
        )
        return len(parts)

    def _note(self, rows: pa.Table) -> None:
        last = rows.slice(rows.num_rows - 1).to_pylist()[0]
        if last["recording"] is not None:
            self.last_line = (last["recording"], last["line"])

    def status(self) -> dict[str, Any]:
        """Return the status of landing: positions, and the number of rows landed by this object."""
        recording, line = self.last_line or (None, None)
        return {
            "pid": os.getpid(),
            "segment": self.places[MESSAGES.name][BRIDGE] // MAX_SEGMENT_ROWS,
            "rows": self.rows,
            "recording": recording,
            "line": line,
            "received_at_ms": self.newest_ms,
        }


def run_landing(
    home: Home,
    mappings: Mappings,
    stop: StopSignal,
    pause_s: float = POLL_S,
    lease_ms: int = LEASE_MS,
    live_pause_s: float = POLL_S,
    *,
    takes_foreign: bool = True,
) -> None:
    """Land segments until stopped; retry while the disk is full.

    Args:
        home: home of the segments and tables.
        mappings: mappings of the home.
        stop: signal to end.
        pause_s: seconds until the next poll if there was no segment.
        lease_ms: lease time, see `Landing`.
        live_pause_s: seconds to wait after a small commit of live rows, since a commit costs as much
            CPU as a hundred messages.
        takes_foreign: whether topics of other formats are taken, see `Landing`.
    """
    landing = Landing(home, mappings, lease_ms, takes_foreign=takes_foreign)
    problem = None
    written = 0.0
    while not stop.is_set():
        before = landing.rows
        try:
            idle = landing.step() == 0
            problem = None
        except OSError as error:  # deltalake raises OSError for a full disk, too
            problem, idle = f"cannot write: {error}", True
            _LOG.error("landing cannot write; retrying", error=str(error))
            stop.wait(1.0)
            landing = Landing(home, mappings, lease_ms, takes_foreign=takes_foreign)
        if time.monotonic() - written > 0.5:
            write_status(home.run("landing"), {**landing.status(), "problem": problem})
            written = time.monotonic()
        if idle:
            stop.wait(pause_s)
        elif landing.rows - before < SMALL_COMMIT_ROWS and is_live(landing.newest_ms, wall_clock_ms()):
            stop.wait(live_pause_s)
    write_status(home.run("landing"), {**landing.status(), "problem": problem})
