"""Order in which a device sent two of its signals, compiled; the definition is `core.presence.sending_order`."""

from typing import Final

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.columnar.jit.context import NONE
from fleetpulse.columnar.jit.layout import (
    BOOT,
    CLOCK,
    CLOCK_OFFSET,
    LAST_SEEN,
    R_AT,
    R_BOOT,
    R_OFFSET,
    R_SEQ,
    R_SITE,
    R_TRUST,
    SEQ,
    SITE,
    SPEAKS_FROM,
    TRUSTS,
    Matrix,
)
from fleetpulse.core.presence.sending_order import WRAP_SLACK
from fleetpulse.core.rows import Trust

_ON_TIME: Final = TRUSTS.index(Trust.ON_TIME)
_INVALID: Final = TRUSTS.index(Trust.INVALID)


@jit_no_refcount
def fell_back(before: int, after: int) -> bool:
    """Whether a counter fell back because of a restart, as `core.presence.sending_order.fell_back`."""
    if after >= before:
        return False
    wraps = False
    for bits in (8, 16, 32):
        wraps |= (1 << bits) - WRAP_SLACK <= before < (1 << bits) and after < WRAP_SLACK
    return not wraps


@jit_no_refcount
def _has_counters_of_one_boot(devices: Matrix, i: int, rows: Matrix, j: int) -> bool:
    """Whether device and signal have counters of one boot, as `core.presence.sending_order._counters_of_one_boot`."""
    if rows[j, R_SEQ] < 0 or devices[i, SEQ] < 0 or rows[j, R_BOOT] < 0 or rows[j, R_BOOT] != devices[i, BOOT]:
        return False
    return rows[j, R_SITE] == (devices[i, SITE] if devices[i, SPEAKS_FROM] < 0 else devices[i, SPEAKS_FROM])


@jit_no_refcount
def was_sent_earlier(devices: Matrix, i: int, rows: Matrix, j: int) -> bool:
    """Whether a signal was sent before the newest one of its boot, as `core.presence.sending_order.was_sent_earlier`."""
    if not _has_counters_of_one_boot(devices, i, rows, j) or not fell_back(devices[i, SEQ], rows[j, R_SEQ]):
        return False
    if devices[i, LAST_SEEN] == NONE or rows[j, R_TRUST] == _INVALID:
        return True
    offset_ms = 0 if devices[i, CLOCK] == _ON_TIME else devices[i, CLOCK_OFFSET]
    return offset_ms == NONE or rows[j, R_AT] + rows[j, R_OFFSET] <= devices[i, LAST_SEEN] + offset_ms


@jit_no_refcount
def was_sent_later(devices: Matrix, i: int, rows: Matrix, j: int) -> bool:
    """Whether a signal was sent after the newest one received, as `core.presence.sending_order.was_sent_later`."""
    return _has_counters_of_one_boot(devices, i, rows, j) and fell_back(rows[j, R_SEQ], devices[i, SEQ])
