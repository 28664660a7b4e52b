"""Alarms of metrics: bounds of the policy that all values of a device have broken for some time.

Rule 1: a window breaks a bound if all its values lie beyond it. A window without values breaks no bound.
Rule 2: an alarm is a function of the windows up to its own. It is raised by the first of consecutive windows
that break a bound with which they cover its time, so each such run raises one alarm.
Rule 3: the bound is that of the policy in force at the start of the window that raises the alarm.
Rule 4: of a window that the table has, its row in the table counts. A rebuild reads a window in part if it began before
the span of the rebuild.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from fleetpulse.core.streams.tables import VITAL_ALARMS, VITALS
from fleetpulse.core.streams.vitals import Vital, VitalsSpan
from fleetpulse.core.times import END_OF_TIME_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import arrow_schema, connect, files_of, open_files

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

_ALARMS: Final = f"""
WITH broken AS (
    SELECT DISTINCT device_id, site, epoch_ms(window_start) AS start_ms, last
    FROM (SELECT * FROM closed ANTI JOIN vitals USING ({", ".join(VITALS.key)}) UNION ALL BY NAME SELECT * FROM vitals)
    WHERE metric = $metric AND NOT late AND epoch_ms(window_end) - epoch_ms(window_start) = $window_ms
        AND epoch_ms(window_start) % $slide_ms = 0 AND (max < $below OR min > $above)
), runs AS (
    SELECT *,
        count(*) OVER (device RANGE BETWEEN $covered_ms PRECEDING AND CURRENT ROW) AS windows,
        count(*) OVER (device RANGE BETWEEN $covered_ms + $slide_ms PRECEDING AND $covered_ms + $slide_ms PRECEDING) AS before
    FROM broken WINDOW device AS (PARTITION BY device_id, site ORDER BY start_ms)
)
SELECT device_id, $metric AS metric, make_timestamptz((start_ms - $covered_ms) * 1000) AS broken_from,
    make_timestamptz((start_ms + $window_ms) * 1000) AS raised_at, site, $below::DOUBLE AS below, $above::DOUBLE AS above,
    $for_ms::BIGINT AS for_ms, last
FROM runs
WHERE windows = $windows AND before = 0 AND start_ms >= $from_ms AND start_ms < $until_ms
    AND (device_id, site, start_ms) IN (
        SELECT (device_id, site, epoch_ms(window_start)) FROM closed
        WHERE metric = $metric AND NOT late AND epoch_ms(window_end) - epoch_ms(window_start) = $window_ms)
ORDER BY device_id, site, start_ms
"""


def alarms_in(home: Home, closed: "pa.Table", spans: Sequence[VitalsSpan]) -> "pa.Table":
    """Return the alarms that the windows closed by a batch raise.

    Args:
        home: home with the windows that were closed before; it may have those of the batch, too.
        closed: windows closed by the batch, with the columns of the table.
        spans: vitals of the policies, in order.
    """
    import pyarrow as pa

    schema = arrow_schema(VITAL_ALARMS)
    ends_ms = [later.from_ms for _, later in pairwise(spans)] + [END_OF_TIME_MS]
    bounds = [
        (metric, vital, span.from_ms, until_ms)
        for span, until_ms in zip(spans, ends_ms, strict=False)
        for metric, vital in span.vitals.items()
        if vital.has_bound
    ]
    if not bounds or not closed.num_rows:
        return schema.empty_table()
    with connect() as connection:
        connection.register("closed", closed.cast(arrow_schema(VITALS)))
        least_ms = _least_start_ms(connection)
        parts = [
            _alarms(connection, home, bound, least_ms)
            for bound in bounds
            if bound[3] > least_ms and _is_broken(connection, bound)
        ]
    return pa.concat_tables([schema.empty_table(), *(part.cast(schema) for part in parts)])


_Bound = tuple[str, Vital, int, int]  # metric, vital, and the span in which it is in force


def _least_start_ms(connection: "DuckDBPyConnection") -> int:
    found = connection.execute("SELECT min(epoch_ms(window_start)) FROM closed").fetchone()
    assert found is not None
    return found[0]


def _is_broken(connection: "DuckDBPyConnection", bound: _Bound) -> bool:
    """Return whether a window of the batch breaks a bound; otherwise, no earlier window is read."""
    metric, vital, _, _ = bound
    sql = "SELECT count(*) FROM closed WHERE metric = $metric AND NOT late AND (max < $below OR min > $above)"
    found = connection.execute(sql, {"metric": metric, **_limits(vital)}).fetchone()
    return found is not None and found[0] > 0


def _limits(vital: Vital) -> dict[str, float | None]:
    """Return the bound as parameters of SQL; DuckDB refuses an ``int`` of more than 128 bits."""
    return {name: None if value is None else float(value) for name, value in (("below", vital.below), ("above", vital.above))}


def _alarms(connection: "DuckDBPyConnection", home: Home, bound: _Bound, least_ms: int) -> "pa.Table":
    metric, vital, from_ms, until_ms = bound
    covered_ms = (vital.bound_windows - 1) * vital.slide_ms  # from the start of the first window to that of the last
    needed_ms = least_ms - covered_ms - vital.slide_ms
    files = files_of(home, VITALS, "window_end")
    open_files(
        connection,
        VITALS.name,
        VITALS,
        [one.path for one in files if one.greatest is None or one.greatest.timestamp() * 1000 >= needed_ms],
    )
    values = {
        "metric": metric,
        "window_ms": vital.window_ms,
        "slide_ms": vital.slide_ms,
        **_limits(vital),
        "for_ms": vital.for_ms,
        "covered_ms": covered_ms,
        "windows": vital.bound_windows,
        "from_ms": from_ms,
        "until_ms": until_ms,
    }
    return connection.sql(_ALARMS, params=values).to_arrow_table()
