"""Transitions and deadlines of a device, compiled; the definition is `core.fold`.

A transition is a row of the output. A deadline is derived each time, see `jit.deadlines`.
"""

from typing import Final

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.columnar.jit.context import (
    DEATH_GRACE,
    FOLLOWING,
    IS_HELD,
    LAST_ERRORS,
    MODES,
    NEVER,
    NONE,
    TRIGGERS,
    PackedContext,
    covered,
    policy_at,
)
from fleetpulse.columnar.jit.deadlines import limit_of, next_due
from fleetpulse.columnar.jit.layout import (
    ABSENT,
    CLASS,
    CODES,
    DEGRADED_UNTIL,
    EXCUSED,
    FLAGGED_UNTIL,
    GATEWAY,
    HELD_UNTIL,
    LAST_SEEN,
    LIFE,
    MEMORY,
    MODE,
    MODE_SINCE,
    N_CODES,
    NUMBER,
    OUTAGE,
    OUTAGE_COVERED,
    QUIET_COVERED,
    REVIEW,
    RUNTIME,
    SITE,
    T_AT,
    T_CLASS,
    T_CODES,
    T_DEVICE,
    T_FROM,
    T_GATEWAY,
    T_LAST_SEEN,
    T_LIFE,
    T_NUMBER,
    T_POLICY,
    T_ROW,
    T_RUNTIME,
    T_SHOWN,
    T_SITE,
    T_TO,
    T_TRIGGER,
    T_WHAT,
    TRANSITION,
    VELOCITY_COUNT,
    VELOCITY_SINCE,
    Matrix,
)
from fleetpulse.core.lifecycle import Mode, Trigger

_DECOMMISSIONED: Final = MODES.index(Mode.DECOMMISSIONED)
_DEGRADED: Final = MODES.index(Mode.DEGRADED)
_FLAGGED: Final = MODES.index(Mode.FLAGGED)
_FORGOTTEN: Final = MODES.index(Mode.FORGOTTEN)
_OFFLINE: Final = MODES.index(Mode.OFFLINE)
_ONLINE: Final = MODES.index(Mode.ONLINE)
_PROVISIONED: Final = MODES.index(Mode.PROVISIONED)
_UNREACHABLE: Final = MODES.index(Mode.UNREACHABLE)
_HOLD_OVER: Final = TRIGGERS.index(Trigger.HOLD_OVER)
_RECOVERED: Final = TRIGGERS.index(Trigger.RECOVERED)
_SESSION_OVER: Final = TRIGGERS.index(Trigger.SESSION_OVER)
_SILENCE: Final = TRIGGERS.index(Trigger.SILENCE)
_UNTIL: Final = TRIGGERS.index(Trigger.UNTIL)


@jit_no_refcount
def list_row(out: Matrix, n_out: int, kind: int, i: int, j: int) -> int:
    """Append a row about a message to the output; return the number of output rows."""
    out[n_out, T_WHAT], out[n_out, T_DEVICE], out[n_out, T_ROW] = kind, i, j
    return n_out + 1


@jit_no_refcount
def is_cut_off(devices: Matrix, context: PackedContext, i: int, at_ms: int) -> bool:
    """Whether a device's gateway is dead, and the grace period over."""
    if devices[i, OUTAGE_COVERED] == NONE:
        return False
    grace_ms = limit_of(devices, context, i, policy_at(context, at_ms), DEATH_GRACE)
    return covered(context, at_ms) - devices[i, OUTAGE_COVERED] >= grace_ms


@jit_no_refcount
def end_outage(devices: Matrix, context: PackedContext, i: int, at_ms: int) -> None:
    """End the outage of a device's gateway, if any: silence counts again."""
    if devices[i, OUTAGE_COVERED] != NONE:
        devices[i, EXCUSED] += covered(context, at_ms) - devices[i, OUTAGE_COVERED]
        devices[i, OUTAGE] = devices[i, OUTAGE_COVERED] = NONE


@jit_no_refcount
def transition(
    devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, i: int, trigger: int, at_ms: int, row: int
) -> int:
    """Apply a trigger by the transition table and write the transition to ``out``.

    Returns:
        Number of output rows.
    """
    mode = devices[i, MODE]
    target = FOLLOWING[mode, trigger]
    if target < 0:
        return n_out
    if target == _ONLINE:
        if devices[i, LAST_SEEN] == NONE:
            target = _PROVISIONED
        elif IS_HELD[mode] and is_cut_off(devices, context, i, at_ms):
            target = _UNREACHABLE
        elif devices[i, FLAGGED_UNTIL] != NONE:
            target = _FLAGGED
        elif devices[i, DEGRADED_UNTIL] != NONE:
            target = _DEGRADED
    if target == mode:
        return n_out
    policy, slot = policy_at(context, at_ms), devices[i, MEMORY]
    devices[i, NUMBER] += 1
    out[n_out, T_WHAT], out[n_out, T_DEVICE], out[n_out, T_AT], out[n_out, T_ROW] = TRANSITION, i, at_ms, row
    out[n_out, T_FROM], out[n_out, T_TO], out[n_out, T_TRIGGER], out[n_out, T_NUMBER] = mode, target, trigger, devices[i, NUMBER]
    out[n_out, T_LAST_SEEN], out[n_out, T_RUNTIME] = devices[i, LAST_SEEN], devices[i, RUNTIME]
    out[n_out, T_LIFE], out[n_out, T_CLASS] = devices[i, LIFE], devices[i, CLASS]
    out[n_out, T_SITE], out[n_out, T_GATEWAY], out[n_out, T_POLICY] = devices[i, SITE], devices[i, GATEWAY], policy
    out[n_out, T_SHOWN] = 0
    if slot >= 0:
        known = memory[slot, N_CODES]
        shown = min(known, context.rules[policy, devices[i, CLASS], LAST_ERRORS])
        out[n_out, T_SHOWN] = shown
        for one in range(shown):
            out[n_out, T_CODES + one] = memory[slot, CODES + known - shown + one]
    devices[i, MODE], devices[i, MODE_SINCE] = target, at_ms
    if not IS_HELD[target]:
        devices[i, HELD_UNTIL] = NONE
    if target in (_OFFLINE, _DECOMMISSIONED):
        end_outage(devices, context, i, at_ms)
    return n_out + 1


@jit_no_refcount
def expire(
    devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, i: int, before_ms: int
) -> tuple[int, int]:
    """Fire the deadlines of a device before ``before_ms``, earliest first.

    Returns:
        Number of output rows, and the next deadline (`NEVER` without one).
    """
    while devices[i, MODE] != ABSENT:
        due_ms, trigger = next_due(devices, memory, context, i)
        if due_ms >= before_ms:
            return n_out, due_ms
        if trigger == _RECOVERED:
            devices[i, DEGRADED_UNTIL] = NONE
        elif trigger in (_HOLD_OVER, _SESSION_OVER):
            _end_flag(devices, memory, i, trigger)
        elif trigger == _UNTIL:
            devices[i, HELD_UNTIL] = NONE
        elif trigger == _SILENCE and devices[i, OUTAGE] != NONE:
            devices[i, OUTAGE] = devices[i, OUTAGE_COVERED] = NONE
            devices[i, EXCUSED] = covered(context, due_ms) - devices[i, QUIET_COVERED]
        n_out = transition(devices, memory, context, out, n_out, i, trigger, due_ms, -1)
        if devices[i, MODE] == _FORGOTTEN:
            devices[i, MODE] = ABSENT
    return n_out, NEVER


@jit_no_refcount
def _end_flag(devices: Matrix, memory: Matrix, i: int, trigger: int) -> None:
    """End the flag of a device, and its session if that is over."""
    slot = devices[i, MEMORY]
    devices[i, FLAGGED_UNTIL] = NONE
    if slot >= 0:
        memory[slot, REVIEW] = NONE
        if trigger == _SESSION_OVER:
            memory[slot, VELOCITY_COUNT], memory[slot, VELOCITY_SINCE] = 0, NONE
