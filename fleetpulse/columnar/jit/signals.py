"""Facts that a signal changes in the row of its device, compiled; the definition is `core.fold`.

They are the runtime, the session, the counters and the site of the device, and the start of a life.
"""

from typing import Final

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.columnar.jit.context import (
    IS_HELD,
    IS_PRESENT,
    LATE_PROVES,
    MODES,
    NONE,
    TIMEOUT,
    PackedContext,
    covered,
    policy_at,
)
from fleetpulse.columnar.jit.deadlines import limit_of
from fleetpulse.columnar.jit.layout import (
    BOOT,
    CLASS,
    CLASS_SINCE,
    CLOCK,
    CLOCK_FAULT,
    CLOCK_OFFSET,
    CONFIRMED,
    CONFLICT,
    EXCUSED,
    FIRMWARE,
    GATEWAY,
    HEARD,
    IDENTITY_CONFLICT,
    LAST_SEEN,
    LIFE,
    MEMORY,
    MODE,
    MODE_SINCE,
    MOVED,
    N_CODES,
    N_TIMES,
    NUMBER,
    PROGRESS_OF,
    PROVED,
    QUIET_COVERED,
    QUIET_SINCE,
    R_ARRIVAL,
    R_AT,
    R_BOOT,
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
    RUNTIME,
    SEQ,
    SESSION,
    SITE,
    SPEAKS_FROM,
    SPOKE_FROM,
    T_SITE,
    TRUSTS,
    VELOCITY_COUNT,
    VELOCITY_SINCE,
    Matrix,
)
from fleetpulse.columnar.jit.sending_order import fell_back, was_sent_earlier, was_sent_later
from fleetpulse.columnar.jit.transitions import list_row
from fleetpulse.core.fold import CONFLICT_MS
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.rows import RANK, Kind, Trust

_BIRTH: Final = RANK[Kind.BIRTH]
_INVALID: Final = TRUSTS.index(Trust.INVALID)
_LATE: Final = TRUSTS.index(Trust.LATE)
_ON_TIME: Final = TRUSTS.index(Trust.ON_TIME)
_PROVISIONED: Final = MODES.index(Mode.PROVISIONED)
_UNREACHABLE: Final = MODES.index(Mode.UNREACHABLE)


@jit_no_refcount
def new_device(devices: Matrix, memory: Matrix, context: PackedContext, i: int, rows: Matrix, j: int) -> None:
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
def record_signal(devices: Matrix, context: PackedContext, out: Matrix, n_out: int, i: int, rows: Matrix, j: int) -> int:
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
            n_out = list_row(out, n_out, CLOCK_FAULT, i, j)
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
        n_out = list_row(out, n_out, IDENTITY_CONFLICT, i, j)
    devices[i, SPOKE_FROM], devices[i, MOVED] = current_site, at_ms
    devices[i, SPEAKS_FROM] = -1 if site == devices[i, SITE] else site
    return n_out


@jit_no_refcount
def is_of_its_session(devices: Matrix, i: int, rows: Matrix, j: int) -> bool:
    """Whether a will belongs to the device's session, or boot if a session is missing."""
    session, boot = rows[j, R_SESSION], rows[j, R_BOOT]
    if session != NONE and devices[i, SESSION] != NONE:
        return session == devices[i, SESSION]
    return boot < 0 or devices[i, BOOT] < 0 or boot == devices[i, BOOT]


@jit_no_refcount
def proves_alive(context: PackedContext, of_class: int, rows: Matrix, j: int) -> bool:
    """Whether a late signal proves that its device was alive when it was received."""
    rule = context.rules[policy_at(context, rows[j, R_AT]), of_class, LATE_PROVES]
    return rows[j, R_DIRECT] != 0 if rule == NONE else rule != 0


@jit_no_refcount
def is_copy(devices: Matrix, i: int, rows: Matrix, j: int) -> bool:
    """Whether a signal is a copy: its ``seq`` repeats that of the signal before.

    This applies only if the presence time of the signal is not its event time.
    """
    placeless = rows[j, R_TRUST] >= _INVALID or rows[j, R_OFFSET] != 0
    boot = rows[j, R_BOOT]
    return placeless and 0 <= rows[j, R_SEQ] == devices[i, SEQ] and (boot < 0 or boot == devices[i, BOOT])
