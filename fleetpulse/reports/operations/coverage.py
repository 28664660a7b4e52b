"""Coverage gaps of each bridge: spans in which it was not listening, from the rows that it wrote.

Rule: a gap begins at the first row that opens it, and ends at the next row of the bridge that closes it, as in
`core.presence.coverage`.
"""

from typing import Any, Final

from fleetpulse.core.tables import COVERAGE
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query

_ORDER: Final = "received_at, segment, op DESC"  # of one instant, an outage is written before its end
_GAPS: Final = f"""
    WITH numbered AS (
        SELECT *, count(*) FILTER (op = 'close') OVER (PARTITION BY bridge ORDER BY {_ORDER}
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS closed_before
        FROM coverage)
    SELECT bridge, epoch_ms(arg_min("at", received_at) FILTER (op = 'open')) AS since_ms,
           epoch_ms(max("at") FILTER (op = 'close')) AS until_ms,
           arg_min(why, received_at) FILTER (op = 'open') AS why
    FROM numbered GROUP BY bridge, closed_before HAVING bool_or(op = 'open')
"""


def coverage_gaps(
    home: Home, last: int, *, only_open: bool = False, bridge: str = "", ends_after_ms: int | None = None
) -> list[dict[str, Any]]:
    """Return coverage gaps, newest first.

    Args:
        home: home to read.
        last: maximum number of gaps.
        only_open: whether to leave out gaps that ended.
        bridge: bridge to filter by; empty: all.
        ends_after_ms: instant after which a gap must end, epoch milliseconds; None for no limit.

    Returns:
        Rows with ``bridge``, ``since_ms``, ``until_ms`` (None: the gap is open), and ``why``.
    """
    sql = f"""SELECT * FROM ({_GAPS}) WHERE (until_ms IS NULL OR NOT ?) AND (bridge = ? OR ? = '')
              AND (until_ms IS NULL OR ?::BIGINT IS NULL OR until_ms > ?::BIGINT)
              ORDER BY since_ms DESC, bridge LIMIT ?"""
    return query(home, sql, [only_open, bridge, bridge, ends_after_ms, ends_after_ms, last], tables=[COVERAGE.name])
