"""Numbers of devices by mode over time, by hour.

Rule: a report computes no verdict. `hourly` defines the differences and keeps them; newer rows are added here.
"""

from typing import Any, Final

from fleetpulse.core.times import HOUR_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports.present.hourly import total_sql
from fleetpulse.reports.present.kept import open_present

_FILTERS: Final = ("site", "device_class")


def modes_over_time(
    home: Home,
    frontier_ms: int | None,
    from_ms: int,
    to_ms: int,
    site: str | None = None,
    device_class: str | None = None,
) -> list[dict[str, Any]]:
    """Return the number of devices by mode at the end of each hour, oldest first.

    The hours begin before ``to_ms``, and end after ``from_ms``. The newest hour is that of the frontier; its
    numbers are those at the frontier until it ends. Devices that were not judged yet and not registered have no
    mode, and are not counted.

    Args:
        home: home to read.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
        from_ms: start of the range, epoch milliseconds.
        to_ms: end of the range, epoch milliseconds.
        site: site to filter by; None: all.
        device_class: class to filter by; None: all.

    Returns:
        Rows with ``hour_ms``, the start of the hour, epoch milliseconds, and ``devices``, the number by mode.

    Raises:
        DamagedError: a file of a table is damaged or missing.
    """
    if frontier_ms is None:
        return []
    first_ms = from_ms // HOUR_MS * HOUR_MS
    end_ms = min(to_ms, frontier_ms + 1)
    wanted = {name: value for name, value in zip(_FILTERS, (site, device_class), strict=True) if value is not None}
    where = " AND ".join(("hour_ms < ?", *(f"{name} = ?" for name in wanted)))
    with open_present(home, frontier_ms) as present:
        sql = f"""SELECT greatest(hour_ms, {first_ms}) AS hour_ms, mode, sum(devices_delta)::BIGINT AS n
                  FROM ({total_sql(home, present)}) WHERE {where} GROUP BY ALL"""
        found = fetch(present.connection, sql, [end_ms, *wanted.values()])
    differences: dict[int, list[dict[str, Any]]] = {}
    for row in found:
        differences.setdefault(row["hour_ms"], []).append(row)
    counts: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for hour_ms in range(first_ms, end_ms, HOUR_MS):
        for row in differences.get(hour_ms, ()):
            counts[row["mode"]] = counts.get(row["mode"], 0) + row["n"]
        rows.append({"hour_ms": hour_ms, "devices": {mode: n for mode, n in sorted(counts.items()) if n}})
    return rows
