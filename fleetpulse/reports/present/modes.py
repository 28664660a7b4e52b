"""Present modes of devices for publishing: of all devices, or of devices with new transitions.

Rule 1: a report computes no verdict. A mode is that of the newest transition, after amendments; a
device without a transition, such as one that was only registered, is left out.
Rule 2: rows that the lifecycle job appends are newer than all earlier rows of their devices. Rows of
amendments and of an outbox may be older: the modes of their devices are read from the table.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from fleetpulse.core.judgements import AMENDMENTS, CHANGES
from fleetpulse.core.lifecycle import OUT_OF_SERVICE, Mode
from fleetpulse.core.messages.verdicts import PresentMode
from fleetpulse.core.tables import JUDGEMENTS, literals
from fleetpulse.io.delta.corruption import reporting_corruption
from fleetpulse.io.delta.log import DeltaLog, appended_files
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.outbox import is_outbox
from fleetpulse.io.tables.tables import connect, open_files, query, reading
from fleetpulse.reports.history.time_travel import NEWEST

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

_KINDS: Final = literals(CHANGES)
_OUT_OF_SERVICE: Final = literals(OUT_OF_SERVICE)
_COLUMNS: Final = (
    """device_id, to_mode AS mode, epoch_ms(event_time) AS since_ms, epoch_ms(last_seen) AS last_seen_ms, "trigger" """
)
_FIRST: Final = f"QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY {NEWEST}) = 1"
_PRESENT: Final = f"""
    WITH wanted AS MATERIALIZED ({{wanted}}),
    newest AS (SELECT {_COLUMNS} FROM transitions SEMI JOIN wanted USING (device_id) {_FIRST})
    SELECT device_id, mode, since_ms, last_seen_ms, "trigger", true AS appears FROM wanted LEFT JOIN newest USING (device_id)
    ORDER BY device_id
"""
_APPEARS: Final = f"bool_or(transition_no = 1 OR from_mode IN ({_OUT_OF_SERVICE})) OVER (PARTITION BY device_id)"
_CHANGED: Final = f"""
    SELECT {_COLUMNS}, {_APPEARS} AS appears FROM appended ANTI JOIN amended USING (device_id) {_FIRST} ORDER BY device_id
"""
_FETCHED: Final = 1_000  # rows that are read at a time


def device_count(home: Home) -> int:
    """Return the approximate number of devices that had a transition."""
    return query(home, f"SELECT approx_count_distinct(device_id) AS n FROM judgements WHERE kind IN ({_KINDS})")[0]["n"]


def present_modes(home: Home, part: int, parts: int) -> list[PresentMode]:
    """Return the present modes of one of several equal parts of the devices, ordered by id.

    Args:
        home: home to read.
        part: number of the part, from 0.
        parts: number of parts.
    """
    wanted = f"SELECT DISTINCT device_id FROM judgements WHERE kind IN ({_KINDS}) AND hash(device_id) % {parts} = {part}"
    with reading(home) as tables:
        return list(_fetched(tables, _PRESENT.format(wanted=wanted)))


def changed_modes(home: Home, log: DeltaLog, first: int, through: int) -> Iterator[PresentMode]:
    """Yield the present modes of devices with transitions or amendments in versions of ``judgements``.

    Args:
        home: home to read.
        log: log of the table.
        first: first version.
        through: last version.

    Raises:
        FleetError: a version is no longer in the log.
        DamagedError: a file is damaged, or was removed.
    """
    appended, amended = _files(log, first, through)
    if amended:
        with reading(home) as tables:
            open_files(tables, "amended", JUDGEMENTS, amended)
            yield from _fetched(tables, _PRESENT.format(wanted="SELECT DISTINCT device_id FROM amended"))
    if appended:
        with connect() as tables, reporting_corruption(f'"{log.table}"'):
            open_files(tables, "amended", JUDGEMENTS, amended)
            open_files(tables, "appended", JUDGEMENTS, appended)
            yield from _fetched(tables, _CHANGED)


def _files(log: DeltaLog, first: int, through: int) -> tuple[list[Path], list[Path]]:
    """Return the files with transitions of the lifecycle job, and those with rows that may be older."""
    appended: list[Path] = []
    amended: list[Path] = []
    for version in range(first, through + 1):
        actions = log.actions(version)
        is_late = any(is_outbox(action["txn"]["appId"]) for action in actions if "txn" in action)
        for added in appended_files(actions):
            kind = added["partitionValues"].get("kind")
            if kind in CHANGES:
                files = amended if is_late or kind in AMENDMENTS else appended
                files.append(log.table / unquote(added["path"]))
    return appended, amended


def _fetched(tables: "DuckDBPyConnection", sql: str) -> Iterator[PresentMode]:
    result = tables.execute(sql)
    while rows := result.fetchmany(_FETCHED):
        yield from map(_present, rows)


def _present(row: Sequence[Any]) -> PresentMode:
    device_id, mode, since_ms, last_seen_ms, trigger, appears = row
    return PresentMode(device_id, mode and Mode(mode), since_ms, last_seen_ms, trigger, appears)
