"""Compiled fold of a key group: signals, wills, gateway events and deadlines.

Rule 1: the results equal those of `core.fold`, which is the definition. The laws in
``tests/property`` compare them.
Rule 2: a device is a row of one matrix. A message, or a gateway event for one device, is a row of
another matrix, in judging order. Times are epoch milliseconds, words are numbers, and `NONE` is
null. Control, registry and correction rows are processed by `core.fold`.
Rule 3: the kernel stops between two rows when ``out`` is full. The next call resumes at that row.
"""

import numpy as np
from numpy.typing import NDArray

from fleetpulse.columnar.jit.cache import jit_cached, jit_no_refcount
from fleetpulse.columnar.jit.context import (
    DEATH_GRACE,
    DEGRADED_ERRORS,
    DEGRADED_WINDOW,
    FLAGGED_HOLD,
    FLAGGED_WINDOW,
    FOLLOWING,
    IS_HELD,
    IS_PRESENT,
    LAST_ERRORS,
    LATE_PROVES,
    MODES,
    NEVER,
    NONE,
    QUARANTINES,
    SEQUENCE,
    SESSION_IDLE,
    STEPS,
    TIMEOUT,
    TRIGGERS,
    VELOCITY_CODE,
    VELOCITY_EVENTS,
    VELOCITY_HOLD,
    VELOCITY_KIND,
    Int64s,
    PackedContext,
    covered,
    policy_at,
)
from fleetpulse.columnar.jit.deadlines import limit_of, next_due
from fleetpulse.columnar.jit.layout import (
    ABSENT,
    AFTER_DECOMMISSION,
    BOOT,
    CLASS,
    CLASS_SINCE,
    CLOCK,
    CLOCK_FAULT,
    CLOCK_OFFSET,
    CODES,
    CONFIRMED,
    CONFLICT,
    DEATH,
    DEATH_COVERED,
    DEGRADED_UNTIL,
    EXCUSED,
    FIRMWARE,
    FLAGGED_UNTIL,
    GATEWAY,
    GATEWAY_DEATH,
    GATEWAY_RETURN,
    HEARD,
    HELD_UNTIL,
    IDENTITY_CONFLICT,
    LAST_SEEN,
    LIFE,
    MAX_OUT_ROWS_PER_ROW,
    MEMORY,
    MODE,
    MODE_SINCE,
    MOVED,
    N_CODES,
    N_TIMES,
    NUMBER,
    OUTAGE,
    OUTAGE_COVERED,
    PROGRESS,
    PROGRESS_OF,
    PROVED,
    QUIET_COVERED,
    QUIET_SINCE,
    R_ARRIVAL,
    R_AT,
    R_BOOT,
    R_CODE,
    R_DEVICE,
    R_DIRECT,
    R_FIRMWARE,
    R_GATEWAY,
    R_KIND,
    R_OFFSET,
    R_SEQ,
    R_SESSION,
    R_SITE,
    R_TRUST,
    REBOOTS,
    REVIEW,
    ROW_FIELDS,
    RUNTIME,
    SEQ,
    SESSION,
    SITE,
    SPEAKS_FROM,
    SPOKE_FROM,
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
    TIMES,
    TRANSITION,
    TRUSTS,
    UNKNOWN_DEVICE,
    VELOCITY_COUNT,
    VELOCITY_SINCE,
    Matrix,
)
from fleetpulse.columnar.jit.sending_order import fell_back, was_sent_earlier, was_sent_later
from fleetpulse.core.fold import CONFLICT_MS
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.policy import MAX_SEQUENCE
from fleetpulse.core.rows import POSITION_BITS, RANK, Kind, Trust

_ERROR, _DEATH, _BIRTH = RANK[Kind.ERROR], RANK[Kind.DEATH], RANK[Kind.BIRTH]
_ON_TIME, _LATE, _INVALID = (TRUSTS.index(one) for one in (Trust.ON_TIME, Trust.LATE, Trust.INVALID))
_PROVISIONED, _ONLINE, _DEGRADED, _FLAGGED, _OFFLINE, _DECOMMISSIONED, _FORGOTTEN, _UNREACHABLE = (
    MODES.index(mode)
    for mode in (
        Mode.PROVISIONED,
        Mode.ONLINE,
        Mode.DEGRADED,
        Mode.FLAGGED,
        Mode.OFFLINE,
        Mode.DECOMMISSIONED,
        Mode.FORGOTTEN,
        Mode.UNREACHABLE,
    )
)
_SIGNAL, _SILENCE, _ERRORS, _RECOVERED, _SEQUENCE, _HOLD_OVER, _UNTIL, _UPDATED, _GATEWAY_RETURN, _VELOCITY, _SESSION_OVER = (
    TRIGGERS.index(trigger)
    for trigger in (
        Trigger.SIGNAL,
        Trigger.SILENCE,
        Trigger.ERRORS,
        Trigger.RECOVERED,
        Trigger.SEQUENCE,
        Trigger.HOLD_OVER,
        Trigger.UNTIL,
        Trigger.UPDATED,
        Trigger.GATEWAY_RETURN,
        Trigger.VELOCITY,
        Trigger.SESSION_OVER,
    )
)


@jit_no_refcount
def _is_cut_off(devices: Matrix, context: PackedContext, i: int, at_ms: int) -> bool:
    """Whether a device's gateway is dead, and the grace period over."""
    if devices[i, OUTAGE_COVERED] == NONE:
        return False
    grace_ms = limit_of(devices, context, i, policy_at(context, at_ms), DEATH_GRACE)
    return covered(context, at_ms) - devices[i, OUTAGE_COVERED] >= grace_ms


@jit_no_refcount
def _end_outage(devices: Matrix, context: PackedContext, i: int, at_ms: int) -> None:
    """End the outage of a device's gateway, if any: silence counts again."""
    if devices[i, OUTAGE_COVERED] != NONE:
        devices[i, EXCUSED] += covered(context, at_ms) - devices[i, OUTAGE_COVERED]
        devices[i, OUTAGE] = devices[i, OUTAGE_COVERED] = NONE


@jit_no_refcount
def _transition(
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
        elif IS_HELD[mode] and _is_cut_off(devices, context, i, at_ms):
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
        _end_outage(devices, context, i, at_ms)
    return n_out + 1


@jit_no_refcount
def _expire(
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
        n_out = _transition(devices, memory, context, out, n_out, i, trigger, due_ms, -1)
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


@jit_no_refcount
def _new_device(devices: Matrix, memory: Matrix, context: PackedContext, i: int, rows: Matrix, j: int) -> None:
    """Start a life with a signal; the class is the default class (number 0)."""
    at_ms = rows[j, R_AT]
    slot = devices[i, MEMORY]
    devices[i, :] = NONE
    devices[i, SITE], devices[i, CLASS] = rows[j, R_SITE], 0
    devices[i, GATEWAY] = -1 if rows[j, R_TRUST] == _LATE else rows[j, R_GATEWAY]
    devices[i, LIFE], devices[i, QUIET_SINCE], devices[i, QUIET_COVERED] = at_ms, at_ms, covered(context, at_ms)
    devices[i, MODE], devices[i, NUMBER], devices[i, MODE_SINCE], devices[i, CLASS_SINCE] = _PROVISIONED, 0, at_ms, at_ms
    devices[i, BOOT], devices[i, SEQ], devices[i, REBOOTS], devices[i, RUNTIME], devices[i, EXCUSED] = -1, -1, 0, 0, 0
    devices[i, CLOCK] = _ON_TIME
    devices[i, FIRMWARE] = devices[i, SPEAKS_FROM] = devices[i, SPOKE_FROM] = -1
    devices[i, MEMORY] = slot
    if slot >= 0:
        memory[slot, N_TIMES], memory[slot, N_CODES], memory[slot, PROGRESS_OF] = 0, 0, -1
        memory[slot, VELOCITY_COUNT] = 0
        memory[slot, VELOCITY_SINCE] = memory[slot, REVIEW] = memory[slot, CONFIRMED] = NONE


@jit_no_refcount
def _record_signal(devices: Matrix, context: PackedContext, out: Matrix, n_out: int, i: int, rows: Matrix, j: int) -> int:
    """Record a signal: last seen, runtime, clock.

    If it is not late, it can also change reboots, gateway, firmware and site. A late direct birth
    still sets the session, and the counter within its boot. A signal that was sent before the newest
    one, and delivered after it, changes neither clock nor session nor counter.

    Returns:
        Number of output rows.
    """
    at_ms, mode = rows[j, R_AT], devices[i, MODE]
    now_covered = covered(context, at_ms)
    gap = now_covered - devices[i, QUIET_COVERED] - devices[i, EXCUSED]
    timeout_ms = limit_of(devices, context, i, policy_at(context, at_ms), TIMEOUT)
    present = IS_PRESENT[mode] or IS_HELD[mode] or mode == _UNREACHABLE
    if devices[i, LAST_SEEN] != NONE and present and gap <= timeout_ms:
        devices[i, RUNTIME] += gap
    is_older = was_sent_earlier(devices, i, rows, j)
    devices[i, LAST_SEEN] = devices[i, QUIET_SINCE] = at_ms
    devices[i, QUIET_COVERED], devices[i, EXCUSED] = now_covered, 0
    trust, arrival = rows[j, R_TRUST], rows[j, R_ARRIVAL]
    if not is_older:
        if trust >= _INVALID and trust != devices[i, CLOCK]:
            n_out = _list(out, n_out, CLOCK_FAULT, i, j)
        devices[i, CLOCK] = trust
        devices[i, CLOCK_OFFSET] = NONE if trust in (_ON_TIME, _INVALID) else rows[j, R_OFFSET]
    newest, is_birth = devices[i, HEARD] == NONE or devices[i, HEARD] < arrival, rows[j, R_KIND] == _BIRTH
    if trust != _LATE:
        if rows[j, R_GATEWAY] >= 0:
            devices[i, GATEWAY] = rows[j, R_GATEWAY]
        if newest and not is_older:
            n_out = _record_counters(devices, out, n_out, i, rows, j)
        elif is_birth and was_sent_later(devices, i, rows, j):
            _record_session(devices, i, rows, j)
            devices[i, SEQ] = rows[j, R_SEQ]
    elif newest and not is_older and is_birth and rows[j, R_DIRECT]:
        boot = rows[j, R_BOOT]
        if boot >= 0 and rows[j, R_SEQ] >= 0 and (boot == devices[i, BOOT] or devices[i, SEQ] < 0):
            devices[i, SEQ] = rows[j, R_SEQ]
        _record_session(devices, i, rows, j)
    if newest:
        devices[i, HEARD] = arrival
    if rows[j, R_DIRECT] or is_birth:
        devices[i, PROVED] = max(devices[i, PROVED], arrival)
    return n_out


@jit_no_refcount
def _record_session(devices: Matrix, i: int, rows: Matrix, j: int) -> None:
    """Record the session and boot that a signal names."""
    if rows[j, R_BOOT] >= 0:
        devices[i, BOOT] = rows[j, R_BOOT]
    if rows[j, R_SESSION] != NONE:
        devices[i, SESSION] = rows[j, R_SESSION]


@jit_no_refcount
def _record_counters(devices: Matrix, out: Matrix, n_out: int, i: int, rows: Matrix, j: int) -> int:
    """Record session, boot, counter, firmware and site of the newest signal received.

    Returns:
        Number of output rows.
    """
    boot, seq = rows[j, R_BOOT], rows[j, R_SEQ]
    current_site = devices[i, SITE] if devices[i, SPEAKS_FROM] < 0 else devices[i, SPEAKS_FROM]
    if rows[j, R_SITE] != current_site:
        n_out = _record_move(devices, out, n_out, i, rows, j, current_site)
    elif boot >= 0 and devices[i, BOOT] >= 0:
        if boot != devices[i, BOOT]:
            devices[i, REBOOTS] += 1
    elif seq >= 0 and devices[i, SEQ] >= 0 and fell_back(devices[i, SEQ], seq):
        devices[i, REBOOTS] += 1
    _record_session(devices, i, rows, j)
    if seq >= 0:
        devices[i, SEQ] = seq
    if rows[j, R_FIRMWARE] >= 0:
        devices[i, FIRMWARE] = rows[j, R_FIRMWARE]
    return n_out


@jit_no_refcount
def _record_move(devices: Matrix, out: Matrix, n_out: int, i: int, rows: Matrix, j: int, current_site: int) -> int:
    """Record a signal from another site than ``current_site``; report an identity conflict.

    The conflict is reported if the device returns to its previous site within a day.

    Returns:
        Number of output rows.
    """
    at_ms, site = rows[j, R_AT], rows[j, R_SITE]
    is_back = site == devices[i, SPOKE_FROM] and devices[i, MOVED] != NONE and at_ms - devices[i, MOVED] < CONFLICT_MS
    if is_back and (devices[i, CONFLICT] == NONE or at_ms - devices[i, CONFLICT] >= CONFLICT_MS):
        devices[i, CONFLICT] = at_ms
        out[n_out, T_SITE] = current_site
        n_out = _list(out, n_out, IDENTITY_CONFLICT, i, j)
    devices[i, SPOKE_FROM], devices[i, MOVED] = current_site, at_ms
    devices[i, SPEAKS_FROM] = -1 if site == devices[i, SITE] else site
    return n_out


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
def _error(devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, i: int, rows: Matrix, j: int) -> int:
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
        n_out = _transition(devices, memory, context, out, n_out, i, _ERRORS, at_ms, j)
    if _advance(memory, slot, context, policy, of_class, rows[j, R_CODE], at_ms):
        until_ms = at_ms + context.rules[policy, of_class, FLAGGED_HOLD]
        if memory[slot, REVIEW] != NONE:
            until_ms, memory[slot, REVIEW] = max(until_ms, devices[i, FLAGGED_UNTIL]), NONE
        devices[i, FLAGGED_UNTIL] = until_ms
        n_out = _transition(devices, memory, context, out, n_out, i, _SEQUENCE, at_ms, j)
    return n_out


@jit_no_refcount
def _count_event(
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
    return _transition(devices, memory, context, out, n_out, i, _VELOCITY, at_ms, j)


@jit_no_refcount
def _is_event(devices: Matrix, context: PackedContext, i: int, rows: Matrix, j: int) -> bool:
    """Whether a signal is an event of the velocity rule."""
    policy, of_class = policy_at(context, rows[j, R_AT]), devices[i, CLASS]
    if context.rules[policy, of_class, VELOCITY_KIND] != rows[j, R_KIND]:
        return False
    code = context.rules[policy, of_class, VELOCITY_CODE]
    return code < 0 or code == rows[j, R_CODE]


@jit_no_refcount
def _is_session_over(devices: Matrix, context: PackedContext, i: int, at_ms: int) -> bool:
    """Whether a signal at an instant is in another session than the signal before it, or the velocity rule is off."""
    policy, of_class = policy_at(context, at_ms), devices[i, CLASS]
    is_idle = at_ms - devices[i, QUIET_SINCE] > context.rules[policy, of_class, SESSION_IDLE]
    return context.rules[policy, of_class, VELOCITY_EVENTS] == NONE or devices[i, MODE] == _OFFLINE or is_idle


@jit_no_refcount
def _list(out: Matrix, n_out: int, kind: int, i: int, j: int) -> int:
    out[n_out, T_WHAT], out[n_out, T_DEVICE], out[n_out, T_ROW] = kind, i, j
    return n_out + 1


@jit_no_refcount
def _apply(devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, rows: Matrix, j: int) -> int:
    """Apply one signal or will; return the number of output rows."""
    i, at_ms, late = rows[j, R_DEVICE], rows[j, R_AT], rows[j, R_TRUST] == _LATE
    if rows[j, R_KIND] == _DEATH:
        alive = devices[i, MODE] != ABSENT and devices[i, MODE] != _DECOMMISSIONED
        if alive and devices[i, PROVED] < rows[j, R_ARRIVAL] and _is_of_its_session(devices, i, rows, j):
            devices[i, DEATH], devices[i, DEATH_COVERED] = at_ms, covered(context, at_ms)
        return n_out
    absent = devices[i, MODE] == ABSENT
    if late and not _proves_alive(context, 0 if absent else devices[i, CLASS], rows, j):
        return n_out
    if absent:
        if context.rules[policy_at(context, at_ms), 0, QUARANTINES]:
            return n_out if late else _list(out, n_out, UNKNOWN_DEVICE, i, j)
        _new_device(devices, memory, context, i, rows, j)
    if devices[i, MODE] == _DECOMMISSIONED:
        return n_out if late else _list(out, n_out, AFTER_DECOMMISSION, i, j)
    copied, reboots, firmware = _is_copy(devices, i, rows, j), devices[i, REBOOTS], devices[i, FIRMWARE]
    slot, session, boot = devices[i, MEMORY], devices[i, SESSION], devices[i, BOOT]
    counts = slot >= 0 and memory[slot, VELOCITY_COUNT] > 0
    is_over = counts and _is_session_over(devices, context, i, at_ms)
    _end_outage(devices, context, i, at_ms)
    n_out = _record_signal(devices, context, out, n_out, i, rows, j)
    if counts and rows[j, R_KIND] == _BIRTH:
        is_over = is_over or (session != NONE and session != devices[i, SESSION]) or (boot >= 0 and boot != devices[i, BOOT])
    if is_over:
        memory[slot, VELOCITY_COUNT], memory[slot, VELOCITY_SINCE] = 0, NONE
    devices[i, DEATH] = devices[i, DEATH_COVERED] = NONE
    n_out = _transition(devices, memory, context, out, n_out, i, _SIGNAL, at_ms, j)
    if devices[i, REBOOTS] > reboots or (firmware >= 0 and devices[i, FIRMWARE] != firmware):
        n_out = _transition(devices, memory, context, out, n_out, i, _UPDATED, at_ms, j)
    if rows[j, R_KIND] == _ERROR and not (late or copied):
        n_out = _error(devices, memory, context, out, n_out, i, rows, j)
    if not (late or copied) and _is_event(devices, context, i, rows, j):
        n_out = _count_event(devices, memory, context, out, n_out, i, rows, j)
    return n_out


@jit_no_refcount
def _gateway(devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, rows: Matrix, j: int) -> int:
    """Apply the death or return of a device's gateway, as `core.fold.Fold`.

    Returns:
        Number of output rows.
    """
    i, at_ms = rows[j, R_DEVICE], rows[j, R_AT]
    mode = devices[i, MODE]
    if mode == ABSENT:
        return n_out
    if rows[j, R_KIND] == GATEWAY_RETURN:
        _end_outage(devices, context, i, at_ms)
        return _transition(devices, memory, context, out, n_out, i, _GATEWAY_RETURN, at_ms, -1)
    is_unaffected = mode in (_OFFLINE, _DECOMMISSIONED) or devices[i, OUTAGE] != NONE
    if not is_unaffected and devices[i, PROVED] < rows[j, R_ARRIVAL]:
        devices[i, OUTAGE], devices[i, OUTAGE_COVERED] = at_ms, covered(context, at_ms)
    return n_out


@jit_no_refcount
def _is_of_its_session(devices: Matrix, i: int, rows: Matrix, j: int) -> bool:
    """Whether a will belongs to the device's session, or boot if a session is missing."""
    session, boot = rows[j, R_SESSION], rows[j, R_BOOT]
    if session != NONE and devices[i, SESSION] != NONE:
        return session == devices[i, SESSION]
    return boot < 0 or devices[i, BOOT] < 0 or boot == devices[i, BOOT]


@jit_no_refcount
def _proves_alive(context: PackedContext, of_class: int, rows: Matrix, j: int) -> bool:
    """Whether a late signal proves that its device was alive when it was received."""
    rule = context.rules[policy_at(context, rows[j, R_AT]), of_class, LATE_PROVES]
    return rows[j, R_DIRECT] != 0 if rule == NONE else rule != 0


@jit_no_refcount
def _is_copy(devices: Matrix, i: int, rows: Matrix, j: int) -> bool:
    """Whether a signal is a copy: its ``seq`` repeats that of the signal before.

    This applies only if the presence time of the signal is not its event time.
    """
    placeless = rows[j, R_TRUST] >= _INVALID or rows[j, R_OFFSET] != 0
    boot = rows[j, R_BOOT]
    return placeless and 0 <= rows[j, R_SEQ] == devices[i, SEQ] and (boot < 0 or boot == devices[i, BOOT])


@jit_no_refcount
def _drop_settled_arrivals(devices: Matrix, i: int, least: int) -> None:
    """Forget arrival positions that no later row can precede, as `core.fold.drop_settled_arrivals`."""
    for field in (HEARD, PROVED):
        if devices[i, field] < least:
            devices[i, field] = NONE


@jit_cached
def matrix(
    order: Int64s,
    device: Int64s,
    presence_ms: Int64s,
    offset_ms: Int64s,
    arrival: Int64s,
    trust: NDArray[np.int8],
    direct: NDArray[np.bool_],
    kind: NDArray[np.int8],
    boot: Int64s,
    session: Int64s,
    seq: Int64s,
    code: NDArray[np.int32],
    codes: Int64s,
    gateway: NDArray[np.int32],
    gateways: Int64s,
    site: NDArray[np.int32],
    sites: Int64s,
    firmware: NDArray[np.int32],
    firmwares: Int64s,
) -> Matrix:
    """Return columns of messages as rows of `layout.ROW_FIELDS`, in judging order.

    A column of words is given as two arrays: indices of the rows, and numbers by index (see
    `Vocabulary.mapped`).
    """
    rows = np.empty((len(order), len(ROW_FIELDS)), np.int64)
    for j in range(len(order)):
        at = order[j]
        rows[j, R_DEVICE], rows[j, R_AT], rows[j, R_OFFSET] = device[at], presence_ms[at], offset_ms[at]
        rows[j, R_ARRIVAL], rows[j, R_TRUST], rows[j, R_DIRECT] = arrival[at], trust[at], direct[at]
        rows[j, R_KIND], rows[j, R_BOOT], rows[j, R_SESSION], rows[j, R_SEQ] = kind[at], boot[at], session[at], seq[at]
        rows[j, R_CODE], rows[j, R_GATEWAY], rows[j, R_SITE] = codes[code[at]], gateways[gateway[at]], sites[site[at]]
        rows[j, R_FIRMWARE] = firmwares[firmware[at]]
    return rows


@jit_no_refcount
def apply_rows(devices: Matrix, memory: Matrix, context: PackedContext, rows: Matrix, first: int, out: Matrix) -> tuple[int, int]:
    """Judge rows from ``first`` on, and fire the deadlines that lie between them.

    Returns:
        Index of the row to resume with (the number of rows if all are judged), and number of output
        rows.
    """
    n_out = 0
    for j in range(first, len(rows)):
        if n_out + MAX_OUT_ROWS_PER_ROW > len(out):
            return j, n_out
        i = rows[j, R_DEVICE]
        of_gateway = rows[j, R_KIND] in (GATEWAY_DEATH, GATEWAY_RETURN)
        if of_gateway and (devices[i, MODE] == ABSENT or devices[i, GATEWAY] != rows[j, R_GATEWAY]):
            continue  # the event concerns another gateway than that of the device: no deadline fires
        n_out, _ = _expire(devices, memory, context, out, n_out, i, rows[j, R_AT])
        if of_gateway:
            n_out = _gateway(devices, memory, context, out, n_out, rows, j)
        else:
            n_out = _apply(devices, memory, context, out, n_out, rows, j)
    return len(rows), n_out


@jit_cached
def jitter_delays(offsets: NDArray[np.int32], text: NDArray[np.uint8], width_ms: int) -> Int64s:
    """Return a delay below ``width_ms`` for each device, as a hash of its id (FNV-1a).

    Args:
        offsets: offset of each id in ``text``, and the end of the last.
        text: concatenated ids in UTF-8.
        width_ms: bound of the delays in milliseconds, at least 1.
    """
    delays = np.empty(len(offsets) - 1, np.int64)
    for i in range(len(delays)):
        mixed = np.uint64(14695981039346656037)
        for at in range(offsets[i], offsets[i + 1]):
            mixed = (mixed ^ np.uint64(text[at])) * np.uint64(1099511628211)
        delays[i] = np.int64((mixed >> np.uint64(1)) % np.uint64(width_ms))
    return delays


@jit_no_refcount
def advance_time(
    devices: Matrix, memory: Matrix, context: PackedContext, through_ms: Int64s, frontier_ms: int, first: int, out: Matrix
) -> tuple[int, int, int]:
    """Fire the deadlines of each device from ``first`` on, up to its ``through_ms``.

    Each device is then settled at the frontier, see `_drop_settled_arrivals`.

    Returns:
        Index of the device to resume with, number of output rows, and the least distance from a
        device's instant to its next deadline (`NEVER` without one).
    """
    n_out, left_ms = 0, NEVER
    least = max(0, frontier_ms + 1) << POSITION_BITS
    for i in range(first, len(devices)):
        if n_out + MAX_OUT_ROWS_PER_ROW > len(out):
            return i, n_out, left_ms
        n_out, due_ms = _expire(devices, memory, context, out, n_out, i, through_ms[i] + 1)
        if due_ms != NEVER:
            left_ms = min(left_ms, due_ms - through_ms[i])
        _drop_settled_arrivals(devices, i, least)
    return len(devices), n_out, left_ms
