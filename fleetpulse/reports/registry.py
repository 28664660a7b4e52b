"""What the registry says of a device, as its table has it."""

from fleetpulse.core.registry.registry import Entry
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query


def entries(home: Home, device_id: str) -> list[Entry]:
    """Return what the registry says of a device, in the order in which it acts."""
    sql = """SELECT epoch_ms(effective_from) AS from_ms, op, site, device_class, gateway, timeout_ms, death_grace_ms
        FROM devices
        WHERE device_id = ? AND op IN ('add', 'decommission') ORDER BY effective_from, received_at"""
    return [Entry(**one) for one in query(home, sql, [device_id], tables=["devices"])]
