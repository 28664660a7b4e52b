"""Windows of a device's metrics and its alarms, from the tables of the stream vitals."""

from typing import Any

from fleetpulse.core.streams.tables import VITAL_ALARMS, VITALS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query

FIGURES = ("count", "min", "max", "mean", "last")
_INSTANTS = ("window_start", "window_end", "closed_at", "last_at")


def windows(
    home: Home, device_id: str, metric: str | None = None, since_ms: int | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the closed windows of a device, newest first.

    Args:
        home: home to read.
        device_id: id of the device.
        metric: metric to select; None for all.
        since_ms: instant after which the windows end, epoch milliseconds; None for all.
        limit: greatest number of rows; None for all.

    Returns:
        Rows of the table; instants are epoch milliseconds, with names in ``_ms``.
    """
    instants = ", ".join(f"epoch_ms({name}) AS {name}_ms" for name in _INSTANTS)
    sql = f"""
    SELECT device_id, site, metric, {instants}, late, {", ".join(FIGURES)} FROM vitals
    WHERE device_id = ? AND (?::VARCHAR IS NULL OR metric = ?) AND (?::BIGINT IS NULL OR epoch_ms(window_end) > ?)
    ORDER BY window_end DESC, metric, window_start DESC, site, late, closed_at DESC LIMIT ?
    """
    parameters = [device_id, metric, metric, since_ms, since_ms, limit]
    return query(home, sql, parameters, tables=[VITALS.name], only={VITALS.name: ("device_id", [device_id])})


def alarms(home: Home, device_id: str, metric: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the alarms of a device, newest first.

    Args:
        home: home to read.
        device_id: id of the device.
        metric: metric to select; None for all.
        limit: greatest number of rows; None for all.

    Returns:
        Rows of the table; instants are epoch milliseconds, with names in ``_ms``.
    """
    sql = """
    SELECT device_id, site, metric, epoch_ms(broken_from) AS broken_from_ms, epoch_ms(raised_at) AS raised_at_ms, below, above,
        for_ms, last
    FROM vital_alarms WHERE device_id = ? AND (?::VARCHAR IS NULL OR metric = ?)
    ORDER BY raised_at DESC, metric, site LIMIT ?
    """
    only = {VITAL_ALARMS.name: ("device_id", [device_id])}
    return query(home, sql, [device_id, metric, metric, limit], tables=[VITAL_ALARMS.name], only=only)
