"""The fleet at present in memory, for programs that answer many questions: the API, the metrics and the page.

Rule 1: facts come from `kept` and `fold` only. A refresh folds the rows of newer versions into the facts in
memory, as a report folds them into `device_current`.
Rule 2: signals are read at each load, not at each refresh. Between two loads, a device that was heard and not
judged yet is not listed, and its clock is that of the load. `PresentMirror.refresh` loads again after a
maintenance, and at intervals that depend on the cost of a load.
Rule 3: one thread refreshes; others read through cursors of their own, and see the last complete refresh.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Final

from fleetpulse.core.judgements import AMENDMENTS, CHANGES
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.tables import DEVICE_CURRENT, DEVICES, JUDGEMENTS, Table, literals
from fleetpulse.core.times import DAY_MS, MINUTE_MS
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.delta.corruption import reporting_corruption
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.tables import files_of
from fleetpulse.reports.frontiers import frontier_ms
from fleetpulse.reports.present import fold
from fleetpulse.reports.present.id_index import IdIndex
from fleetpulse.reports.present.kept import VERSIONED, appended_since, counted, limits_of, present_in
from fleetpulse.reports.present.parts import HEARD, Limits, listed_sql
from fleetpulse.reports.present.tally import COUNTED, Tally

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

CHANGES_MS: Final = DAY_MS  # event time before the frontier of which the transitions are in memory
LISTED: Final = (  # columns of the table `live.devices`
    "device_id", "mode", "since", "trigger", "site", "device_class", "gateway", "last_seen", "never_seen", "clock",
    "clock_offset_ms", "transitions", "runtime_ms", "reason",
)  # fmt: skip
CHANGED: Final = (  # columns of the table `live.changes`
    "event_time", "device_id", "from_mode", "to_mode", "trigger", "site", "device_class", "gateway", "last_seen", "runtime_ms",
    "reason", "policy_version", "judged_at", "life", "transition_no", "amendment_no",
)  # fmt: skip
HASH: Final = "(hash({}) & 4294967295)::UINTEGER"  # SQL: number by which a device is found; several may have the same
_MORE: Final = (  # columns of `live.devices`
    f"coalesce(epoch_ms(since), -1) AS since_ms, {HASH.format('device_id')} AS id_hash, NULL::UINTEGER AS number"
)
_ENUMS: Final = {"mode": Mode, "trigger": Trigger}  # type of the tables in memory -> its usual values
_TYPED: Final = {"from_mode": "mode", "to_mode": "mode", "trigger": "trigger"}  # column of `live.changes` -> its type
_CHANGE: Final = ", ".join(  # SQL for the columns of `live.changes`: numbers are grouped more quickly than words
    [f'"{name}"::live."{_TYPED[name]}" AS "{name}"' if name in _TYPED else f'"{name}"' for name in CHANGED]
    + [f"{HASH.format('device_id')} AS id_hash", "epoch_ms(event_time) AS event_ms"]
)
_LOADS: Final = 500  # a load is repeated after this multiple of its duration
_LEAST_INTERVAL_S: Final = 30.0
_AFFECTED: Final = "affected"  # table with the ids of the devices whose facts a refresh may replace
_SAME: Final = " AND ".join(
    f"new.{name} IS NOT DISTINCT FROM known.{name}" for name in ("device_id", "life", "transition_no", "amendment_no")
)
_KINDS: Final = literals(CHANGES)
_SMALL_BYTES: Final = 4_000_000  # of new files that are read once
_THREADS: Final = 2  # of a query; requests run in threads of their own
_MEMORY: Final = "400MB"  # for the tables and the sorts of queries; beyond it, DuckDB writes to a folder
_MEMORY_OF_LOAD: Final = "250MB"  # beside the tables of the load before; without kept facts, it needs more


@dataclass(frozen=True, slots=True)
class Reached:
    """Version of the facts in memory.

    Attributes:
        versions: newest version of each table that the facts include.
        frontier_ms: event time up to which the job has judged, epoch milliseconds; None before the first batch.
        kinds: number of judgements by kind.
        modes: number of transitions by mode, after amendments.
        refused: number of quarantined messages by reason.
        at_ms: instant of the refresh, epoch milliseconds.
    """

    versions: Mapping[str, int]
    frontier_ms: int | None
    kinds: Mapping[str, int]
    modes: Mapping[str, int]
    refused: Mapping[str, int]
    at_ms: int

    @property
    def tag(self) -> str:
        """Short text that differs for different facts."""
        return "-".join(str(self.versions.get(table.name, -1)) for table in VERSIONED) + f"-{self.frontier_ms or 0}"


class PresentMirror:
    """Facts of the devices in memory: the tables ``live.devices``, ``live.counted`` and ``live.changes``.

    ``live.devices`` has a row for each device, with the columns `LISTED`; ``last_seen`` is the last signal as of
    the newest transition. Three more columns make queries quick: ``since_ms``, -1 without a mode; ``id_hash``, see
    `HASH`; and ``number``, the number of the id in the `IdIndex`. ``live.counted`` has numbers of devices, see `tally`.
    ``live.changes`` has the transitions of the last day before the frontier, after amendments, with the columns
    `CHANGED`, ``id_hash`` and ``event_ms``, by which a query of a range reads few rows. ``live.minutes`` has their
    numbers: ``minute_ms``, the end of a minute that includes it; ``from_mode``, ``to_mode``, and ``n``. Several rows of
    a minute may have the same modes. Only minutes that begin within the last day are complete.

    Attributes:
        home: home that is read.
        is_replacing: whether a refresh has replaced the facts, and not yet their version.

    Args:
        home: home to read.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.is_replacing = False
        self._lock = Lock()
        self._logs = {table.name: DeltaLog(home.table(table.name)) for table in (*VERSIONED, DEVICE_CURRENT)}
        self._spilled = TemporaryDirectory(prefix="fleet-page-", ignore_cleanup_errors=True)
        self._connections = count()
        self._held = self._connect(), IdIndex()
        self._loading: DuckDBPyConnection | None = None  # connection of a load that is not complete
        self._tally: Tally | None = None
        self._limits: Limits | None = None
        self._reached: Reached | None = None
        self._kept_version = -1
        self._commits: dict[str, str | None] = dict.fromkeys(table.name for table in VERSIONED)  # of the known versions
        self._frontier: tuple[int | None, int | None] | None = None  # of the rows judged up to an instant
        self._load_s = self._loaded_s = 0.0

    @property
    def _connection(self) -> "DuckDBPyConnection":
        return self._held[0]

    @property
    def reached(self) -> Reached:
        """Version of the facts; `refresh` must have been called."""
        assert self._reached is not None, "the mirror is empty until its first refresh"
        return self._reached

    @property
    def loaded_ms(self) -> int:
        """Instant of the newest load, epoch milliseconds: signals and clocks are as of it."""
        return round(self._loaded_s * 1000)

    def cursor(self) -> "DuckDBPyConnection":
        """Return a connection to the tables, for one thread, with the time zone UTC."""
        return self.searchable()[0]

    def searchable(self) -> "tuple[DuckDBPyConnection, IdIndex]":
        """Return a connection like `cursor`, and the index with the ids of all its devices."""
        connection, ids = self._held
        cursor = connection.cursor()
        cursor.execute("SET TimeZone='UTC'")  # a cursor has settings of its own
        return cursor, ids

    def interrupt(self) -> None:
        """Interrupt a refresh of another thread, which then fails."""
        for connection in (self._loading, self._connection):
            if connection is not None:
                connection.interrupt()

    def refresh(self, now_ms: int) -> bool:
        """Fold the rows of newer versions into the facts; return whether the facts differ.

        Args:
            now_ms: present instant, epoch milliseconds.

        Raises:
            DamagedError: a file of a table is damaged or missing.
        """
        with self._lock, reporting_corruption(f'a table of "{self.home.path}"'):
            frontier_ms = self._frontier_ms()
            versions = {table.name: self._logs[table.name].latest() for table in VERSIONED}
            known = self._reached
            try:
                if known is None or self._is_due(now_ms) or not self._fold(known, versions, frontier_ms, now_ms):
                    self._load(frontier_ms, now_ms)
            finally:
                self.is_replacing = False
            return known is None or known.tag != self.reached.tag

    def _connect(self) -> "DuckDBPyConnection":
        connection = tables.connect()
        connection.execute(f"SET threads = {min(_THREADS, os.cpu_count() or 1)}")
        connection.execute(f"SET memory_limit = '{_MEMORY}'")
        connection.execute("SET temp_directory = ?", [str(Path(self._spilled.name) / str(next(self._connections)))])
        connection.execute("ATTACH ':memory:' AS live (COMPRESS)")
        return connection

    def _frontier_ms(self) -> int | None:
        """Return the frontier; it is computed again only after a further batch."""
        judged = judged_ms(self.home.checkpoint)
        if self._frontier is None or judged is None or self._frontier[0] != judged:
            self._frontier = judged, frontier_ms(self.home, judged)
        return self._frontier[1]

    def _is_due(self, now_ms: int) -> bool:
        """Return whether the facts are loaded again: after a maintenance, or for new signals."""
        if self._logs[DEVICE_CURRENT.name].latest() != self._kept_version:
            return True
        elapsed_s = abs(now_ms / 1000 - self._loaded_s)  # a clock that was set back must not put it off
        return elapsed_s > max(_LEAST_INTERVAL_S, _LOADS * self._load_s)

    def _load(self, frontier_ms: int | None, now_ms: int) -> None:
        from duckdb import OutOfMemoryException

        try:
            self._load_within(_MEMORY_OF_LOAD, frontier_ms, now_ms)
        except OutOfMemoryException:  # many rows are newer than the kept facts
            self._load_within(tables.SPILLING_MEMORY, frontier_ms, now_ms)

    def _load_within(self, memory: str, frontier_ms: int | None, now_ms: int) -> None:
        began_s = time.monotonic()
        kept_version = self._logs[DEVICE_CURRENT.name].latest()
        fresh = self._loading = self._connect()
        present = present_in(fresh, self.home, frontier_ms)
        fresh.execute(f"SET memory_limit = '{memory if present.position else tables.SPILLING_MEMORY}'")
        judged, values = present.judged()
        hashed = f"SELECT *, {HASH.format('device_id')} AS id_hash FROM ({judged})"
        fresh.execute(f"CREATE TABLE live.kept AS {hashed} ORDER BY device_id", values)
        facts, values = present.facts()
        listed = f"SELECT * FROM ({_listed(present.limits, f'({facts})')}) ORDER BY device_id"
        numbered = f"SELECT * REPLACE ((row_number() OVER () - 1)::UINTEGER AS number) FROM ({listed})"
        fresh.execute(f"CREATE TABLE live.devices AS {numbered}", values)
        ids = IdIndex()
        ids.add(fresh, "FROM live.devices ORDER BY number")
        tally = Tally(fresh)
        counts = present.counts()
        self._load_changes(fresh, frontier_ms)  # afterwards the view of the judgements has the recent files only
        _forget(fresh)
        fresh.execute("CHECKPOINT live")
        fresh.execute(f"SET memory_limit = '{_MEMORY}'")
        self.is_replacing = True
        earlier, self._held, self._loading = self._held, (fresh, ids), None
        self._tally, self._limits, self._kept_version = tally, present.limits, kept_version
        self._commits = {name: self._logs[name].digest(present.versions[name]) for name in self._commits}
        self._reached = Reached(present.versions, frontier_ms, *counts, now_ms)
        self._load_s, self._loaded_s = time.monotonic() - began_s, now_ms / 1000
        del earlier  # cursors of other threads keep it open until they end

    def _load_changes(self, connection: "DuckDBPyConnection", frontier_ms: int | None) -> None:
        since_ms = (frontier_ms or 0) - CHANGES_MS
        files = [
            file.path
            for file in files_of(self.home, JUDGEMENTS, "event_time")
            if file.greatest is None or file.greatest >= datetime.fromtimestamp(max(since_ms, 0) / 1000, UTC)
        ]
        tables.open_files(connection, JUDGEMENTS.name, JUDGEMENTS, files)
        tables.open_views_in(connection)
        names = ", ".join(f'"{name}"' for name in _TYPED)
        connection.execute(f"""CREATE OR REPLACE TEMP TABLE words AS SELECT DISTINCT {names} FROM {JUDGEMENTS.name}
            WHERE epoch_ms(event_time) >= {since_ms}""")
        for name, usual in _ENUMS.items():  # a damaged row may have another word, which the page must show
            found = " UNION ".join(f'SELECT "{column}" FROM words' for column, of in _TYPED.items() if of == name)
            known = f"SELECT unnest([{literals(usual)}]) AS word UNION {found}"
            connection.execute(f'CREATE TYPE live."{name}" AS ENUM (FROM ({known}) WHERE word IS NOT NULL ORDER BY word)')
        connection.execute(
            f"""CREATE OR REPLACE TABLE live.changes AS SELECT {_CHANGE} FROM transitions
                WHERE epoch_ms(event_time) >= {since_ms} ORDER BY event_time, device_id, transition_no"""
        )
        connection.execute(f"CREATE OR REPLACE TABLE live.minutes AS {_minutes('live.changes')}")

    def _fold(self, known: Reached, versions: Mapping[str, int], frontier_ms: int | None, now_ms: int) -> bool:
        """Fold newer rows; return False if the facts must be loaded again."""
        from duckdb import ConversionException

        limits = limits_of(self.home, frontier_ms)
        if self._limits is None or (limits.lead_ms, limits.backlog_ms) != (self._limits.lead_ms, self._limits.backlog_ms):
            return False
        if not self._continues(known, versions, frontier_ms):
            return False
        if {name: known.versions[name] for name in versions} == versions and known.frontier_ms == frontier_ms:
            self._reached = replace(known, at_ms=now_ms)
            return True
        connection = self._connection
        try:
            for table in VERSIONED:
                files = appended_since(self._logs[table.name], known.versions[table.name], versions[table.name])
                if files is None:
                    return False
                _open_new(connection, table, files)
            if connection.execute(f"SELECT 1 FROM new_judgements WHERE kind IN ({literals(AMENDMENTS)}) LIMIT 1").fetchone():
                return False  # changes of the last day may be retracted
            counts = counted(connection, "new_judgements", "new_quarantine", before=known)
            commits = {name: self._logs[name].digest(version) for name, version in versions.items()}
            if not self._prepare(connection, self._limits.frontier_ms, limits):
                return False
            self._replace(connection, limits, frontier_ms)
            self._limits, self._commits = limits, commits
            self._reached = Reached(dict(versions), frontier_ms, *counts, now_ms)
        except ConversionException:
            return False  # a damaged row has a word that no type in memory has; a load includes it
        finally:
            _forget(connection)
        return True

    def _continues(self, known: Reached, versions: Mapping[str, int], frontier_ms: int | None) -> bool:
        """Return whether the tables have the known versions, and the frontier is not before the known one."""
        if known.frontier_ms is not None and (frontier_ms is None or frontier_ms < known.frontier_ms):
            return False  # transitions of more than a day before the known frontier are not in memory
        return all(
            versions[name] >= known.versions[name]
            and (commit is None or self._logs[name].digest(known.versions[name]) in (None, commit))
            for name, commit in self._commits.items()
        )

    def _prepare(self, connection: "DuckDBPyConnection", known_frontier_ms: int, limits: Limits) -> bool:
        """Create the tables ``found`` and ``fresh``; return False if an affected device has no facts of this kind now."""
        tables.open_table_in(connection, self.home, DEVICES)
        # One search among all devices; the searches after it read the found rows.
        connection.execute(f"""CREATE OR REPLACE TEMP TABLE {_AFFECTED} AS
            SELECT device_id, {HASH.format("device_id")} AS id_hash FROM ({fold.named(known_frontier_ms, limits)})""")
        _find(connection, "live.kept", "*")
        connection.execute("CREATE OR REPLACE VIEW kept AS SELECT * EXCLUDE (place, id_hash) FROM found")
        if fold.prepare(connection, known_frontier_ms, limits):
            tables.open_table_in(connection, self.home, JUDGEMENTS)
            fold.read_anew(connection, limits)
        connection.execute(f"CREATE OR REPLACE TEMP TABLE fresh AS {fold.judged(f'({fold.new_devices()})')}")
        vanished = f"SELECT 1 FROM {fold.REREAD} SEMI JOIN found USING (device_id) ANTI JOIN fresh USING (device_id) LIMIT 1"
        if connection.execute(vanished).fetchone() is not None:
            return False
        connection.execute("CREATE OR REPLACE TEMP TABLE outdated AS SELECT place FROM found SEMI JOIN fresh USING (device_id)")
        return True

    def _replace(self, connection: "DuckDBPyConnection", limits: Limits, frontier_ms: int | None) -> None:
        """Replace the facts of the affected devices, and append their transitions, in one transaction."""
        tables.open_files(connection, "unheard", DEVICE_CURRENT, [])  # no rows, with the types of the columns
        heard = ", ".join(f"unheard.{name}" for name in HEARD[1:])
        facts = f"(SELECT fresh.*, {heard} FROM fresh LEFT JOIN unheard USING (device_id))"
        connection.execute(f"CREATE OR REPLACE TEMP TABLE listed AS {_listed(limits, facts)}")
        counted = ", ".join(f'"{name}"' for name in dict.fromkeys((*COUNTED, "clock_offset_ms", "number")))
        _find(connection, "live.devices", f"device_id, {counted}")
        connection.execute("CREATE OR REPLACE TEMP TABLE replaced AS FROM found SEMI JOIN fresh USING (device_id)")
        connection.execute("""UPDATE listed SET clock = replaced.clock, clock_offset_ms = replaced.clock_offset_ms,
            number = replaced.number FROM replaced WHERE listed.device_id = replaced.device_id""")
        first = self._held[1].add(connection, "FROM listed WHERE number IS NULL ORDER BY device_id")
        connection.execute(f"""UPDATE listed SET number = {first} + following.place FROM (
            SELECT device_id, row_number() OVER (ORDER BY device_id) - 1 AS place FROM listed WHERE number IS NULL) AS following
            WHERE listed.device_id = following.device_id""")
        connection.execute(f"""CREATE OR REPLACE TEMP TABLE changed AS
            SELECT {_CHANGE} FROM new_judgements AS new WHERE kind IN ({_KINDS})""")
        [(since_ms,)] = connection.execute("SELECT coalesce(min(event_ms), 0) FROM changed").fetchall()
        connection.execute("BEGIN")
        try:
            connection.execute("DELETE FROM live.kept WHERE rowid IN (FROM outdated)")
            connection.execute(f"INSERT INTO live.kept BY NAME SELECT *, {HASH.format('device_id')} AS id_hash FROM fresh")
            connection.execute("DELETE FROM live.devices WHERE rowid IN (SELECT place FROM replaced)")
            connection.execute("INSERT INTO live.devices BY NAME FROM listed")
            assert self._tally is not None, "a load makes it"
            self._tally.replace("replaced", "listed")
            # The load may have read transitions that were committed after its version.
            known = f"(FROM live.changes WHERE event_ms >= {since_ms})"
            connection.execute(f"CREATE OR REPLACE TEMP TABLE added AS FROM changed AS new ANTI JOIN {known} AS known ON {_SAME}")
            connection.execute("INSERT INTO live.changes BY NAME FROM added")
            connection.execute(f"INSERT INTO live.minutes {_minutes('added')}")
            for table, instant in (("changes", "event_ms"), ("minutes", "minute_ms")):
                connection.execute(f"DELETE FROM live.{table} WHERE {instant} < {(frontier_ms or 0) - CHANGES_MS}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        self.is_replacing = True
        connection.execute("COMMIT")


def _minutes(changes: str) -> str:
    """Return SQL for the rows of ``live.minutes`` that a table of transitions makes."""
    minute_ms = f"(event_ms + {MINUTE_MS - 1}) // {MINUTE_MS} * {MINUTE_MS}"
    return f"SELECT {minute_ms} AS minute_ms, from_mode, to_mode, count(*) AS n FROM {changes} GROUP BY ALL"


def _listed(limits: Limits, facts: str) -> str:
    """Return SQL for the columns `LISTED` of facts in the columns `fold.KEPT`."""
    names = ", ".join(f'"{name}"' for name in LISTED)
    shown = listed_sql(limits, facts, more='"trigger", last_seen AS last_seen_judged')
    return f"SELECT {names}, {_MORE} FROM (SELECT * REPLACE (last_seen_judged AS last_seen) FROM ({shown}))"


def _open_new(connection: "DuckDBPyConnection", table: Table, files: Sequence[Path]) -> None:
    """Open new files of a table, ``new_<name>``; judgements of few bytes are read once, for all queries of a fold."""
    name = f"new_{table.name}"
    if table != JUDGEMENTS or sum(path.stat().st_size for path in files) > _SMALL_BYTES:
        tables.open_files(connection, name, table, files)
        return
    tables.open_files(connection, f"appended_{table.name}", table, files)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS FROM appended_{table.name}")


def _find(connection: "DuckDBPyConnection", table: str, columns: str) -> None:
    """Create the table ``found``: the rows of affected devices, with their ``place``.

    Hashes are compared first: they are quicker to read than ids.
    """
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE places AS SELECT rowid AS place FROM {table} SEMI JOIN {_AFFECTED} USING (id_hash)"
    )
    connection.execute(f"""CREATE OR REPLACE TEMP TABLE found AS SELECT {columns}, rowid AS place FROM {table}
        WHERE rowid IN (FROM places) AND device_id IN (SELECT device_id FROM {_AFFECTED})""")


def _forget(connection: "DuckDBPyConnection") -> None:
    """Drop the views of files, which maintenance may remove, and the tables of one refresh."""
    views = connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal AND database_name = 'memory'").fetchall()
    for (name,) in views:
        connection.execute(f'DROP VIEW IF EXISTS "{name}"')
    for (name,) in connection.execute("SELECT table_name FROM duckdb_tables() WHERE temporary").fetchall():
        connection.execute(f'DROP TABLE temp."{name}"')
