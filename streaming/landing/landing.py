"""Landing: segments become bronze, once each, in the order of ``received_at``.

Rule 1: every table's commit says up to which row of each bridge it has come, so a crash between two commits repeats nothing.
Rule 2: a row lands in ``messages`` or in ``quarantine``; our own rows in their table as well. Nothing is dropped: how many were
taken, and how many of them refused, stands in each commit of ``messages``, so that whoever looks finds what is missing.
Rule 3: a segment is removed when every table has it; the newest stays, for it is the bridge's memory.
"""

import os
import time
from typing import Any, Final

import pyarrow as pa
import structlog

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.presence.gateways import Gateways
from fleetpulse.core.rows import BRIDGE
from fleetpulse.core.tables import COVERAGE, DEVICES, GATEWAYS, MESSAGES, QUARANTINE, TABLES, Table
from fleetpulse.io.delta.appender import Appender
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.leases import LEASE_MS
from fleetpulse.io.system.process import Stop, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.adaptive_batching import NEWEST, is_live
from fleetpulse.io.tables.row_accounting import IngestCounters, count_from_tables, read_counters
from streaming.landing.backlog import Bridges, tidy
from streaming.landing.gateways import known_gateways
from streaming.landing.merge import PLACES, merged, place
from streaming.landing.rows import Decoder, decode_parts, taken_of

_LOG: Final = structlog.get_logger("landing")
_BEFORE: Final = f"landing:{BRIDGE}"  # counted whole segments of the one bridge there was
MAX_ROWS: Final = 20_000  # a commit: it bounds memory, and the rows of one version of bronze
LOOK_S: Final = 0.2  # between two looks for segments
_TRICKLE: Final = MAX_ROWS // 4  # rows of a commit: behind more of them the next ones are waiting already
MAX_BYTES: Final = 64 * 1024 * 1024  # that are read of a bridge


def places_of(home: Home, table: Table) -> dict[str, int]:
    """Return up to which row of each bridge a table has come, see `merge.place`."""
    found = {name: tables.landed(home, table, f"rows:{name}") for name in home.bridges()}
    whole = 0 if found[BRIDGE] else tables.landed(home, table, _BEFORE)
    return {**found, BRIDGE: found[BRIDGE] or place(whole + 1, 0)}


LANDED: Final = (QUARANTINE, COVERAGE, DEVICES, GATEWAYS, MESSAGES)


class Landing:
    """Lands the segments of a home.

    Args:
        home: the home.
        decoder: makes a row of a message, or says why not.
        lease_ms: how long one of several bridges may say nothing before the others go on without it.
        takes_foreign: whether topics of other formats are taken.
    """

    def __init__(self, home: Home, decoder: Decoder = decode, lease_ms: int = LEASE_MS, *, takes_foreign: bool = True) -> None:
        self.home = home
        self.decoder = decoder
        self.identity = home.identity()
        for table in TABLES:
            tables.create(home, table)
        self.folders = {name: home.segments_of(name) for name in home.bridges()}
        self.bridges = Bridges(self.folders, wall_clock_ms(), lease_ms, home.sites_of_bridges(), takes_foreign=takes_foreign)
        # Before it is looked how far they are: what another landing commits behind that ends this one.
        self.appenders = {table.name: Appender(home.table(table.name)) for table in LANDED}
        through = places_of(home, MESSAGES)  # written last, and in each step: the others have what is theirs up to there
        self.places = {
            table.name: {name: max(at, through[name]) for name, at in places_of(home, table).items()} for table in LANDED
        }
        messages = open_table(home.table(MESSAGES.name))
        self.gateways = Gateways(home.deployment().allowed_lateness_ms)
        self.gateways.restore(known_gateways(home, through))
        self.newest_ms = messages.transaction_version(NEWEST) or None
        self.counted = read_counters(messages) or self._counted_before(through)
        self.rows = 0
        self.last_line: tuple[str, int] | None = None

    def _counted_before(self, through: dict[str, int]) -> IngestCounters:
        """Return with what counting begins: nothing, or, in a home that is older than the numbers, what its tables hold now."""
        full = any(tables.paths_of(self.home, table) for table in (MESSAGES, QUARANTINE))
        return count_from_tables(self.home, through) if full else IngestCounters(0, 0)

    def step(self) -> int:
        """Land what there is, at most one commit a table; return how many segments had rows in it."""
        least = {name: min(places[name] for places in self.places.values()) for name in self.folders}
        backlogs = self.bridges.backlogs(least, wall_clock_ms(), MAX_ROWS, MAX_BYTES)
        parts = merged(backlogs, self.newest_ms, MAX_ROWS)
        if not parts:
            return 0
        ends = {part.bridge: part.end for part in parts}
        newest_ms = max(int(part.rows["received_at_ms"][-1].as_py()) for part in parts)
        found, come = decode_parts(parts, self.decoder, self.identity), self.places[MESSAGES.name]
        found.mark_gateway_events(self.gateways)
        counted = self.counted.more(taken_of(parts, come), found.refused(come))  # quarantine may have them, not yet counted
        for table, rows in found.by_table(self.places):
            if rows.num_rows or table is MESSAGES:
                numbers = {f"rows:{name}": end for name, end in ends.items()}
                more = counted.numbers() if table is MESSAGES else {}
                tables.append_of(self.home, table, rows, {**numbers, NEWEST: newest_ms, **more}, self.appenders[table.name])
            self.places[table.name] |= ends
            self.rows += rows.num_rows if table is MESSAGES else 0
        self.newest_ms, self.counted = newest_ms, counted
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


def run_landing(
    home: Home,
    decoder: Decoder,
    stop: Stop,
    pause_s: float = LOOK_S,
    lease_ms: int = LEASE_MS,
    live_pause_s: float = LOOK_S,
    *,
    takes_foreign: bool = True,
) -> None:
    """Land until stopped; a full disk is waited out.

    Args:
        home: the home.
        decoder: makes a row of a message, or says why not.
        stop: when to end.
        pause_s: between two looks for segments, where there was none.
        lease_ms: see `Landing`.
        live_pause_s: behind a commit of few rows that are of now: each commit costs a hundred messages' CPU.
        takes_foreign: see `Landing`.
    """
    landing = Landing(home, decoder, lease_ms, takes_foreign=takes_foreign)
    problem = None
    written = 0.0
    while not stop.is_set():
        before = landing.rows
        try:
            idle = landing.step() == 0
            problem = None
        except OSError as error:  # deltalake says OSError for a full disk as well
            problem, idle = f"cannot write: {error}", True
            _LOG.error("landing cannot write; it goes on when it can", error=str(error))
            stop.wait(1.0)
            landing = Landing(home, decoder, lease_ms, takes_foreign=takes_foreign)
        if time.monotonic() - written > 0.5:
            write_status(home.run("landing"), {**landing.status(), "problem": problem})
            written = time.monotonic()
        if idle:
            stop.wait(pause_s)
        elif landing.rows - before < _TRICKLE and is_live(landing.newest_ms, wall_clock_ms()):
            stop.wait(live_pause_s)
    write_status(home.run("landing"), {**landing.status(), "problem": problem})
