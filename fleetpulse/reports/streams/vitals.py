"""Windows of a device's metrics, from the table of the stream vitals."""

from typing import Any

from fleetpulse.core.tables import VITALS
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
