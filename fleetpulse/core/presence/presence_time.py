"""Presence time of signals, late signals, and faults of device clocks.

Presence time is the instant at which a signal proves that its device was alive.

Rule 1: a device that sends signals within its timeout is never offline for silence, even if its
clock is wrong. A signal with a clock fault counts at ``received_at``.
Rule 2: no signal proves life after it was received. If the clock of its device is slightly ahead,
it counts at ``received_at`` too.
Rule 3: presence time depends only on the row, the settings of the installation, and the frontier
when the row was read.

Source: ADR 32.
"""

from dataclasses import replace
from typing import Final

from fleetpulse.core.rows import SIGNALS, Clock, Row, Trust
from fleetpulse.core.times import format_duration

FAULTS: Final = (Trust.INVALID, Trust.AHEAD, Trust.BEHIND)  # clock faults: the event time is not used


def classify_event_time(row: Row, frontier_ms: int | None, max_clock_lead_ms: int, max_backlog_ms: int) -> Trust:
    """Classify the event time of a signal: on time, late, or a clock fault.

    A signal is late if its event time lies at or before the frontier.

    Args:
        row: a signal.
        frontier_ms: frontier when the row was read, epoch milliseconds; None if there is none yet.
        max_clock_lead_ms: longest lead of an event time over ``received_at``.
        max_backlog_ms: greatest age of an event time at ``received_at``.
    """
    assert row.kind in SIGNALS, "a will has no clock: it takes effect when it is received"
    if row.event_time_ms is None or row.clock is Clock.INVALID:
        return Trust.INVALID
    lead_ms = row.event_time_ms - row.received_at_ms
    if row.clock is Clock.DEVICE and lead_ms > max_clock_lead_ms:
        return Trust.AHEAD
    if row.clock is Clock.DEVICE and -lead_ms > max_backlog_ms:
        return Trust.BEHIND
    return Trust.LATE if frontier_ms is not None and row.event_time_ms <= frontier_ms else Trust.ON_TIME


def with_presence_time(row: Row, trust: Trust) -> Row:
    """Return a signal with its presence time and the class of its event time."""
    if trust is not Trust.ON_TIME or row.event_time_ms is None:
        return replace(row, presence_ms=row.received_at_ms, trust=trust)
    return replace(row, presence_ms=min(row.event_time_ms, row.received_at_ms), trust=trust)


def presence_sql(max_clock_lead_ms: str, max_backlog_ms: str, millis: str = "unix_millis") -> str:
    """Return a SQL expression of the presence time of a signal that is not late.

    It applies to a row of bronze.

    Args:
        max_clock_lead_ms: SQL expression of the longest clock lead, milliseconds.
        max_backlog_ms: SQL expression of the greatest backlog, milliseconds.
        millis: function from a timestamp to epoch milliseconds: ``unix_millis`` of Spark, or
            ``epoch_ms`` of DuckDB.
    """
    lead_ms = f"{millis}(event_time) - {millis}(received_at)"
    return f"""CASE WHEN clock = '{Clock.INVALID}' THEN received_at
        WHEN clock = '{Clock.DEVICE}' AND ({lead_ms} > {max_clock_lead_ms} OR {lead_ms} < -({max_backlog_ms})) THEN received_at
        ELSE least(event_time, received_at) END"""


def trust_sql(
    max_clock_lead_ms: str,
    max_backlog_ms: str,
    late: str,
    clock: str = "clock",
    event_time: str = "event_time",
    received_at: str = "received_at",
) -> str:
    """Return a DuckDB expression of the class of a signal's event time.

    Args:
        max_clock_lead_ms: SQL expression of the longest clock lead, milliseconds.
        max_backlog_ms: SQL expression of the greatest backlog, milliseconds.
        late: SQL condition: the signal is late, and proves its device alive.
        clock: column with the source of the event time.
        event_time: column with the event time.
        received_at: column with the time of receipt.
    """
    lead_ms = f"epoch_ms({event_time}) - epoch_ms({received_at})"
    return f"""CASE WHEN {clock} = '{Clock.INVALID}' THEN '{Trust.INVALID}'
        WHEN {clock} = '{Clock.DEVICE}' AND {lead_ms} > {max_clock_lead_ms} THEN '{Trust.AHEAD}'
        WHEN {clock} = '{Clock.DEVICE}' AND {lead_ms} < -({max_backlog_ms}) THEN '{Trust.BEHIND}'
        WHEN {late} THEN '{Trust.LATE}' ELSE '{Trust.ON_TIME}' END"""


def clock_description(trust: Trust, offset_ms: int | None) -> str | None:
    """Describe a device's clock for people; None if it is right.

    Args:
        trust: class of the event time of the newest signal.
        offset_ms: offset of that signal, see `offset_ms`.
    """
    if trust is Trust.ON_TIME:
        return None
    if trust is Trust.AHEAD and offset_ms is not None:
        return f"{format_duration(offset_ms)} ahead"
    if trust is Trust.LATE and offset_ms is not None:
        return f"{format_duration(-offset_ms)} behind, or its messages are held up"
    return "not set"


def offset_ms(row: Row) -> int | None:
    """Return event time less ``received_at`` of a late or faulty clock, milliseconds.

    None if the signal is on time, or its event time is invalid.
    """
    if row.trust in (Trust.ON_TIME, Trust.INVALID) or row.event_time_ms is None:
        return None
    return row.event_time_ms - row.received_at_ms
