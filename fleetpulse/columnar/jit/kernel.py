"""Compiled fold of a key group: signals, wills, gateway events and deadlines.

Rule 1: the results equal those of `core.fold`, which is the definition. The laws in
``tests/property`` compare them.
Rule 2: a device is a row of one matrix. A message, or a gateway event for one device, is a row of
another matrix, in judging order. Times are epoch milliseconds, words are numbers, and `NONE` is
null. Control, registry and correction rows are processed by `core.fold`.
Rule 3: the kernel stops between two rows when ``out`` is full. The next call resumes at that row.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleetpulse.columnar.jit.cache import jit_cached, jit_no_refcount
from fleetpulse.columnar.jit.context import (
    MODES,
    NEVER,
    NONE,
    QUARANTINES,
    TRIGGERS,
    Int64s,
    PackedContext,
    covered,
    policy_at,
)
from fleetpulse.columnar.jit.errors import count_error, count_event, is_event, is_session_over
from fleetpulse.columnar.jit.layout import (
    ABSENT,
    AFTER_DECOMMISSION,
    BOOT,
    CLASS,
    DEATH,
    DEATH_COVERED,
    FIRMWARE,
    GATEWAY,
    GATEWAY_DEATH,
    GATEWAY_RETURN,
    HEARD,
    MAX_OUT_ROWS_PER_ROW,
    MEMORY,
    MODE,
    OUTAGE,
    OUTAGE_COVERED,
    PROVED,
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
    ROW_FIELDS,
    SESSION,
    TRUSTS,
    UNKNOWN_DEVICE,
    VELOCITY_COUNT,
    VELOCITY_SINCE,
    Matrix,
)
from fleetpulse.columnar.jit.signals import is_copy, is_of_its_session, new_device, proves_alive, record_signal
from fleetpulse.columnar.jit.transitions import end_outage, expire, list_row, transition
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.rows import POSITION_BITS, RANK, Kind, Trust

_BIRTH: Final = RANK[Kind.BIRTH]
_DEATH: Final = RANK[Kind.DEATH]
_ERROR: Final = RANK[Kind.ERROR]
_LATE: Final = TRUSTS.index(Trust.LATE)
_DECOMMISSIONED: Final = MODES.index(Mode.DECOMMISSIONED)
_OFFLINE: Final = MODES.index(Mode.OFFLINE)
_GATEWAY_RETURN: Final = TRIGGERS.index(Trigger.GATEWAY_RETURN)
_SIGNAL: Final = TRIGGERS.index(Trigger.SIGNAL)
_UPDATED: Final = TRIGGERS.index(Trigger.UPDATED)


@jit_no_refcount
def _apply(devices: Matrix, memory: Matrix, context: PackedContext, out: Matrix, n_out: int, rows: Matrix, j: int) -> int:
    """Apply one signal or will; return the number of output rows."""
    i, at_ms, late = rows[j, R_DEVICE], rows[j, R_AT], rows[j, R_TRUST] == _LATE
    if rows[j, R_KIND] == _DEATH:
        alive = devices[i, MODE] != ABSENT and devices[i, MODE] != _DECOMMISSIONED
        if alive and devices[i, PROVED] < rows[j, R_ARRIVAL] and is_of_its_session(devices, i, rows, j):
            devices[i, DEATH], devices[i, DEATH_COVERED] = at_ms, covered(context, at_ms)
        return n_out
    absent = devices[i, MODE] == ABSENT
    if late and not proves_alive(context, 0 if absent else devices[i, CLASS], rows, j):
        return n_out
    if absent:
        if context.rules[policy_at(context, at_ms), 0, QUARANTINES]:
            return n_out if late else list_row(out, n_out, UNKNOWN_DEVICE, i, j)
        new_device(devices, memory, context, i, rows, j)
    if devices[i, MODE] == _DECOMMISSIONED:
        return n_out if late else list_row(out, n_out, AFTER_DECOMMISSION, i, j)
    copied, reboots, firmware = is_copy(devices, i, rows, j), devices[i, REBOOTS], devices[i, FIRMWARE]
    slot, session, boot = devices[i, MEMORY], devices[i, SESSION], devices[i, BOOT]
    counts = slot >= 0 and memory[slot, VELOCITY_COUNT] > 0
    is_over = counts and is_session_over(devices, context, i, at_ms)
    end_outage(devices, context, i, at_ms)
    n_out = record_signal(devices, context, out, n_out, i, rows, j)
    if counts and rows[j, R_KIND] == _BIRTH:
        is_over = is_over or (session != NONE and session != devices[i, SESSION]) or (boot >= 0 and boot != devices[i, BOOT])
    if is_over:
        memory[slot, VELOCITY_COUNT], memory[slot, VELOCITY_SINCE] = 0, NONE
    devices[i, DEATH] = devices[i, DEATH_COVERED] = NONE
    n_out = transition(devices, memory, context, out, n_out, i, _SIGNAL, at_ms, j)
    if devices[i, REBOOTS] > reboots or (firmware >= 0 and devices[i, FIRMWARE] != firmware):
        n_out = transition(devices, memory, context, out, n_out, i, _UPDATED, at_ms, j)
    if rows[j, R_KIND] == _ERROR and not (late or copied):
        n_out = count_error(devices, memory, context, out, n_out, i, rows, j)
    if not (late or copied) and is_event(devices, context, i, rows, j):
        n_out = count_event(devices, memory, context, out, n_out, i, rows, j)
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
        end_outage(devices, context, i, at_ms)
        return transition(devices, memory, context, out, n_out, i, _GATEWAY_RETURN, at_ms, -1)
    is_unaffected = mode in (_OFFLINE, _DECOMMISSIONED) or devices[i, OUTAGE] != NONE
    if not is_unaffected and devices[i, PROVED] < rows[j, R_ARRIVAL]:
        devices[i, OUTAGE], devices[i, OUTAGE_COVERED] = at_ms, covered(context, at_ms)
    return n_out


@jit_no_refcount
def _drop_settled_arrivals(devices: Matrix, i: int, least: int) -> None:
    """Forget arrival positions that no later row can precede, as `core.signals.drop_settled_arrivals`."""
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
        n_out, _ = expire(devices, memory, context, out, n_out, i, rows[j, R_AT])
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
        n_out, due_ms = expire(devices, memory, context, out, n_out, i, through_ms[i] + 1)
        if due_ms != NEVER:
            left_ms = min(left_ms, due_ms - through_ms[i])
        _drop_settled_arrivals(devices, i, least)
    return len(devices), n_out, left_ms
