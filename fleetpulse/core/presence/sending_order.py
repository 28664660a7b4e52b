"""Order in which a device sent two of its signals, whatever the order of their delivery.

Rule: the counters of one boot and the event times decide, since a broker may deliver an older signal again,
after newer ones. Boots are names without an order, so signals of two boots are not compared.
"""

from typing import Final, NamedTuple

from fleetpulse.core.device import Device
from fleetpulse.core.rows import Row, Trust

WRAP_SLACK: Final = 16  # a counter wraps from at most this far below its end to at most this far above zero


class Sent(NamedTuple):
    """Place of a signal in the order of sending.

    Attributes:
        boot: boot that the signal, or an earlier one, named.
        site: site from which the device sent it; at another site a signal may be of another device.
        seq: counter of the signal.
        event_time_ms: event time, epoch milliseconds; None if it is invalid.
    """

    boot: str | None
    site: str
    seq: int | None
    event_time_ms: int | None


def precedes(row: Row, newest: Sent) -> bool:
    """Whether a signal was sent before ``newest`` in the same boot, so that it names no newer session.

    Then its counter is lower, and its event time is not later. If either event time is invalid, the
    counter alone decides.
    """
    counters = _counters_of_one_boot(row, newest)
    if counters is None or not fell_back(*counters):
        return False
    sent_ms = None if row.trust is Trust.INVALID else row.event_time_ms
    return newest.event_time_ms is None or sent_ms is None or sent_ms <= newest.event_time_ms


def was_sent_earlier(device: Device, row: Row) -> bool:
    """Whether a signal was sent before the newest one of its device, see `precedes`."""
    return precedes(row, _newest_of(device))


def was_sent_later(device: Device, row: Row) -> bool:
    """Whether a signal was sent after the newest one of its boot, in whichever order they were received."""
    counters = _counters_of_one_boot(row, _newest_of(device))
    return counters is not None and fell_back(counters[1], counters[0])


def _counters_of_one_boot(row: Row, newest: Sent) -> tuple[int, int] | None:
    """Return the counters of the newest signal and of another one; None if they cannot be compared."""
    is_one_boot = row.boot is not None and row.boot == newest.boot and row.site == newest.site
    return None if not is_one_boot or newest.seq is None or row.seq is None else (newest.seq, row.seq)


def _newest_of(device: Device) -> Sent:
    return Sent(device.boot, device.current_site, device.seq, _event_time_of_newest(device))


def _event_time_of_newest(device: Device) -> int | None:
    """Return the event time of the newest signal, epoch milliseconds; None if it is invalid."""
    if device.last_seen_ms is None or device.clock is Trust.ON_TIME:
        return device.last_seen_ms
    return None if device.clock_offset_ms is None else device.last_seen_ms + device.clock_offset_ms


def fell_back(before: int, after: int) -> bool:
    """Whether a counter fell back by a restart, and not by a wrap at 8, 16 or 32 bits."""
    wraps = any(2**bits - WRAP_SLACK <= before < 2**bits and after < WRAP_SLACK for bits in (8, 16, 32))
    return after < before and not wraps
