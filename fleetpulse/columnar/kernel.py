"""The fold of `core.device`, compiled: signals, wills and deadlines of a key group's devices.

Rule 1: it says what `core.device` says, which is the definition; the laws in ``tests/property`` compare them.
Rule 2: a device is a row of one matrix, a message a row of another, in the order in which they are judged; times are
epoch milliseconds, words are numbers, `NONE` is nothing. What operators and the registry say is left to `core.device`.
Rule 3: it stops between two rows when ``told`` is full, and goes on from there.
"""

import numpy as np
from numpy.typing import NDArray

from fleetpulse.columnar.compiled import borrowing, kept
from fleetpulse.columnar.deadlines import next_due
from fleetpulse.columnar.layout import (
    ABSENT,
    AFTER_DECOMMISSION,
    BOOT,
    CLASS,
    CLASS_SINCE,
    CODES,
    DEATH,
    DEATH_COVERED,
    DEGRADED_UNTIL,
    FLAGGED_UNTIL,
    GATEWAY,
    GATEWAY_DIED,
    HELD_UNTIL,
    LAST_SEEN,
    LIFE,
    MEMORY,
    MODE,
    MODE_SINCE,
    N_CODES,
    N_TIMES,
    NUMBER,
    PROGRESS,
    PROGRESS_OF,
    QUIET_COVERED,
    QUIET_SINCE,
    R_BOOT,
    R_CODE,
    R_DEVICE,
    R_EVENT,
    R_GATEWAY,
    R_KIND,
    R_RECEIVED,
    R_SEQ,
    R_SITE,
    REBOOTS,
    ROOM,
    ROW_FIELDS,
    RUNTIME,
    SEQ,
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
    TIMES,
    TRANSITION,
    UNKNOWN_DEVICE,
    Matrix,
)
from fleetpulse.columnar.world import (
    DEGRADED_ERRORS,
    DEGRADED_WINDOW,
    FLAGGED_HOLD,
    FLAGGED_WINDOW,
    FOLLOWING,
    IS_HELD,
    IS_PRESENT,
    LAST_ERRORS,
    MODES,
    NEVER,
    NONE,
    QUARANTINES,
    SEQUENCE,
    STEPS,
    TIMEOUT,
    TRIGGERS,
    Int64s,
    World,
    covered,
    in_force,
)
from fleetpulse.core.machine import Mode, Trigger
from fleetpulse.core.messages import RANK, Kind
from fleetpulse.core.policy import MAX_SEQUENCE

_ERROR, _DEATH = RANK[Kind.ERROR], RANK[Kind.DEATH]
_PROVISIONED, _ONLINE, _DEGRADED, _FLAGGED, _DECOMMISSIONED, _FORGOTTEN = (
    MODES.index(mode)
    for mode in (
        Mode.PROVISIONED,
        Mode.ONLINE,
        Mode.DEGRADED,
        Mode.FLAGGED,
        Mode.DECOMMISSIONED,
        Mode.FORGOTTEN,
    )
)
_SIGNAL, _ERRORS, _RECOVERED, _SEQUENCE, _HOLD_OVER, _UNTIL = (
    TRIGGERS.index(trigger)
    for trigger in (
        Trigger.SIGNAL,
        Trigger.ERRORS,
        Trigger.RECOVERED,
        Trigger.SEQUENCE,
        Trigger.HOLD_OVER,
        Trigger.UNTIL,
    )
)


@borrowing
def _change(
    devices: Matrix, memory: Matrix, world: World, told: Matrix, said: int, i: int, trigger: int, at_ms: int, row: int
) -> int:
    """Take the way that the table gives, and write it down; return how many judgements are told."""
    mode = devices[i, MODE]
    target = FOLLOWING[mode, trigger]
    if target < 0:
        return said
    if target == _ONLINE:
        if devices[i, LAST_SEEN] == NONE:
            target = _PROVISIONED
        elif devices[i, FLAGGED_UNTIL] != NONE:
            target = _FLAGGED
        elif devices[i, DEGRADED_UNTIL] != NONE:
            target = _DEGRADED
    if target == mode:
        return said
    policy, slot = in_force(world, at_ms), devices[i, MEMORY]
    devices[i, NUMBER] += 1
    told[said, T_WHAT], told[said, T_DEVICE], told[said, T_AT], told[said, T_ROW] = TRANSITION, i, at_ms, row
    told[said, T_FROM], told[said, T_TO], told[said, T_TRIGGER], told[said, T_NUMBER] = mode, target, trigger, devices[i, NUMBER]
    told[said, T_LAST_SEEN], told[said, T_RUNTIME] = devices[i, LAST_SEEN], devices[i, RUNTIME]
    told[said, T_LIFE], told[said, T_CLASS] = devices[i, LIFE], devices[i, CLASS]
    told[said, T_SITE], told[said, T_GATEWAY], told[said, T_POLICY] = devices[i, SITE], devices[i, GATEWAY], policy
    told[said, T_SHOWN] = 0
    if slot >= 0:
        known = memory[slot, N_CODES]
        shown = min(known, world.rules[policy, devices[i, CLASS], LAST_ERRORS])
        told[said, T_SHOWN] = shown
        for one in range(shown):
            told[said, T_CODES + one] = memory[slot, CODES + known - shown + one]
    devices[i, MODE], devices[i, MODE_SINCE] = target, at_ms
    if not IS_HELD[target]:
        devices[i, HELD_UNTIL] = NONE
    return said + 1


@borrowing
def _expire(devices: Matrix, memory: Matrix, world: World, told: Matrix, said: int, i: int, before_ms: int) -> tuple[int, int]:
    """Let deadlines act, earliest first, until none lies before ``before_ms``; return what is told, and the next one."""
    while devices[i, MODE] != ABSENT:
        due_ms, trigger = next_due(devices, world, i)
        if due_ms >= before_ms:
            return said, due_ms
        if trigger == _RECOVERED:
            devices[i, DEGRADED_UNTIL] = NONE
        elif trigger == _HOLD_OVER:
            devices[i, FLAGGED_UNTIL] = NONE
        elif trigger == _UNTIL:
            devices[i, HELD_UNTIL] = NONE
        said = _change(devices, memory, world, told, said, i, trigger, due_ms, -1)
        if devices[i, MODE] == _FORGOTTEN:
            devices[i, MODE] = ABSENT
    return said, NEVER


@borrowing
def _born(devices: Matrix, memory: Matrix, world: World, i: int, rows: Matrix, j: int) -> None:
    """Begin a life, of the default class (number 0)."""
    at_ms = rows[j, R_EVENT]
    slot = devices[i, MEMORY]
    devices[i, :] = NONE
    devices[i, SITE], devices[i, CLASS], devices[i, GATEWAY] = rows[j, R_SITE], 0, rows[j, R_GATEWAY]
    devices[i, LIFE], devices[i, QUIET_SINCE], devices[i, QUIET_COVERED] = at_ms, at_ms, covered(world, at_ms)
    devices[i, MODE], devices[i, NUMBER], devices[i, MODE_SINCE], devices[i, CLASS_SINCE] = _PROVISIONED, 0, at_ms, at_ms
    devices[i, BOOT], devices[i, SEQ], devices[i, REBOOTS], devices[i, RUNTIME], devices[i, GATEWAY_DIED] = -1, -1, 0, 0, 0
    devices[i, MEMORY] = slot
    if slot >= 0:
        memory[slot, N_TIMES], memory[slot, N_CODES], memory[slot, PROGRESS_OF] = 0, 0, -1


@borrowing
def _heard(devices: Matrix, world: World, i: int, rows: Matrix, j: int) -> None:
    """Note a signal: last seen, runtime, reboots, gateway."""
    at_ms, mode = rows[j, R_EVENT], devices[i, MODE]
    now_covered = covered(world, at_ms)
    gap = now_covered - devices[i, QUIET_COVERED]
    timeout_ms = world.rules[in_force(world, at_ms), devices[i, CLASS], TIMEOUT]
    if devices[i, LAST_SEEN] != NONE and (IS_PRESENT[mode] or IS_HELD[mode]) and gap <= timeout_ms:
        devices[i, RUNTIME] += gap
    boot, seq = rows[j, R_BOOT], rows[j, R_SEQ]
    backwards = 0 <= seq < devices[i, SEQ]
    if backwards or (boot >= 0 and devices[i, BOOT] >= 0 and boot != devices[i, BOOT]):
        devices[i, REBOOTS] += 1
    devices[i, LAST_SEEN] = devices[i, QUIET_SINCE] = at_ms
    devices[i, QUIET_COVERED] = now_covered
    if boot >= 0:
        devices[i, BOOT] = boot
    if seq >= 0:
        devices[i, SEQ] = seq
    if rows[j, R_GATEWAY] >= 0:
        devices[i, GATEWAY] = rows[j, R_GATEWAY]


@borrowing
def _advance(memory: Matrix, slot: int, world: World, policy: int, of_class: int, code: int, at_ms: int) -> bool:
    """Advance the flagged sequence by one code; True where that completes it. The latest start of each prefix is kept."""
    count = 0
    while count < MAX_SEQUENCE and world.rules[policy, of_class, STEPS + count] >= 0:
        count += 1
    if memory[slot, PROGRESS_OF] != world.rules[policy, of_class, SEQUENCE]:
        for step in range(count - 1):
            memory[slot, PROGRESS + step] = NONE
    complete = False
    for step in range(count - 1, -1, -1):
        if world.rules[policy, of_class, STEPS + step] != code:
            continue
        start_ms = at_ms if step == 0 else memory[slot, PROGRESS + step - 1]
        if start_ms == NONE or at_ms - start_ms > world.rules[policy, of_class, FLAGGED_WINDOW]:
            continue
        if step == count - 1:
            complete = True
        else:
            memory[slot, PROGRESS + step] = start_ms
    memory[slot, PROGRESS_OF] = -1
    for step in range(count - 1):
        if memory[slot, PROGRESS + step] != NONE:
            memory[slot, PROGRESS_OF] = world.rules[policy, of_class, SEQUENCE]
    return complete


@borrowing
def _error(devices: Matrix, memory: Matrix, world: World, told: Matrix, said: int, i: int, rows: Matrix, j: int) -> int:
    """Count an error into the facts: degraded by number, flagged by order."""
    at_ms, slot, of_class = rows[j, R_EVENT], devices[i, MEMORY], devices[i, CLASS]
    policy = in_force(world, at_ms)
    least_ms = at_ms - world.rules[policy, of_class, DEGRADED_WINDOW]
    needed, shown = world.rules[policy, of_class, DEGRADED_ERRORS], world.rules[policy, of_class, LAST_ERRORS]
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
        devices[i, DEGRADED_UNTIL] = memory[slot, TIMES] + world.rules[policy, of_class, DEGRADED_WINDOW]
        said = _change(devices, memory, world, told, said, i, _ERRORS, at_ms, j)
    if _advance(memory, slot, world, policy, of_class, rows[j, R_CODE], at_ms):
        devices[i, FLAGGED_UNTIL] = at_ms + world.rules[policy, of_class, FLAGGED_HOLD]
        said = _change(devices, memory, world, told, said, i, _SEQUENCE, at_ms, j)
    return said


@borrowing
def _note(told: Matrix, said: int, what: int, i: int, j: int) -> int:
    told[said, T_WHAT], told[said, T_DEVICE], told[said, T_ROW] = what, i, j
    return said + 1


@borrowing
def _apply(devices: Matrix, memory: Matrix, world: World, told: Matrix, said: int, rows: Matrix, j: int) -> int:
    """Let one signal or will act."""
    i, at_ms, boot = rows[j, R_DEVICE], rows[j, R_EVENT], rows[j, R_BOOT]
    if rows[j, R_KIND] == _DEATH:
        mode = devices[i, MODE]
        earlier = boot >= 0 and devices[i, BOOT] >= 0 and boot != devices[i, BOOT]
        if mode not in (ABSENT, _DECOMMISSIONED) and not earlier:
            devices[i, DEATH], devices[i, DEATH_COVERED], devices[i, GATEWAY_DIED] = at_ms, covered(world, at_ms), 0
        return said
    if devices[i, MODE] == ABSENT:
        if world.rules[in_force(world, at_ms), 0, QUARANTINES]:
            return _note(told, said, UNKNOWN_DEVICE, i, j)
        _born(devices, memory, world, i, rows, j)
    if devices[i, MODE] == _DECOMMISSIONED:
        return _note(told, said, AFTER_DECOMMISSION, i, j)
    _heard(devices, world, i, rows, j)
    if devices[i, DEATH] == NONE or rows[j, R_RECEIVED] > devices[i, DEATH]:
        devices[i, DEATH] = devices[i, DEATH_COVERED] = NONE
        said = _change(devices, memory, world, told, said, i, _SIGNAL, at_ms, j)
    if rows[j, R_KIND] == _ERROR:
        said = _error(devices, memory, world, told, said, i, rows, j)
    return said


@kept
def matrix(
    order: Int64s,
    device: Int64s,
    event_ms: Int64s,
    received_ms: Int64s,
    kind: NDArray[np.int8],
    boot: Int64s,
    seq: Int64s,
    code: NDArray[np.int32],
    codes: Int64s,
    gateway: NDArray[np.int32],
    gateways: Int64s,
    site: NDArray[np.int32],
    sites: Int64s,
) -> Matrix:
    """Return columns of messages as rows of `layout.ROW_FIELDS`, in the order in which they are judged.

    Words are given as which one each is, and the words' numbers, see `Vocabulary.mapped`.
    """
    rows = np.empty((len(order), len(ROW_FIELDS)), np.int64)
    for j in range(len(order)):
        at = order[j]
        rows[j, R_DEVICE], rows[j, R_EVENT], rows[j, R_RECEIVED] = device[at], event_ms[at], received_ms[at]
        rows[j, R_KIND], rows[j, R_BOOT], rows[j, R_SEQ] = kind[at], boot[at], seq[at]
        rows[j, R_CODE], rows[j, R_GATEWAY], rows[j, R_SITE] = codes[code[at]], gateways[gateway[at]], sites[site[at]]
    return rows


@borrowing
def judge_rows(devices: Matrix, memory: Matrix, world: World, rows: Matrix, first: int, told: Matrix) -> tuple[int, int]:
    """Judge rows from ``first`` on, silence acting between them.

    Returns:
        The row to go on with (their number when all are judged), and how many judgements are told.
    """
    said = 0
    for j in range(first, len(rows)):
        if said + ROOM > len(told):
            return j, said
        said, _ = _expire(devices, memory, world, told, said, rows[j, R_DEVICE], rows[j, R_EVENT])
        said = _apply(devices, memory, world, told, said, rows, j)
    return len(rows), said


@kept
def spread(offsets: NDArray[np.int32], text: NDArray[np.uint8], width_ms: int) -> Int64s:
    """Return for each device a delay below ``width_ms`` that follows from its id alone (FNV-1a), in milliseconds.

    Args:
        offsets: where each id begins in ``text``, and where the last one ends.
        text: the ids in UTF-8.
        width_ms: at least 1.
    """
    delays = np.empty(len(offsets) - 1, np.int64)
    for i in range(len(delays)):
        mixed = np.uint64(14695981039346656037)
        for at in range(offsets[i], offsets[i + 1]):
            mixed = (mixed ^ np.uint64(text[at])) * np.uint64(1099511628211)
        delays[i] = np.int64((mixed >> np.uint64(1)) % np.uint64(width_ms))
    return delays


@borrowing
def let_pass(devices: Matrix, memory: Matrix, world: World, through_ms: Int64s, first: int, told: Matrix) -> tuple[int, int, int]:
    """Let silence act on each device from ``first`` on, through its instant of ``through_ms``.

    Returns:
        The device to go on with, how many judgements are told, and the earliest deadline that is left, counted from
        each device's own instant (`NEVER` without one).
    """
    said, left_ms = 0, NEVER
    for i in range(first, len(devices)):
        if said + ROOM > len(told):
            return i, said, left_ms
        said, due_ms = _expire(devices, memory, world, told, said, i, through_ms[i] + 1)
        if due_ms != NEVER:
            left_ms = min(left_ms, due_ms - through_ms[i])
    return len(devices), said, left_ms
