"""Deadlines of devices, compiled; the definition is `core.deadlines`.

Rule: of two deadlines at the same instant, the one that `next_due` checks first fires.
"""

from typing import Final

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.columnar.jit.context import (
    DEATH_GRACE,
    EFFECTIVE,
    FORGET_AFTER,
    IS_HELD,
    IS_PRESENT,
    MODES,
    NEVER,
    NONE,
    OUTAGE_LIMIT,
    SESSION_IDLE,
    TIMEOUT,
    TRIGGERS,
    PackedContext,
    earliest,
)
from fleetpulse.columnar.jit.layout import (
    CLASS,
    CLASS_SINCE,
    CONFIRMED,
    DEATH,
    DEATH_COVERED,
    DEGRADED_UNTIL,
    EXCUSED,
    FLAGGED_UNTIL,
    HELD_UNTIL,
    MEMORY,
    MODE,
    MODE_SINCE,
    OUTAGE,
    OUTAGE_COVERED,
    OWN_GRACE,
    OWN_TIMEOUT,
    QUIET_COVERED,
    QUIET_SINCE,
    REVIEW,
    Matrix,
)
from fleetpulse.core.lifecycle import Mode, Trigger

_PROVISIONED: Final = MODES.index(Mode.PROVISIONED)
_UNREACHABLE: Final = MODES.index(Mode.UNREACHABLE)
_OFFLINE: Final = MODES.index(Mode.OFFLINE)
_DECOMMISSIONED: Final = MODES.index(Mode.DECOMMISSIONED)
_SILENCE: Final = TRIGGERS.index(Trigger.SILENCE)
_WILL: Final = TRIGGERS.index(Trigger.DEATH)
_GATEWAY_DEATH: Final = TRIGGERS.index(Trigger.GATEWAY_DEATH)
_UNTIL: Final = TRIGGERS.index(Trigger.UNTIL)
_RECOVERED: Final = TRIGGERS.index(Trigger.RECOVERED)
_HOLD_OVER: Final = TRIGGERS.index(Trigger.HOLD_OVER)
_SESSION_OVER: Final = TRIGGERS.index(Trigger.SESSION_OVER)
_FORGET: Final = TRIGGERS.index(Trigger.FORGET)


@jit_no_refcount
def limit_of(devices: Matrix, context: PackedContext, i: int, policy: int, rule: int) -> int:
    """Return a limit of a device: its own if it has one, else that of a policy.

    See `Device.rules`.
    """
    own = NONE
    if rule == TIMEOUT:
        own = devices[i, OWN_TIMEOUT]
    elif rule == DEATH_GRACE:
        own = devices[i, OWN_GRACE]
    return context.rules[policy, devices[i, CLASS], rule] if own == NONE else own


@jit_no_refcount
def _reached(devices: Matrix, context: PackedContext, i: int, least_ms: int, since: int, rule: int, listening: bool) -> int:
    """Return the first instant from ``least_ms`` on at which a limit is reached.

    The policy and class in force at that instant give the limit.

    Args:
        devices: rows of the devices.
        context: coverage and policies.
        i: index of the device.
        least_ms: earliest possible result.
        since: start of the limit, as covered time or event time.
        rule: column of the limit in the rules.
        listening: whether the limit counts covered time.

    Returns:
        The instant, or `NEVER` if the limit is not reached.
    """
    count = len(context.rules)
    least_ms = max(least_ms, devices[i, CLASS_SINCE])
    for policy in range(count):
        end_ms = context.rules[policy + 1, 0, EFFECTIVE] if policy + 1 < count else NEVER
        if end_ms <= least_ms:
            continue
        reached = since + limit_of(devices, context, i, policy, rule)
        due_ms = earliest(context, reached) if listening else reached
        if due_ms != NONE:
            due_ms = max(due_ms, context.rules[policy, 0, EFFECTIVE], least_ms)
            if due_ms < end_ms:
                return due_ms
    return NEVER


@jit_no_refcount
def _end_of_flag(devices: Matrix, memory: Matrix, context: PackedContext, i: int) -> tuple[int, int]:
    """Return the instant at which the flag of a flagged device ends, and the trigger; `NEVER` if it is confirmed."""
    slot, until_ms, trigger = devices[i, MEMORY], devices[i, FLAGGED_UNTIL], _HOLD_OVER
    if slot >= 0 and memory[slot, CONFIRMED] != NONE:
        until_ms = NEVER
    elif slot >= 0 and memory[slot, REVIEW] != NONE:
        last_ms = devices[i, QUIET_SINCE]
        idle_ms = _reached(devices, context, i, last_ms, last_ms, SESSION_IDLE, False)
        if idle_ms < until_ms:
            until_ms, trigger = idle_ms, _SESSION_OVER
    return until_ms, trigger


@jit_no_refcount
def next_due(devices: Matrix, memory: Matrix, context: PackedContext, i: int) -> tuple[int, int]:
    """Return the earliest deadline of a device and its trigger.

    If two deadlines are at the same instant, the one checked first fires.
    """
    mode, quiet_ms = devices[i, MODE], devices[i, QUIET_COVERED] + devices[i, EXCUSED]
    due_ms, trigger = NEVER, -1
    held_ms = devices[i, HELD_UNTIL] if IS_HELD[mode] else NONE
    least_ms = devices[i, MODE_SINCE] if held_ms == NONE else held_ms
    quiet_since_ms = max(least_ms, devices[i, QUIET_SINCE])
    if IS_PRESENT[mode] or IS_HELD[mode] or mode in (_PROVISIONED, _UNREACHABLE):
        outage_ms = devices[i, OUTAGE]
        trigger = _SILENCE
        if outage_ms == NONE:
            due_ms = _reached(devices, context, i, quiet_since_ms, quiet_ms, TIMEOUT, True)
        else:
            since_ms = devices[i, OUTAGE_COVERED]
            due_ms = _reached(devices, context, i, max(least_ms, outage_ms), since_ms, OUTAGE_LIMIT, True)
        death_ms = devices[i, DEATH]
        if mode != _PROVISIONED and death_ms != NONE:
            covered_ms = devices[i, DEATH_COVERED]
            dead_ms = _reached(devices, context, i, max(least_ms, death_ms), covered_ms, DEATH_GRACE, True)
            if dead_ms < due_ms:
                due_ms, trigger = dead_ms, _WILL
        if outage_ms != NONE and IS_PRESENT[mode]:
            since_ms = devices[i, OUTAGE_COVERED]
            cut_off_ms = _reached(devices, context, i, max(least_ms, outage_ms), since_ms, DEATH_GRACE, True)
            if cut_off_ms < due_ms:
                due_ms, trigger = cut_off_ms, _GATEWAY_DEATH
    if held_ms != NONE and held_ms < due_ms:
        due_ms, trigger = held_ms, _UNTIL
    if devices[i, DEGRADED_UNTIL] != NONE and devices[i, DEGRADED_UNTIL] < due_ms:
        due_ms, trigger = devices[i, DEGRADED_UNTIL], _RECOVERED
    if devices[i, FLAGGED_UNTIL] != NONE:
        until_ms, ends = _end_of_flag(devices, memory, context, i)
        if until_ms < due_ms:
            due_ms, trigger = until_ms, ends
    if mode in (_OFFLINE, _DECOMMISSIONED):
        is_offline = mode == _OFFLINE
        since_ms, since = (quiet_since_ms, quiet_ms) if is_offline else (least_ms, least_ms)
        forget_ms = _reached(devices, context, i, since_ms, since, FORGET_AFTER, is_offline)
        if forget_ms < due_ms:
            due_ms, trigger = forget_ms, _FORGET
    return due_ms, trigger
