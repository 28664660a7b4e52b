"""The present kept: the table `device_current`, and reading it with the rows that are newer.

Rule 1: each version of the table is one file, sorted by device. Its footer has the position of the
facts: the versions of the other tables and the ``received_at`` up to which rows are folded, and
counts of rows.
Rule 2: signals are folded up to the last millisecond before the newest row, since more rows of that
millisecond may land.
Rule 3: without a kept table, or if a newer version of another table is no longer in its log, the facts
are those of the definition over all rows.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import CHANGES, JudgementKind
from fleetpulse.core.rows import hash64
from fleetpulse.core.tables import DEVICE_CURRENT, DEVICES, JUDGEMENTS, MESSAGES, QUARANTINE, literals
from fleetpulse.io.delta.corruption import DamagedError, reporting_corruption
from fleetpulse.io.delta.log import DeltaLog, appended_files, holds_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.tables import fetch, files_of
from fleetpulse.reports.history.time_travel import only
from fleetpulse.reports.present import fold
from fleetpulse.reports.present.hourly import is_kept, keep_hourly
from fleetpulse.reports.present.parts import SIGNAL_KINDS, UNJUDGED, Limits, heard_sql, judged_sql, through
from fleetpulse.reports.present.replaced import read_file, replace_file

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

COUNT: Final = "sum(coalesce(messages, 1))::BIGINT"  # SQL: number of judgements, or of quarantined messages
FORM: Final = 1  # version of the position's form; a table with another one is not read
_FOOTER: Final = "fleetpulse.present"
_FEW: Final = 1_000  # devices whose hashes are named in a query
VERSIONED: Final = (JUDGEMENTS, DEVICES, QUARANTINE)  # tables whose new rows are known by version
_CHANGES: Final = literals(CHANGES)


@dataclass(frozen=True, slots=True)
class Position:
    """What the kept facts include.

    Attributes:
        versions: newest version that is folded, by table; of bronze, whose rows are folded by ``received_at``, the
            version at that time.
        commits: digest of the commit of that version, by table; None if the log no longer had it.
        received_ms: ``received_at`` up to which signals are folded, epoch milliseconds.
        limits: frontier and settings of the facts.
        kinds: number of judgements by kind.
        modes: number of transitions by mode, after amendments.
        refused: number of quarantined messages by reason.
        waiting: late messages received after ``received_ms``, which were listed before their
            signals are folded.
        form: version of this form.
    """

    versions: Mapping[str, int]
    commits: Mapping[str, str | None]
    received_ms: int
    limits: Limits
    kinds: Mapping[str, int] = field(default_factory=dict[str, int])
    modes: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    waiting: tuple[Mapping[str, Any], ...] = ()
    form: int = FORM


def _position(text: str) -> Position | None:
    """Parse a position; return None if it has another form."""
    try:
        content = json.loads(text)
        if content["form"] != FORM:
            return None
        return Position(**{**content, "limits": Limits(**content["limits"]), "waiting": tuple(content["waiting"])})
    except (KeyError, TypeError, ValueError):
        return None


class Counts(Protocol):
    """Counts of rows: numbers of judgements by kind, of transitions by mode, and of refused messages by reason."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """Number of judgements by kind."""
        ...

    @property
    def modes(self) -> Mapping[str, int]:
        """Number of transitions by mode, after amendments."""
        ...

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of refused messages by reason."""
        ...


class Present:
    """Facts of the devices at present, open for SQL.

    Attributes:
        connection: connection with the tables that the SQL reads.
        limits: frontier and settings.
        versions: newest versions of the tables that are read, by name.
        position: position of the kept facts; None if the facts are read from all rows.
    """

    def __init__(
        self,
        home: Home,
        connection: "DuckDBPyConnection",
        limits: Limits,
        versions: Mapping[str, int],
        position: Position | None = None,
    ) -> None:
        self.connection = connection
        self.limits = limits
        self.versions = versions
        self.position = position
        self._home = home
        self._prepared_for: str | None = None  # wanted devices for which the new rows are prepared

    def judged(self, among: str = "") -> tuple[str, list[Any]]:
        """Return SQL and parameters for the facts of transitions and registry, see `parts.JUDGED`.

        Args:
            among: table with the ids of the wanted devices; empty: all devices.
        """
        if self.position is None:
            return judged_sql(self.limits, among)
        if self._prepared_for not in ("", among):
            if fold.prepare(self.connection, self.position.limits.frontier_ms, self.limits, among):
                tables.open_table_in(self.connection, self._home, JUDGEMENTS)
                fold.read_anew(self.connection, self.limits)
            self._prepared_for = among
        return fold.judged(among), []

    def facts(self, among: str = "") -> tuple[str, list[Any]]:
        """Return SQL and parameters for all facts, in the columns `fold.KEPT`; see `judged` for the argument."""
        judged, values = self.judged(among)
        return fold.joined(judged, self.heard(among)), values

    def heard(self, among: str = "") -> str:
        """Return SQL for the facts of signals, see `parts.HEARD`; see `judged` for the argument."""
        messages = "messages" if self.position is None else "new_messages"
        if among:
            ids = [row[0] for row in self.connection.execute(f"SELECT device_id FROM {among} LIMIT {_FEW + 1}").fetchall()]
            hashes = ", ".join(str(hash64(device_id)) for device_id in ids)
            is_wanted = f"WHERE device_hash IN ({hashes})" if 0 < len(ids) <= _FEW else ""  # quicker than a join of strings
            messages = f"(FROM {messages} {only(among)} {is_wanted})"
        if self.position is not None:
            return fold.heard(self.limits, among, messages)
        return heard_sql(self.limits, messages, f"(FROM judgements {only(among)})")

    def device_count(self, mode: str | None) -> int:
        """Return the number of devices that were registered or heard; see `devices.devices` for the mode.

        Without a mode, devices that were first heard after the facts were kept, and are not judged yet, are
        not counted: all new messages would have to be read.
        """
        judged, values = self.judged()
        is_heard = f"kind IN ({SIGNAL_KINDS})"
        if mode not in (None, UNJUDGED):
            sql, values = f"SELECT count(*) FROM ({judged}) WHERE mode = ?", [*values, mode]
        elif self.position is not None and mode is None:
            listed = "(FROM kept WHERE is_known OR signal_kind IS NOT NULL)"
            sql = f"""SELECT (SELECT count(*) FROM {listed}) + (
                SELECT count(*) FROM ({fold.new_devices()}) ANTI JOIN {listed} USING (device_id))"""
        else:
            source, kept = "messages", ""
            if self.position is not None:
                source, kept = "new_messages", "UNION SELECT device_id FROM kept WHERE signal_kind IS NOT NULL AND NOT is_known"
            wanted = "true" if mode is None else "mode IS NULL"
            sql = f"""WITH judged AS ({judged}), heard AS (SELECT device_id FROM {source} WHERE {is_heard} {kept})
                SELECT (SELECT count(*) FROM judged WHERE {wanted})
                     + (SELECT count(*) FROM heard ANTI JOIN judged USING (device_id))"""
        [(count,)] = self.connection.execute(sql, values).fetchall()
        return count

    def counts(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Return numbers of judgements by kind, of transitions by mode, and of refused messages by reason."""
        names = ("appended_judgements", "appended_quarantine") if self.position else (JUDGEMENTS.name, QUARANTINE.name)
        return counted(self.connection, *names, before=self.position)


def counted(
    connection: "DuckDBPyConnection", judgements: str, quarantine: str, before: "Counts | None" = None
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Count rows, see `Present.counts`.

    Args:
        connection: connection with the tables.
        judgements: table of the judgements to count.
        quarantine: table of the refused messages to count.
        before: counts to which these are added.
    """
    sign = f"CASE WHEN kind = '{JudgementKind.RETRACT}' THEN -1 ELSE 1 END"
    queries = (
        f"SELECT kind AS name, {COUNT} AS n FROM {judgements} WHERE kind != '{JudgementKind.SUMMARY}' GROUP BY kind",
        f"""SELECT to_mode AS name, sum({sign})::BIGINT AS n FROM {judgements}
            WHERE kind IN ({_CHANGES}) AND to_mode IS NOT NULL GROUP BY to_mode""",
        f"SELECT reason AS name, {COUNT} AS n FROM {quarantine} GROUP BY reason",
    )
    earlier = (before.kinds, before.modes, before.refused) if before else ({}, {}, {})
    totals: list[dict[str, int]] = []
    for sql, total in zip(queries, earlier, strict=True):
        summed = Counter(total)
        for row in fetch(connection, sql):
            summed[row["name"]] += row["n"]
        totals.append({name: n for name, n in sorted(summed.items()) if n})
    return totals[0], totals[1], totals[2]


def limits_of(home: Home, frontier_ms: int | None) -> Limits:
    """Return frontier and settings of a home's present."""
    deployment = home.deployment()
    return Limits(through(frontier_ms), deployment.max_clock_lead_ms, deployment.max_backlog_ms)


@contextmanager
def open_present(home: Home, frontier_ms: int | None, *, from_all_rows: bool = False) -> Iterator[Present]:
    """Open the facts of a home's devices at present.

    Args:
        home: home to read.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
        from_all_rows: whether to ignore the kept facts.

    Raises:
        DamagedError: a file is damaged or missing. The error may also occur while SQL runs.
    """
    with tables.connect() as connection, reporting_corruption(f'a table of "{home.path}"'):
        yield present_in(connection, home, frontier_ms, from_all_rows=from_all_rows)


def present_in(connection: "DuckDBPyConnection", home: Home, frontier_ms: int | None, *, from_all_rows: bool = False) -> Present:
    """Open the facts of a home's devices through a connection, see `open_present`."""
    limits = limits_of(home, frontier_ms)
    found = None if from_all_rows else _read_kept(home, connection, limits)
    if found is None:
        versions = {table.name: tables.open_table_in(connection, home, table) for table in (*VERSIONED, MESSAGES)}
        return Present(home, connection, limits, versions)
    kept, position, new, versions = found
    tables.open_files(connection, "kept", DEVICE_CURRENT, [kept])
    tables.open_table_in(connection, home, DEVICES)
    tables.open_files(connection, "new_devices", DEVICES, new[DEVICES.name])
    tables.open_files(connection, "appended_quarantine", QUARANTINE, new[QUARANTINE.name])
    tables.open_files(connection, "appended_judgements", JUDGEMENTS, new[JUDGEMENTS.name])
    waiting = ""
    if position.waiting:
        connection.register("waiting", tables.to_table(JUDGEMENTS, position.waiting))
        waiting = "UNION ALL BY NAME FROM waiting"
    connection.execute(f"CREATE VIEW new_judgements AS FROM appended_judgements {waiting}")
    newer = [
        file.path
        for file in files_of(home, MESSAGES, "received_at")
        if file.greatest is None or file.greatest.timestamp() * 1000 > position.received_ms
    ]
    tables.open_files(connection, "landed_messages", MESSAGES, newer)
    connection.execute(f"CREATE VIEW new_messages AS FROM landed_messages WHERE epoch_ms(received_at) > {position.received_ms}")
    return Present(home, connection, limits, versions, position)


_Kept = tuple[Path, Position, dict[str, list[Path]], dict[str, int]]


def _read_kept(home: Home, connection: "DuckDBPyConnection", limits: Limits) -> _Kept | None:
    """Return the kept facts: their file, their position, and the newer files and the version of each table.

    Damaged ones count as missing: maintenance writes them again.
    """
    found = read_file(home, connection, DEVICE_CURRENT, _FOOTER)
    if found is None:
        return None
    path, text = found
    position = _position(text)
    if position is None or (position.limits.lead_ms, position.limits.backlog_ms) != (limits.lead_ms, limits.backlog_ms):
        return None
    new, versions = dict[str, list[Path]](), dict[str, int]()
    for name, folded in position.versions.items():
        log = DeltaLog(home.table(name))
        versions[name] = log.latest()
        if versions[name] < folded or log.digest(folded) not in (None, position.commits[name]):
            return None  # the table is another one, such as after a restore
    for table in VERSIONED:
        since = appended_since(DeltaLog(home.table(table.name)), position.versions[table.name], versions[table.name])
        if since is None:
            return None
        new[table.name] = since
    return path, position, new, versions


def appended_since(log: DeltaLog, after: int, through_version: int) -> list[Path] | None:
    """Return the files that a table appended after a version; None if they are not all available."""
    try:
        files = [
            log.table / unquote(added["path"])
            for number in range(after + 1, through_version + 1)
            for added in appended_files(log.actions(number))
        ]
    except FleetError:  # the version was removed from the log
        return None
    return files if all(path.exists() for path in files) else None


def keep_present(home: Home, frontier_ms: int | None, *, dry_run: bool = False) -> int | None:
    """Write the present facts of devices to `device_current` and `mode_hourly_site`.

    Only one process of a home may do so at a time.

    Args:
        home: home whose facts are written.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
        dry_run: whether to count the devices only.

    Returns:
        Number of devices; None if no row is new, nothing has landed, or another process changed the table.

    Raises:
        OSError: the disk cannot be written.
    """
    if not holds_table(home.table(MESSAGES.name)):
        return None
    try:
        return _keep(home, frontier_ms, dry_run=dry_run, from_all_rows=False)
    except DamagedError:
        return _keep(home, frontier_ms, dry_run=dry_run, from_all_rows=True)  # the kept facts may be what is damaged


def _keep(home: Home, frontier_ms: int | None, *, dry_run: bool, from_all_rows: bool) -> int | None:
    spilled = home.table(DEVICE_CURRENT.name).with_name(f".{DEVICE_CURRENT.name}.sort")
    shutil.rmtree(spilled, ignore_errors=True)  # of a killed process
    with open_present(home, frontier_ms, from_all_rows=from_all_rows) as present:
        tables.spill_to(present.connection, spilled)
        source = "messages" if present.position is None else "new_messages"
        [(newest_ms,)] = present.connection.execute(f"SELECT epoch_ms(max(received_at)) FROM {source}").fetchall()
        before = present.position
        is_current = (
            before is not None
            and all(before.versions[one.name] == present.versions[one.name] for one in VERSIONED)
            and is_kept(home, present)
        )
        if newest_ms is None:
            if before is None or is_current:
                return None
            newest_ms = before.received_ms + 1
        elif before is not None and is_current and newest_ms - 1 <= before.received_ms:
            return None
        if dry_run:
            return present.device_count(None)
        position = _position_through(home, present, newest_ms - 1)
        keep_hourly(home, present, position)
        return _write(home, present, position)


def _position_through(home: Home, present: Present, received_ms: int) -> Position:
    source = JUDGEMENTS.name if present.position is None else "new_judgements"
    late = f"""SELECT kind, device_id, message_kind, epoch_ms(received_at) AS received_at_ms,
                      epoch_ms(event_time) AS event_time_ms
               FROM {source} WHERE kind = '{JudgementKind.LATE}' AND epoch_ms(received_at) > {received_ms}"""
    waiting = tuple(fetch(present.connection, late))
    kinds, modes, refused = present.counts()
    commits = {name: DeltaLog(home.table(name)).digest(version) for name, version in present.versions.items()}
    return Position(present.versions, commits, received_ms, present.limits, kinds, modes, refused, waiting)


def _write(home: Home, present: Present, position: Position) -> int | None:
    rows = _facts_through(present, position.received_ms)
    footer = (_FOOTER, json.dumps(asdict(position)))
    return replace_file(home, present.connection, DEVICE_CURRENT, rows, "device_id", footer)


def _facts_through(present: Present, received_ms: int) -> tuple[str, list[Any]]:
    """Return SQL for the facts with the signals received up to an instant."""
    judged, values = present.judged()
    source = "messages" if present.position is None else "new_messages"
    early = f"(FROM {source} WHERE epoch_ms(received_at) <= {received_ms})"
    heard = heard_sql(present.limits, early) if present.position is None else fold.heard(present.limits, messages=early)
    return fold.joined(judged, heard), values
