"""Connection sessions of devices, open ones included, and their durations by the reason of their end.

Rule: the table has a row for the start of a session, and one for its end. A session is open as long as it has no
row for its end; its duration is then that up to the newest `received_at` that the stream has read.
"""

from typing import Any, Final

from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.tables import SESSIONS
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, reading

OPEN: Final = "open"  # stands for the reason of the end in a summary
_NAMES: Final = "device_id, site, gateway, session, boot, firmware, started_at, started_by"
EACH: Final = f"""given AS (
    SELECT ?::VARCHAR AS device, ?::BOOLEAN AS only_open, ?::BIGINT AS since_ms, ?::BIGINT AS read_ms
), each AS (
    SELECT {_NAMES}, last_seen, messages, ended_at, ended_by, duration_ms FROM sessions WHERE ended_at IS NOT NULL
    UNION ALL
    SELECT {_NAMES}, NULL, NULL, NULL, NULL, read_ms - epoch_ms(started_at) FROM sessions AS began CROSS JOIN given
    ANTI JOIN (SELECT device_id, started_at, position FROM sessions WHERE ended_at IS NOT NULL) AS over
    USING (device_id, started_at, position)
), chosen AS (
    SELECT each.* FROM each CROSS JOIN given
    WHERE (device IS NULL OR device_id = device) AND (NOT only_open OR ended_at IS NULL)
        AND (since_ms IS NULL OR ended_at IS NULL OR epoch_ms(ended_at) >= since_ms)
)"""


def read_ms(home: Home) -> int | None:
    """Return the ``received_at`` up to which the stream has read, epoch milliseconds; None if it has not run."""
    return judged_ms(home.stream_checkpoint(StreamName.SESSIONS))


def sessions(
    home: Home, device_id: str | None = None, *, only_open: bool = False, since_ms: int | None = None, last: int | None = None
) -> list[dict[str, Any]]:
    """Return sessions, newest start first.

    Args:
        home: home to read.
        device_id: device of the sessions; None for all devices.
        only_open: whether sessions that have ended are left out.
        since_ms: instant at or after which a session was open, epoch milliseconds; None for all.
        last: maximum number of sessions; None for all.

    Returns:
        One row for each session. If it is open, ``duration_ms`` counts up to `read_ms`, and ``last_seen`` and
        ``messages`` are None.
    """
    limit = "" if last is None else f"LIMIT {int(last)}"
    sql = f"WITH {EACH} SELECT * FROM chosen ORDER BY started_at DESC, device_id, ended_at DESC NULLS FIRST {limit}"
    return _rows(home, sql, device_id, only_open=only_open, since_ms=since_ms)


def by_reason(
    home: Home, device_id: str | None = None, *, only_open: bool = False, since_ms: int | None = None
) -> list[dict[str, Any]]:
    """Return number, devices and durations of the sessions by the reason of their end, open ones last.

    Args:
        home: home to read.
        device_id: device of the sessions; None for all devices.
        only_open: whether sessions that have ended are left out.
        since_ms: instant at or after which a session was open, epoch milliseconds; None for all.

    Returns:
        One row for each reason, or `OPEN`: ``ended_by``, ``sessions``, ``devices``, and ``median_ms``, ``shortest_ms``
        and ``longest_ms`` of the durations in milliseconds.
    """
    sql = f"""WITH {EACH} SELECT * FROM (
        SELECT coalesce(chosen.ended_by, '{OPEN}') AS ended_by, count(*) AS sessions,
        count(DISTINCT device_id) AS devices, median(duration_ms)::BIGINT AS median_ms, min(duration_ms) AS shortest_ms,
        max(duration_ms) AS longest_ms FROM chosen GROUP BY 1
        ) ORDER BY ended_by = '{OPEN}', sessions DESC, ended_by"""
    return _rows(home, sql, device_id, only_open=only_open, since_ms=since_ms)


def _rows(home: Home, sql: str, device_id: str | None, *, only_open: bool, since_ms: int | None) -> list[dict[str, Any]]:
    with reading(home, [SESSIONS.name], device_id=device_id) as tables:
        return fetch(tables, sql, [device_id, only_open, since_ms, read_ms(home)])
