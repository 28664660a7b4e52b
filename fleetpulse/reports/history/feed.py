"""Feed of changes of modes: transitions, retractions and additions as emitted, in commit order.

Rule 1: a cursor names the next row: a version of ``judgements``, and the number of rows of that version
before it. A client that continues with the cursor of each answer receives each row once, since files that a
commit appended never change.
Rule 2: versions that rewrite files, such as those of maintenance, have no rows.
Rule 3: a cursor whose version is no longer in the table's log is an error, not a gap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.judgements import CHANGES
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.corruption import reporting_corruption
from fleetpulse.io.delta.log import DeltaLog, appended_files, row_count
from fleetpulse.io.tables.tables import connect, fetch, open_files

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

NEWEST: Final = "newest"
OLDEST: Final = "oldest"
COLUMNS: Final = (
    "kind", "event_time", "device_id", "from_mode", "to_mode", "trigger", "site", "device_class", "gateway", "last_seen",
    "runtime_ms", "reason", "policy_version", "judged_at", "life", "transition_no", "amendment_no", "takes_back",
)  # fmt: skip
_INSTANTS: Final = frozenset(column.name for column in JUDGEMENTS.columns if column.type == "timestamp")
_SELECTED: Final = ", ".join(f'epoch_ms("{name}") AS {name}_ms' if name in _INSTANTS else f'"{name}"' for name in COLUMNS)
_VERSIONS: Final = 200  # versions that are read for one answer
_DIGITS: Final = 15


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Place of the next row in the feed.

    Attributes:
        version: version of ``judgements``; the one after the newest, if all rows were read.
        offset: number of rows of that version before the place.
    """

    version: int
    offset: int = 0

    def __str__(self) -> str:
        """Return the text that `parse_cursor` reads."""
        return f"{self.version}.{self.offset}"


@dataclass(frozen=True, slots=True)
class Changes:
    """Part of the feed.

    Attributes:
        rows: rows with the columns `COLUMNS`; instants are ``<name>_ms``, and ``cursor`` is the place after the row.
        following: place after the part.
        at_end: whether no row follows at present.
    """

    rows: list[dict[str, Any]]
    following: Cursor
    at_end: bool


def parse_cursor(text: str, log: DeltaLog) -> Cursor:
    """Parse a cursor, `NEWEST` (the end of the feed), or `OLDEST` (the oldest version in the log).

    Raises:
        Misuse: the text is none of these.
    """
    if text == NEWEST:
        return Cursor(log.latest() + 1)
    if text == OLDEST:
        return Cursor(_oldest(log))
    version, _, offset = text.partition(".")
    if not all(part.isascii() and part.isdecimal() and len(part) <= _DIGITS for part in (version, offset)):
        raise Misuse(
            f'a cursor must be the "next" of an answer, "{NEWEST}" or "{OLDEST}"; got {text!r}', code="parameter-invalid"
        )
    return Cursor(int(version), int(offset))


def _oldest(log: DeltaLog) -> int:
    """Return the first of the newest versions without a gap; 0 if there is no version."""
    version = log.latest()
    while version > 0 and log.digest(version - 1) is not None:
        version -= 1
    return max(version, 0)


def changes_after(log: DeltaLog, cursor: Cursor, limit: int) -> Changes:
    """Return the rows that follow a place in the feed.

    Args:
        log: log of ``judgements``.
        cursor: place of the first row.
        limit: maximum number of rows.

    Raises:
        FleetError: the log no longer has the version of the cursor, or never had it.
        DamagedError: a file is damaged.
    """
    latest = log.latest()
    if cursor.version > latest + 1:
        raise _expired(cursor, f"the newest version is {latest}")
    through = min(latest, cursor.version + _VERSIONS - 1)
    rows: list[dict[str, Any]] = []
    with connect() as tables, reporting_corruption(f'"{log.table}"'):
        for version in range(cursor.version, through + 1):
            first = cursor if version == cursor.version else Cursor(version)
            found, is_complete = _rows_of(tables, log, first, limit - len(rows))
            rows += found
            if not is_complete:
                return Changes(rows, Cursor(version, first.offset + len(found)), at_end=False)
            if rows:
                rows[-1]["cursor"] = str(Cursor(version + 1))
    return Changes(rows, Cursor(through + 1) if through >= cursor.version else cursor, at_end=through == latest)


def _rows_of(tables: "DuckDBPyConnection", log: DeltaLog, first: Cursor, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return rows of one version, and whether they are its last ones."""
    rows: list[dict[str, Any]] = []
    begin = 0  # number of rows in the files before
    for path, known in _files(log, first):
        if not path.exists():
            raise _expired(first, f'"{path.name}" was removed')
        open_files(tables, "appended", JUDGEMENTS, [path])
        count = fetch(tables, "SELECT count(*) AS n FROM appended")[0]["n"] if known is None else known
        offset = first.offset + len(rows)
        if offset < begin + count:
            found = fetch(tables, f"SELECT {_SELECTED} FROM appended LIMIT {limit - len(rows)} OFFSET {offset - begin}")
            rows += ({**row, "cursor": str(Cursor(first.version, offset + n))} for n, row in enumerate(found, 1))
            if offset + len(found) < begin + count:
                return rows, False
        begin += count
    return rows, True


def _files(log: DeltaLog, first: Cursor) -> Iterator[tuple[Path, int | None]]:
    """Yield the files with changes that a version appended, in the order of the commit, with their numbers of rows."""
    try:
        actions = log.actions(first.version)
    except FleetError as error:
        raise _expired(first, str(error)) from None
    for added in appended_files(actions):
        if added["partitionValues"].get("kind") in CHANGES:
            count = row_count(added, unknown=-1)
            yield log.table / unquote(added["path"]), None if count < 0 else count


def _expired(cursor: Cursor, why: str) -> FleetError:
    return FleetError(
        f'the rows after the cursor "{cursor}" are no longer available one by one ({why}); list all devices, and continue with '
        f'the "cursor" of the first page; for clients that pause for longer, raise keep_judgement_versions',
        code="cursor-expired",
    )
