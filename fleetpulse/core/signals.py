"""Facts of a device and one of its rows: whether a signal proves life, is a copy, or belongs to the session of a device.

The functions emit no judgements. `core.fold` documents the order in which it uses them.
"""

from dataclasses import replace

from fleetpulse.core.device import Device
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.messages.text import as_text
from fleetpulse.core.policy import Rules
from fleetpulse.core.presence.presence_time import FAULTS
from fleetpulse.core.rows import POSITION_BITS, Kind, Row, Trust, session_number


def as_error(row: Row) -> Row:
    """Return a control row with the operation `OP_ERROR` as the error that it counts: with its code."""
    return replace(row, code=as_text(row.contents().get("code")))


def proves_alive(row: Row, rules: Rules) -> bool:
    """Whether a late signal proves that its device was alive when it was received."""
    return row.is_direct if rules.late_proves_alive is None else rules.late_proves_alive


def voids(row: Row, death_ms: int) -> bool:
    """Whether a signal that is judged after a will voids it.

    With one shard every such signal does, since it was received after the will.

    Args:
        row: a signal.
        death_ms: ``received_at`` of the will, epoch milliseconds.
    """
    sent_ms = row.received_at_ms if row.trust is not Trust.ON_TIME else min(row.event_time_ms or 0, row.received_at_ms)
    return row.received_at_ms >= death_ms and (row.is_direct or row.kind is Kind.BIRTH or sent_ms > death_ms)


def is_behind(device: Device, gateway: str | None) -> bool:
    """Whether a device is behind a gateway, and is not the gateway itself."""
    return gateway == device.gateway != device.device_id


def was_heard_after(device: Device, row: Row) -> bool:
    """Whether a signal received after a will proves that the device is alive."""
    return device.proved_arrival is not None and device.proved_arrival >= row.arrival


def is_of_its_session(device: Device, row: Row) -> bool:
    """Whether a will belongs to the session of a device.

    If either of them names no session, the boot decides.
    """
    if row.session is not None and device.session is not None:
        return session_number(row.session) == device.session
    return row.boot is None or device.boot is None or row.boot == device.boot


def is_copy(device: Device, row: Row) -> bool:
    """Whether a signal repeats the counter of the signal before it.

    Only signals whose presence time is not their event time are checked: `replay.judging_order` finds
    other copies.
    """
    placeless = row.trust in FAULTS or row.at_ms != row.event_time_ms
    return placeless and row.seq is not None and row.seq == device.seq and row.boot in (None, device.boot)


def is_session_over(device: Device, rules: Rules, at_ms: int) -> bool:
    """Whether a signal at an instant is in another session than the signal before it, or the velocity rule is off."""
    is_idle = at_ms - device.quiet_since_ms > rules.session_idle_ms
    return rules.velocity_events is None or device.mode is Mode.OFFLINE or is_idle


def is_another(before: tuple[int | None, str | None], after: tuple[int | None, str | None]) -> bool:
    """Whether a signal names another session or boot than was known before."""
    return any(one is not None and one != other for one, other in zip(before, after, strict=True))


def end_session(device: Device) -> None:
    """Count the events of the velocity rule anew."""
    device.velocity_count, device.velocity_since_ms = 0, None


def drop_settled_arrivals(device: Device, frontier_ms: int) -> None:
    """Clear the positions of a device in arrival order that lie at or before the frontier.

    Every row that is judged later was received after the frontier.
    """
    least = (frontier_ms + 1) << POSITION_BITS
    for name in ("heard_arrival", "proved_arrival"):
        value = getattr(device, name)
        if value is not None and value < least:
            setattr(device, name, None)


def advance_sequence(device: Device, rules: Rules, code: str, at_ms: int) -> bool:
    """Advance the flagged sequence by one error code.

    The latest start of each prefix is kept.

    Returns:
        Whether the code completes the sequence.
    """
    steps = rules.flagged_codes
    progress: list[int | None] = [None] * (len(steps) - 1)
    if device.progress_of == steps and device.progress:
        progress = list(device.progress)
    complete = False
    for step in reversed(range(len(steps))):
        if steps[step] != code:
            continue
        start = at_ms if step == 0 else progress[step - 1]
        if start is None or at_ms - start > rules.flagged_window_ms:
            continue
        if step == len(steps) - 1:
            complete = True
        else:
            progress[step] = start
    started = any(start is not None for start in progress)
    device.progress, device.progress_of = (tuple(progress), steps) if started else ((), ())
    return complete
