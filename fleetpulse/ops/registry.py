"""What the registry says of a device, as its table has it."""

from fleetpulse.core.registration import Entry
from fleetpulse.io.delta import query
from fleetpulse.io.home import Home


def entries(home: Home, device_id: str) -> list[Entry]:
    """Return what the registry says of a device, in the order in which it acts."""
    sql = """SELECT epoch_ms(effective_from) AS from_ms, op, site, device_class, gateway, timeout_ms, death_grace_ms
        FROM devices
        WHERE device_id = ? AND op IN ('add', 'decommission') ORDER BY effective_from, received_at"""
    return [Entry(**one) for one in query(home, sql, [device_id], tables=["devices"])]
