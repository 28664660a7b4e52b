"""Devices that a condition selects, read like the facts in memory of the server."""

from collections.abc import Sequence
from typing import Any

from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports.present.mirror import PresentMirror


def selected(home: Home, where: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return ``device_id``, ``device_class`` and ``mode`` of the devices that match, by id.

    Args:
        home: home to read.
        where: SQL condition on the columns `mirror.LISTED`.
        values: its parameters.
    """
    mirror = PresentMirror(home)
    mirror.refresh(wall_clock_ms())
    with mirror.cursor() as cursor:
        return fetch(cursor, f"SELECT device_id, device_class, mode FROM live.devices WHERE {where} ORDER BY device_id", values)
