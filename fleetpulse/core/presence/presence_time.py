"""Presence time: the instant for which a signal proves that its device was alive, even if the device's clock is wrong.

Rule 1: a device that sends signals within its timeout is never offline for silence: with a clock fault a signal counts for the
instant at which it was received.
Rule 2: no signal proves life after it was received: one whose clock is a little ahead counts for that instant too.
Rule 3: presence time depends on the row, the installation and the frontier at the row, and on nothing else.

Source: docs/adr/0032-presence-time.md
"""

from dataclasses import replace
from typing import Final

from fleetpulse.core.rows import SIGNALS, Clock, Row, Trust
from fleetpulse.core.times import format_duration

FAULTS: Final = (Trust.INVALID, Trust.AHEAD, Trust.BEHIND)  # clock faults: the event time is not used


def trusted(row: Row, frontier_ms: int | None, max_clock_lead_ms: int, max_backlog_ms: int) -> Trust:
    """Classify the event time of a signal.

    Args:
        row: a signal.
        frontier_ms: the frontier when it was read, epoch milliseconds; None before the first.
        max_clock_lead_ms: how far ahead of ``received_at`` an event time may be.
        max_backlog_ms: how far behind it may be.
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


def present(row: Row, trust: Trust) -> Row:
    """Return a signal with its presence time: the instant for which it proves that its device was alive."""
    if trust is not Trust.ON_TIME or row.event_time_ms is None:
        return replace(row, presence_ms=row.received_at_ms, trust=trust)
    return replace(row, presence_ms=min(row.event_time_ms, row.received_at_ms), trust=trust)


def presence_sql(max_clock_lead_ms: str, max_backlog_ms: str, millis: str = "unix_millis") -> str:
    """Return presence time as a SQL expression over a row of bronze: a signal that did not come late.

    Args:
        max_clock_lead_ms: expression of the clock lead, milliseconds.
        max_backlog_ms: expression of the backlog, milliseconds.
        millis: the function from a timestamp to epoch milliseconds: ``unix_millis`` of Spark, ``epoch_ms`` of DuckDB.
    """
    lead_ms = f"{millis}(event_time) - {millis}(received_at)"
    return f"""CASE WHEN clock = '{Clock.INVALID}' THEN received_at
        WHEN clock = '{Clock.DEVICE}' AND ({lead_ms} > {max_clock_lead_ms} OR {lead_ms} < -({max_backlog_ms})) THEN received_at
        ELSE least(event_time, received_at) END"""


def trust_sql(max_clock_lead_ms: str, max_backlog_ms: str, late: str) -> str:
    """Return the class of a signal's event time as a SQL expression of DuckDB.

    Args:
        max_clock_lead_ms: expression of the clock lead, milliseconds.
        max_backlog_ms: expression of the backlog, milliseconds.
        late: expression: whether the signal came late, and counts as heard.
    """
    lead_ms = "epoch_ms(event_time) - epoch_ms(received_at)"
    return f"""CASE WHEN clock = '{Clock.INVALID}' THEN '{Trust.INVALID}'
        WHEN clock = '{Clock.DEVICE}' AND {lead_ms} > {max_clock_lead_ms} THEN '{Trust.AHEAD}'
        WHEN clock = '{Clock.DEVICE}' AND {lead_ms} < -({max_backlog_ms}) THEN '{Trust.BEHIND}'
        WHEN {late} THEN '{Trust.LATE}' ELSE '{Trust.ON_TIME}' END"""


def clock_words(trust: Trust, offset_ms: int | None) -> str | None:
    """Describe a device's clock for people; None if it is right.

    Args:
        trust: of the device's newest signal.
        offset_ms: see `offset_ms`, of that signal.
    """
    if trust is Trust.ON_TIME:
        return None
    if trust is Trust.AHEAD and offset_ms is not None:
        return f"{format_duration(offset_ms)} ahead"
    if trust is Trust.LATE and offset_ms is not None:
        return f"{format_duration(-offset_ms)} behind, or its messages are held up"
    return "not set"


def offset_ms(row: Row) -> int | None:
    """Return event time less ``received_at`` of a signal that is late or has a clock fault, milliseconds; None if invalid."""
    if row.trust in (Trust.ON_TIME, Trust.INVALID) or row.event_time_ms is None:
        return None
    return row.event_time_ms - row.received_at_ms
