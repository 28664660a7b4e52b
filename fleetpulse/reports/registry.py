"""Registry entries of a device, from the table ``devices``."""

from fleetpulse.core.registry.registry import Entry
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query


def entries(home: Home, device_id: str) -> list[Entry]:
    """Return the registry entries of a device, in the order in which they take effect."""
    sql = """SELECT epoch_ms(effective_from) AS from_ms, op, site, device_class, gateway, timeout_ms, death_grace_ms
        FROM devices
        WHERE device_id = ? AND op IN ('add', 'decommission') ORDER BY effective_from, received_at"""
    return [Entry(**one) for one in query(home, sql, [device_id], tables=["devices"])]
