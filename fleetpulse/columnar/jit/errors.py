"""Errors and events of a device, compiled: rules of the window, the sequence and the session; the definition is `core.fold`.

A device with errors or events has a row of error memory, see `jit.layout`.
"""

from typing import Final

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.columnar.jit.context import (
    DEGRADED_ERRORS,
    DEGRADED_WINDOW,
    FLAGGED_HOLD,
    FLAGGED_WINDOW,
    LAST_ERRORS,
    MODES,
    NONE,
    SEQUENCE,
    SESSION_IDLE,
    STEPS,
    TRIGGERS,
    VELOCITY_CODE,
    VELOCITY_EVENTS,
    VELOCITY_HOLD,
    VELOCITY_KIND,
    PackedContext,
    policy_at,
)
from fleetpulse.columnar.jit.layout import (
    CLASS,
    CODES,
    DEGRADED_UNTIL,
    FLAGGED_UNTIL,
    MEMORY,
    MODE,
    N_CODES,
    N_TIMES,
    PROGRESS,
    PROGRESS_OF,
    QUIET_SINCE,
    R_AT,
    R_CODE,
    R_KIND,
    REVIEW,
    TIMES,
    VELOCITY_COUNT,
    VELOCITY_SINCE,
    Matrix,
)
from fleetpulse.columnar.jit.transitions import transition
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.policy import MAX_SEQUENCE

_OFFLINE: Final = MODES.index(Mode.OFFLINE)
_ERRORS: Final = TRIGGERS.index(Trigger.ERRORS)
_SEQUENCE: Final = TRIGGERS.index(Trigger.SEQUENCE)
_VELOCITY: Final = TRIGGERS.index(Trigger.VELOCITY)


@jit_no_refcount
def _advance(memory: Matrix, slot: int, context: PackedContext, policy: int, of_class: int, code: int, at_ms: int) -> bool:
    """Advance the flagged sequence by one code; True if that completes it.

    The latest start of each prefix is kept.
    """
    count = 0
    while count < MAX_SEQUENCE and context.rules[policy, of_class, STEPS + count] >= 0:
        count += 1
    if memory[slot, PROGRESS_OF] != context.rules[policy, of_class, SEQUENCE]:
        for step in range(count - 1):
            memory[slot, PROGRESS + step] = NONE
    complete = False
    for step in range(count - 1, -1, -1):
        if context.rules[policy, of_class, STEPS + step] != code:
            continue
        start_ms = at_ms if step == 0 else memory[slot, PROGRESS + step - 1]
        if start_ms == NONE or at_ms - start_ms > context.rules[policy, of_class, FLAGGED_WINDOW]:
            continue
        if step == count - 1:
            complete = True
        else:
            memory[slot, PROGRESS + step] = start_ms
    memory[slot, PROGRESS_OF] = -1
    for step in range(count - 1):
        if memory[slot, PROGRESS + step] != NONE:
            memory[slot, PROGRESS_OF] = context.rules[policy, of_class, SEQUENCE]
    return complete


@jit_no_refcount
def count_error(
    devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, i: int, rows: Matrix, j: int
) -> int:
    """Count an error: it can degrade the device (number in the window) or flag it (sequence).

    Returns:
        Number of output rows.
    """
    at_ms, slot, of_class = rows[j, R_AT], devices[i, MEMORY], devices[i, CLASS]
    policy = policy_at(context, at_ms)
    least_ms = at_ms - context.rules[policy, of_class, DEGRADED_WINDOW]
    needed, shown = context.rules[policy, of_class, DEGRADED_ERRORS], context.rules[policy, of_class, LAST_ERRORS]
    count = 0
    for one in range(max(0, memory[slot, N_TIMES] + 1 - needed), memory[slot, N_TIMES]):
        if memory[slot, TIMES + one] >= least_ms:
            memory[slot, TIMES + count] = memory[slot, TIMES + one]
            count += 1
    memory[slot, TIMES + count] = at_ms
    memory[slot, N_TIMES] = count + 1
    known = memory[slot, N_CODES]
    skipped = max(0, known + 1 - shown)
    for one in range(skipped, known):
        memory[slot, CODES + one - skipped] = memory[slot, CODES + one]
    if shown > 0:
        memory[slot, CODES + known - skipped] = rows[j, R_CODE]
    memory[slot, N_CODES] = known + 1 - skipped
    if count + 1 == needed:
        devices[i, DEGRADED_UNTIL] = memory[slot, TIMES] + context.rules[policy, of_class, DEGRADED_WINDOW]
        n_out = transition(devices, memory, context, out, n_out, i, _ERRORS, at_ms, j)
    if _advance(memory, slot, context, policy, of_class, rows[j, R_CODE], at_ms):
        until_ms = at_ms + context.rules[policy, of_class, FLAGGED_HOLD]
        if memory[slot, REVIEW] != NONE:
            until_ms, memory[slot, REVIEW] = max(until_ms, devices[i, FLAGGED_UNTIL]), NONE
        devices[i, FLAGGED_UNTIL] = until_ms
        n_out = transition(devices, memory, context, out, n_out, i, _SEQUENCE, at_ms, j)
    return n_out


@jit_no_refcount
def count_event(
    devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, i: int, rows: Matrix, j: int
) -> int:
    """Count an event of the velocity rule: the last one that the rule needs flags the device for review.

    Returns:
        Number of output rows.
    """
    at_ms, slot, of_class = rows[j, R_AT], devices[i, MEMORY], devices[i, CLASS]
    policy = policy_at(context, at_ms)
    memory[slot, VELOCITY_COUNT] += 1
    if memory[slot, VELOCITY_SINCE] == NONE:
        memory[slot, VELOCITY_SINCE] = at_ms
    if memory[slot, VELOCITY_COUNT] < context.rules[policy, of_class, VELOCITY_EVENTS]:
        return n_out
    memory[slot, VELOCITY_COUNT], memory[slot, VELOCITY_SINCE] = 0, NONE
    if devices[i, FLAGGED_UNTIL] != NONE and memory[slot, REVIEW] == NONE:
        return n_out
    memory[slot, REVIEW], devices[i, FLAGGED_UNTIL] = at_ms, at_ms + context.rules[policy, of_class, VELOCITY_HOLD]
    return transition(devices, memory, context, out, n_out, i, _VELOCITY, at_ms, j)


@jit_no_refcount
def is_event(devices: Matrix, context: PackedContext, i: int, rows: Matrix, j: int) -> bool:
    """Whether a signal is an event of the velocity rule."""
    policy, of_class = policy_at(context, rows[j, R_AT]), devices[i, CLASS]
    if context.rules[policy, of_class, VELOCITY_KIND] != rows[j, R_KIND]:
        return False
    code = context.rules[policy, of_class, VELOCITY_CODE]
    return code < 0 or code == rows[j, R_CODE]


@jit_no_refcount
def is_session_over(devices: Matrix, context: PackedContext, i: int, at_ms: int) -> bool:
    """Whether a signal at an instant is in another session than the signal before it, or the velocity rule is off."""
    policy, of_class = policy_at(context, at_ms), devices[i, CLASS]
    is_idle = at_ms - devices[i, QUIET_SINCE] > context.rules[policy, of_class, SESSION_IDLE]
    return context.rules[policy, of_class, VELOCITY_EVENTS] == NONE or devices[i, MODE] == _OFFLINE or is_idle
