"""The device lifecycle: one table.

Rule 1: which mode follows which is decided in ``TRANSITIONS`` and nowhere else; an absent pair has no effect.
Rule 2: degraded and flagged are facts beside presence. A target of ``ONLINE`` is worn as the facts give it:
never heard is provisioned, flagged comes before degraded, and only a device without either is plainly online. A device
whose gateway is dead when its maintenance or update ends is unreachable.
Rule 3: ``AMENDED`` alone is not in the table: it leads to where the device is by its amended history.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Mode(StrEnum):
    """What a device is, as an operator sees it. Stored words are spelled out: renaming must not rewrite history."""

    PROVISIONED = "provisioned"  # registered or about to be heard: no signal judged yet
    ONLINE = "online"  # heard from in time
    DEGRADED = "degraded"  # heard from in time, with too many errors
    OFFLINE = "offline"  # silent past its deadline
    UPDATING = "updating"  # silence is expected until an instant: new firmware
    MAINTENANCE = "maintenance"  # silence is expected until an instant: people at work
    FLAGGED = "flagged"  # heard from in time, and its errors look like an attack
    DECOMMISSIONED = "decommissioned"  # taken out of service: counted, not judged
    FORGOTTEN = "forgotten"  # its state is removed
    UNREACHABLE = "unreachable"  # its gateway is dead, so its own state is unknown


class Trigger(StrEnum):
    """What moves a device from one mode to the next."""

    SIGNAL = "signal"  # heartbeat, telemetry, error or birth
    SILENCE = "silence"  # no signal for the timeout
    DEATH = "death"  # the will was delivered and its grace is over
    GATEWAY_DEATH = "gateway_death"  # the will of its gateway was, and the grace is over
    GATEWAY_RETURN = "gateway_return"  # its gateway was heard again
    ERRORS = "errors"  # the k-th error within the window
    RECOVERED = "recovered"  # the window has passed the errors
    SEQUENCE = "sequence"  # the last of an ordered sequence of error codes
    RELEASED = "released"  # an operator released it
    HOLD_OVER = "hold_over"  # flagged for so long that it is let go
    MAINTAIN = "maintain"  # an operator began maintenance
    UPDATE = "update"  # an operator began an update
    UNTIL = "until"  # the announced end of maintenance or update
    UPDATED = "updated"  # it is back from an update: it has restarted
    REGISTERED = "registered"  # the registry lists it (again), or behind another gateway
    DECOMMISSION = "decommission"  # the registry took it out
    FORGET = "forget"  # silent, or decommissioned, for forget_after
    AMENDED = "amended"  # late events changed what was judged


_M, _T = Mode, Trigger

TRANSITIONS: Final[Mapping[tuple[Mode, Trigger], Mode]] = MappingProxyType(
    {
        (_M.PROVISIONED, _T.SIGNAL): _M.ONLINE,
        (_M.PROVISIONED, _T.SILENCE): _M.OFFLINE,
        (_M.PROVISIONED, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.PROVISIONED, _T.UPDATE): _M.UPDATING,
        (_M.PROVISIONED, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.ONLINE, _T.SILENCE): _M.OFFLINE,
        (_M.ONLINE, _T.DEATH): _M.OFFLINE,
        (_M.ONLINE, _T.GATEWAY_DEATH): _M.UNREACHABLE,
        (_M.ONLINE, _T.ERRORS): _M.DEGRADED,
        (_M.ONLINE, _T.SEQUENCE): _M.FLAGGED,
        (_M.ONLINE, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.ONLINE, _T.UPDATE): _M.UPDATING,
        (_M.ONLINE, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.DEGRADED, _T.SILENCE): _M.OFFLINE,
        (_M.DEGRADED, _T.DEATH): _M.OFFLINE,
        (_M.DEGRADED, _T.GATEWAY_DEATH): _M.UNREACHABLE,
        (_M.DEGRADED, _T.RECOVERED): _M.ONLINE,
        (_M.DEGRADED, _T.SEQUENCE): _M.FLAGGED,
        (_M.DEGRADED, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.DEGRADED, _T.UPDATE): _M.UPDATING,
        (_M.DEGRADED, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.FLAGGED, _T.SILENCE): _M.OFFLINE,
        (_M.FLAGGED, _T.DEATH): _M.OFFLINE,
        (_M.FLAGGED, _T.GATEWAY_DEATH): _M.UNREACHABLE,
        (_M.FLAGGED, _T.RELEASED): _M.ONLINE,
        (_M.FLAGGED, _T.HOLD_OVER): _M.ONLINE,
        (_M.FLAGGED, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.FLAGGED, _T.UPDATE): _M.UPDATING,
        (_M.FLAGGED, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.OFFLINE, _T.SIGNAL): _M.ONLINE,
        (_M.OFFLINE, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.OFFLINE, _T.UPDATE): _M.UPDATING,
        (_M.OFFLINE, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.OFFLINE, _T.FORGET): _M.FORGOTTEN,
        (_M.UPDATING, _T.UNTIL): _M.ONLINE,
        (_M.UPDATING, _T.UPDATED): _M.ONLINE,
        (_M.UPDATING, _T.RELEASED): _M.ONLINE,
        (_M.UPDATING, _T.SILENCE): _M.OFFLINE,
        (_M.UPDATING, _T.DEATH): _M.OFFLINE,
        (_M.UPDATING, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.UPDATING, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.MAINTENANCE, _T.UNTIL): _M.ONLINE,
        (_M.MAINTENANCE, _T.SILENCE): _M.OFFLINE,
        (_M.MAINTENANCE, _T.DEATH): _M.OFFLINE,
        (_M.MAINTENANCE, _T.UPDATE): _M.UPDATING,
        (_M.MAINTENANCE, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.UNREACHABLE, _T.SIGNAL): _M.ONLINE,
        (_M.UNREACHABLE, _T.SILENCE): _M.OFFLINE,
        (_M.UNREACHABLE, _T.DEATH): _M.OFFLINE,
        (_M.UNREACHABLE, _T.GATEWAY_RETURN): _M.ONLINE,
        (_M.UNREACHABLE, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.UNREACHABLE, _T.UPDATE): _M.UPDATING,
        (_M.UNREACHABLE, _T.REGISTERED): _M.ONLINE,
        (_M.UNREACHABLE, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.DECOMMISSIONED, _T.REGISTERED): _M.PROVISIONED,
        (_M.DECOMMISSIONED, _T.FORGET): _M.FORGOTTEN,
    }
)

PRESENT: Final = frozenset({Mode.ONLINE, Mode.DEGRADED, Mode.FLAGGED})
HELD: Final = frozenset({Mode.UPDATING, Mode.MAINTENANCE})


def next_mode(mode: Mode, trigger: Trigger, *, heard: bool, degraded: bool, flagged: bool, cut_off: bool = False) -> Mode:
    """Return the mode that follows, as the facts give it; ``mode`` itself where the trigger has no effect.

    Args:
        mode: the mode before.
        trigger: what acts.
        heard: whether a signal was ever judged.
        degraded: whether too many errors count.
        flagged: whether its errors look like an attack.
        cut_off: whether its gateway is dead, and the grace is over.
    """
    target = TRANSITIONS.get((mode, trigger))
    if target is None:
        return mode
    if target is not Mode.ONLINE:
        return target
    if not heard:
        return Mode.PROVISIONED
    if cut_off:
        return Mode.UNREACHABLE
    if flagged:
        return Mode.FLAGGED
    return Mode.DEGRADED if degraded else Mode.ONLINE
