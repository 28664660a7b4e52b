"""Counts of a started cohort, of the rest, and of the cohort before it started.

Rule 1: a device counts if it was connected (online, degraded, flagged, or held in service) when the cohort started.
Rule 2: a device went offline if a transition to offline has its event time in the span. It had an error if a message of kind
error was received, or a transition to degraded or flagged has its event time, in the span. The return from a held mode to
the mode that it had when the cohort started is no error: a device that was degraded before its announced update still is.
Rule 3: a span ends at the event time up to which all verdicts are written. `core.rollouts.verdict` compares the counts.

Source: ADR 49.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetpulse.core.lifecycle import HELD, PRESENT, Mode
from fleetpulse.core.rollouts.verdict import Answers, Counts, Observation
from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.commands import FINAL
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.core.tables import MESSAGES, literals
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import files_of, open_files, reading
from fleetpulse.reports.frontiers import judged_frontier_ms
from fleetpulse.reports.history.time_travel import READ, Moment, fleet_in

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

_CONNECTED: Final = literals((*PRESENT, *HELD))
_WANTED: Final = "rollout_devices"


def emitted_through_ms(home: Home) -> int | None:
    """Return the event time up to which all verdicts are written, epoch milliseconds; None before the first batch."""
    frontier = judged_frontier_ms(home)
    return None if frontier is None else home.deployment().emitted_through_ms(frontier)


def observe(home: Home, number: int, from_ms: int, cohort: Sequence[str], rest: Sequence[str]) -> Observation:
    """Return the facts about a started cohort.

    Args:
        home: home to read.
        number: number of the cohort.
        from_ms: instant since which it is observed, epoch milliseconds.
        cohort: ids of its devices.
        rest: ids of the devices in no started cohort.
    """
    through_ms = emitted_through_ms(home)
    if through_ms is None or through_ms <= from_ms:
        return Observation(number, from_ms, through_ms)
    with reading(home, READ) as tables:
        tables.execute(f"CREATE TEMP TABLE {_WANTED} AS SELECT unnest(?) AS device_id, true AS treated", [list(cohort)])
        tables.execute(f"INSERT INTO {_WANTED} SELECT unnest(?), false", [list(rest)])
        modes, values = fleet_in(Moment(from_ms, judged_to_ms=from_ms), _WANTED)
        connected = f"SELECT device_id, mode AS mode_before FROM ({modes}) WHERE mode IN ({_CONNECTED})"
        tables.execute(f"CREATE TEMP TABLE connected AS SELECT * FROM {_WANTED} JOIN ({connected}) USING (device_id)", values)
        before_ms = from_ms - (through_ms - from_ms)
        open_files(tables, MESSAGES.name, MESSAGES, _received_since(home, before_ms))
        after, before = _counts(tables, from_ms, through_ms), _counts(tables, before_ms, from_ms)
    return Observation(number, from_ms, through_ms, after[True], after[False], before[True])


def answers(home: Home, command_ids: Sequence[str], *, expected: bool) -> Answers | None:
    """Return the answers to commands; None if the home records none.

    Args:
        home: home to read.
        command_ids: ids of the commands of a cohort.
        expected: whether the stream of commands runs, so that a missing row is a missing answer.
    """
    with reading(home, [COMMANDS.name]) as tables:
        tables.execute("CREATE TEMP TABLE wanted AS SELECT unnest(?) AS command_id", [list(command_ids)])
        counted = tables.execute(
            f"""SELECT status, count(*) FROM (
                SELECT command_id, arg_min(status, (answered_at IS NULL, answered_at, coalesce(answer_position, 0)))
                FILTER (status IN ({literals(FINAL)})) AS status
                FROM commands SEMI JOIN wanted USING (command_id) GROUP BY command_id) GROUP BY status"""
        ).fetchall()
    if not counted and not expected:
        return None
    known = {status: number for status, number in counted if status is not None}
    return Answers(len(command_ids) - sum(known.values()), *(known.get(status, 0) for status in FINAL))


def _received_since(home: Home, since_ms: int) -> list[Path]:
    files = files_of(home, MESSAGES, "received_at")
    return [file.path for file in files if file.greatest is None or file.greatest.timestamp() * 1_000 >= since_ms]


def _counts(tables: "DuckDBPyConnection", after_ms: int, through_ms: int) -> dict[bool, Counts]:
    """Return the counts over a span, of the cohort (True) and of the rest (False)."""
    sql = f"""
        WITH offline AS ({_changed((Mode.OFFLINE,))}),
        errors AS (
            SELECT device_id FROM messages WHERE kind = '{Kind.ERROR}' AND epoch_ms(received_at) > $after AND
            epoch_ms(received_at) <= $through
            UNION ALL {_changed((Mode.DEGRADED, Mode.FLAGGED))}
            AND NOT (from_mode IN ({literals(HELD)}) AND to_mode = mode_before))
        SELECT treated, count(*) AS devices, count(*) FILTER (device_id IN (SELECT device_id FROM offline)) AS offline,
               count(*) FILTER (device_id IN (SELECT device_id FROM errors)) AS errors
        FROM connected GROUP BY treated
    """
    rows = tables.execute(sql, {"after": after_ms, "through": through_ms}).fetchall()
    return {True: Counts(0), False: Counts(0), **{treated: Counts(*counted) for treated, *counted in rows}}


def _changed(modes: Iterable[Mode]) -> str:
    """Return SQL for the connected devices with a transition to one of several modes in a span."""
    return f"""SELECT device_id FROM transitions JOIN connected USING (device_id) WHERE to_mode IN ({literals(modes)})
        AND epoch_ms(event_time) > $after AND epoch_ms(event_time) <= $through"""
