"""Lists of the results of streams, newest first, from the files of a span of time.

Rule 1: the state of a result comes from the SQL of its report, such as `commands`.
Rule 2: a file is opened only if its statistics allow rows of the span. All rows of a result in the span are in such
files, so the span changes no state.
Rule 3: the order is total, so that a page can begin after any row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.streams.tables import COMMANDS, SESSIONS
from fleetpulse.core.tables import Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import File, connect, files_of, open_files
from fleetpulse.reports.streams.commands import INSTANTS, RESOLVED
from fleetpulse.reports.streams.newest import newest_ms
from fleetpulse.reports.streams.sessions import EACH, read_ms

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection


@dataclass(frozen=True, slots=True)
class StreamList:
    """List of the results of a stream.

    Attributes:
        table: table of the stream.
        resolved: SQL of the results, from the rows of the table.
        columns: columns of a result.
        at: instants that place a result in time; the first one that is not null counts.
        key: columns that complete the order of results at one instant.
        values: function that returns the parameters of ``resolved`` for a home.
    """

    table: Table
    resolved: str
    columns: tuple[str, ...]
    at: tuple[str, ...]
    key: tuple[str, ...]
    values: Callable[[Home], tuple[Any, ...]] = lambda _: ()

    @property
    def instants(self) -> frozenset[str]:
        """Columns that are instants."""
        return frozenset(column.name for column in self.table.columns if column.type == "timestamp")

    def newest_ms(self, home: Home) -> int | None:
        """Return the newest instant of the list, epoch milliseconds; None without rows."""
        return newest_ms(home, self.table, self.at)

    @property
    def at_sql(self) -> str:
        """SQL of the instant of a result, epoch milliseconds."""
        return f"coalesce({', '.join(f'epoch_ms({name})' for name in self.at)})"

    @property
    def key_sql(self) -> str:
        """SQL of the order of results."""
        return f"({', '.join([self.at_sql, *(f'epoch_ms({name})' if name in self.instants else name for name in self.key)])})"


COMMAND_LIST: Final = StreamList(
    COMMANDS,
    RESOLVED,
    ("device_id", "sent_at", "command_id", "name", "payload", "status", "answered_at", "latency_ms", "reason", "reported",
     "answers", "site"),
    INSTANTS,
    ("device_id", "command_id", "status"),
    lambda _: (None,),
)  # fmt: skip

SESSION_LIST: Final = StreamList(
    SESSIONS,
    f"WITH {EACH} SELECT * FROM chosen",
    ("device_id", "started_at", "ended_at", "ended_by", "duration_ms", "started_by", "last_seen", "messages", "session", "boot",
     "firmware", "gateway", "site"),
    ("ended_at", "started_at"),
    ("device_id", "started_at"),
    lambda home: (None, False, None, read_ms(home)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """Results that are wanted.

    Attributes:
        since_ms: least instant, epoch milliseconds; None for all.
        device_id: device; None for all.
        equal: wanted values of columns; None is null.
        after: instant in milliseconds and key of the result before the page; None for the first page.
    """

    since_ms: int | None = None
    device_id: str | None = None
    equal: tuple[tuple[str, Any], ...] = ()
    after: Sequence[Any] | None = None


def open_list(home: Home, of: StreamList, since_ms: int | None) -> "DuckDBPyConnection":
    """Open the files of a table that can have rows of a span; see `list_sql`. The caller closes the connection.

    Args:
        home: home to read.
        of: the list.
        since_ms: start of the span, epoch milliseconds; None for all files.
    """
    by_path: dict[Path, list[File]] = {}
    for name in of.at:
        for file in files_of(home, of.table, name):
            by_path.setdefault(file.path, []).append(file)
    connection = connect()
    open_files(connection, of.table.name, of.table, [path for path, files in by_path.items() if _may_have(files, since_ms)])
    return connection


def _may_have(files: Sequence[File], since_ms: int | None) -> bool:
    greatest = [file.greatest for file in files if file.greatest is not None]
    return since_ms is None or not greatest or max(greatest).timestamp() * 1000 >= since_ms


def list_sql(home: Home, of: StreamList, wanted: Wanted, limit: int | None) -> tuple[str, list[Any]]:
    """Return SQL and its parameters for results, newest first; instants are ``<name>_ms``.

    Args:
        home: home of the table, which is open.
        of: the list.
        wanted: results that are wanted.
        limit: maximum number; None for all.
    """
    shown = ", ".join(f"epoch_ms({name}) AS {name}_ms" if name in of.instants else name for name in of.columns)
    parts, values = ["true"], [*of.values(home)]
    if wanted.since_ms is not None:
        parts.append(f"{of.at_sql} >= ?")
        values.append(wanted.since_ms)
    if wanted.device_id is not None:
        parts.append("device_id = ?")
        values.append(wanted.device_id)
    for name, value in wanted.equal:
        parts.append(f"{name} IS NOT DISTINCT FROM ?")
        values.append(value)
    if wanted.after is not None:
        parts.append(f"{of.key_sql} < ({', '.join('?' * len(wanted.after))})")
        values += wanted.after
    page = "" if limit is None else f"LIMIT {int(limit)}"
    return f"SELECT {shown} FROM ({of.resolved}) WHERE {' AND '.join(parts)} ORDER BY {of.key_sql} DESC {page}", values


def key_of(of: StreamList, row: Mapping[str, Any]) -> list[str | int]:
    """Return the key of a result, with which the page after it begins."""
    at_ms = next(row[f"{name}_ms"] for name in of.at if row[f"{name}_ms"] is not None)
    return [at_ms, *(row[f"{name}_ms" if name in of.instants else name] for name in of.key)]
