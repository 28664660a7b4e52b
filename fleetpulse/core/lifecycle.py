"""Device lifecycle: modes, triggers, and the transition table between them.

Theory of operation
===================

The lifecycle is one table and one pure function. ``TRANSITIONS`` maps a pair of mode and trigger to
the next mode. `next_mode` looks the pair up and refines the target by the facts about the device.
This module does not depend on rows, clocks, policies or state: `core.fold` fires the triggers.

Inputs. The fold reduces each row and each deadline of a device to triggers:

- A signal (heartbeat, telemetry, error, birth, ack) fires ``SIGNAL``. It can also fire ``UPDATED``
  (restart or new firmware), ``ERRORS`` and ``SEQUENCE`` (enough errors, or the error codes in
  order), and ``VELOCITY`` (enough events within one session).
- A control row fires ``MAINTAIN``, ``UPDATE`` or ``RELEASED``. One that confirms a flag fires nothing.
- A registry row fires ``REGISTERED`` or ``DECOMMISSION``.
- The return of a gateway fires ``GATEWAY_RETURN`` for the devices behind it.
- A deadline that passes fires ``SILENCE``, ``DEATH``, ``GATEWAY_DEATH``, ``UNTIL``, ``RECOVERED``,
  ``HOLD_OVER``, ``SESSION_OVER`` or ``FORGET``.

Neither a will nor the death of a gateway is a trigger. Either one starts a grace period
(`death_grace`), and the deadline at its end is the trigger. So a reconnect within the grace period
changes no mode.

Presence and facts. The mode that an operator sees mixes two things. *Presence* is the state of the
connection: never heard, heard in time, silent, unknown (behind a dead gateway), held (maintenance,
update), or out of service. *Facts* are properties that hold beside presence: the device was ever
heard, too many errors count, it is flagged (its errors match the flagged sequence, or it is held for
review). Facts change in every mode in
which signals are judged, even if the table has no entry for the trigger. For example, errors during
maintenance do not change the mode, but the device is degraded when maintenance ends.

The targets in the table therefore name presence alone, with two exceptions: ``DEGRADED`` and
``FLAGGED`` are targets of the triggers that establish these facts. Every other return to service
has the target ``ONLINE``, which means "in service, with the mode that the facts give" (*live* in
docs/reference/lifecycle.md).

Steps of `next_mode`, and the reason for their order:

1. Look up the pair. If it is absent, the trigger has no effect: the mode stays. An absent pair is
   no error, since any row can be received in any mode.
2. If the target is not ``ONLINE``, return it.
3. If no signal was ever judged, return ``PROVISIONED``. This is first: such a device has no errors
   and was never connected.
4. If the gateway is dead and its grace period is over, return ``UNREACHABLE``. This precedes the
   facts about errors, since the present state of the device is unknown. The fold sets ``cut_off``
   only when maintenance or an update ends; in other modes ``GATEWAY_DEATH`` fires instead.
5. If the device is flagged, return ``FLAGGED``: a suspected attack, or an open review, is more urgent than a
   count.
6. If the device is degraded, return ``DEGRADED``, else ``ONLINE``.

A life starts in ``PROVISIONED`` and ends in ``FORGOTTEN``, which no trigger leaves. The fold then
removes the state, and the next signal or registration starts a new life.

Invariants:

Rule 1: only ``TRANSITIONS`` decides which mode follows which. An absent pair has no effect.
The tables of the compiled fold (`columnar.jit.context`) and docs/reference/lifecycle.md are generated
from it.
Rule 2: degraded and flagged are facts beside presence; `next_mode` alone maps facts to a mode.
Rule 3: only ``AMENDED`` is not in the table: it leads to the mode that the amended history of the
device has (ADR 13).
Rule 4: silence takes precedence over facts: ``SILENCE`` leads to ``OFFLINE`` from every mode but
``OFFLINE``, ``DECOMMISSIONED`` and ``FORGOTTEN``. In maintenance and during an update, `core.fold`
lets no deadline for silence fire before the announced end.
Rule 5: the fold emits one transition if, and only if, the mode changes.
Rule 6: values of `Mode` and `Trigger` are stored in tables and in state, so they never change.

docs/concepts/semantics.md specifies when each trigger fires. docs/adr has the reasons: ADR 1
(judging behind the frontier), ADR 13 (amendments), ADR 32 (presence time and wills), ADR 33
(gateways).
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Mode(StrEnum):
    """Mode of a device, as an operator sees it.

    The stored values are spelled out: renaming a member must not rewrite history.
    """

    PROVISIONED = "provisioned"  # no signal was judged yet
    ONLINE = "online"  # heard within its timeout
    DEGRADED = "degraded"  # heard within its timeout, with too many errors
    OFFLINE = "offline"  # not heard within its timeout, or dead (will) for its grace period
    UPDATING = "updating"  # silence is expected until an announced instant: firmware update
    MAINTENANCE = "maintenance"  # silence is expected until an announced instant: maintenance work
    FLAGGED = "flagged"  # heard within its timeout; its errors match the sequence of an attack, or it is held for review
    DECOMMISSIONED = "decommissioned"  # taken out of service: counted, not judged
    FORGOTTEN = "forgotten"  # its state is removed
    UNREACHABLE = "unreachable"  # its gateway is dead, so its own state is unknown


class Trigger(StrEnum):
    """Cause of a transition from one mode to another."""

    SIGNAL = "signal"  # heartbeat, telemetry, error, birth or ack
    SILENCE = "silence"  # no signal for the timeout, or its gateway is dead for the outage limit
    DEATH = "death"  # the grace period after its will is over
    GATEWAY_DEATH = "gateway_death"  # the grace period after its gateway's will is over
    GATEWAY_RETURN = "gateway_return"  # its gateway was heard again
    ERRORS = "errors"  # the k-th error within the window
    RECOVERED = "recovered"  # fewer errors than the limit are within the window
    SEQUENCE = "sequence"  # the last of an ordered sequence of error codes
    VELOCITY = "velocity"  # the k-th event within one session: it is held for review
    RELEASED = "released"  # an operator released it
    HOLD_OVER = "hold_over"  # flagged for the longest time that the policy allows
    SESSION_OVER = "session_over"  # held for review, and idle for so long that its session is over
    MAINTAIN = "maintain"  # an operator started maintenance
    UPDATE = "update"  # an operator started an update
    UNTIL = "until"  # the announced end of maintenance or update
    UPDATED = "updated"  # a signal shows a restart or new firmware: the update is done
    REGISTERED = "registered"  # a registry row adds it again, or assigns it to another gateway
    DECOMMISSION = "decommission"  # a registry row takes it out of service
    FORGET = "forget"  # silent, or decommissioned, for forget_after
    AMENDED = "amended"  # a correction row applies the amended history


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
        (_M.ONLINE, _T.VELOCITY): _M.FLAGGED,
        (_M.ONLINE, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.ONLINE, _T.UPDATE): _M.UPDATING,
        (_M.ONLINE, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.DEGRADED, _T.SILENCE): _M.OFFLINE,
        (_M.DEGRADED, _T.DEATH): _M.OFFLINE,
        (_M.DEGRADED, _T.GATEWAY_DEATH): _M.UNREACHABLE,
        (_M.DEGRADED, _T.RECOVERED): _M.ONLINE,
        (_M.DEGRADED, _T.SEQUENCE): _M.FLAGGED,
        (_M.DEGRADED, _T.VELOCITY): _M.FLAGGED,
        (_M.DEGRADED, _T.MAINTAIN): _M.MAINTENANCE,
        (_M.DEGRADED, _T.UPDATE): _M.UPDATING,
        (_M.DEGRADED, _T.DECOMMISSION): _M.DECOMMISSIONED,
        (_M.FLAGGED, _T.SILENCE): _M.OFFLINE,
        (_M.FLAGGED, _T.DEATH): _M.OFFLINE,
        (_M.FLAGGED, _T.GATEWAY_DEATH): _M.UNREACHABLE,
        (_M.FLAGGED, _T.RELEASED): _M.ONLINE,
        (_M.FLAGGED, _T.HOLD_OVER): _M.ONLINE,
        (_M.FLAGGED, _T.SESSION_OVER): _M.ONLINE,
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
OUT_OF_SERVICE: Final = frozenset({Mode.DECOMMISSIONED, Mode.FORGOTTEN})
TROUBLE: Final = (Mode.OFFLINE, Mode.UNREACHABLE, Mode.FLAGGED, Mode.DEGRADED)  # modes that need attention
HELD: Final = frozenset({Mode.UPDATING, Mode.MAINTENANCE})


def next_mode(mode: Mode, trigger: Trigger, *, heard: bool, degraded: bool, flagged: bool, cut_off: bool = False) -> Mode:
    """Return the next mode of a device; ``mode`` itself if the trigger has no effect.

    Args:
        mode: current mode.
        trigger: cause of the transition.
        heard: whether a signal of the device was ever judged.
        degraded: whether too many errors are within the window.
        flagged: whether the device is flagged.
        cut_off: whether the gateway of the device is dead and the grace period over.
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
