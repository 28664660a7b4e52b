"""Deadlines of one device: the instants at which it changes without a row.

Rule: deadlines are not stored, since a signal, a coverage gap or a policy moves them. They are derived from
state, coverage and policies each time. `columnar.jit.deadlines` is the compiled form.
"""

from collections.abc import Callable, Iterator

from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.lifecycle import HELD, PRESENT, Mode, Trigger
from fleetpulse.core.policy import Rules


def next_due(device: Device, context: EvaluationContext) -> tuple[int, Trigger] | None:
    """Return the earliest deadline of a device and its trigger; None if there is none.

    At the same instant, a deadline of silence comes before one of facts.
    """
    due = [item for item in _deadlines(device, context) if item is not None]
    return min(due, key=lambda item: item[0]) if due else None


def _deadlines(device: Device, context: EvaluationContext) -> Iterator[tuple[int, Trigger] | None]:
    """Yield deadlines in the order in which they fire at the same instant."""
    held = device.held_until_ms if device.mode in HELD else None
    least_ms = device.mode_since_ms if held is None else held
    if device.mode in PRESENT or device.mode in HELD or device.mode in (Mode.PROVISIONED, Mode.UNREACHABLE):
        if device.outage_ms is None:
            yield _at(_silent(device, context, least_ms, lambda rules: rules.timeout_ms), Trigger.SILENCE)
        else:
            yield _at(_cut_off(device, context, least_ms, lambda rules: rules.gateway_outage_limit_ms), Trigger.SILENCE)
        if device.mode is not Mode.PROVISIONED:
            yield _at(_dead(device, context, least_ms), Trigger.DEATH)
        if device.mode in PRESENT:
            yield _at(_cut_off(device, context, least_ms, lambda rules: rules.death_grace_ms), Trigger.GATEWAY_DEATH)
    if held is not None:
        yield held, Trigger.UNTIL
    if device.degraded_until_ms is not None:
        yield device.degraded_until_ms, Trigger.RECOVERED
    if device.flagged_until_ms is not None and device.confirmed_ms is None:
        yield device.flagged_until_ms, Trigger.HOLD_OVER
        if device.review_ms is not None:
            yield _at(_idle(device, context), Trigger.SESSION_OVER)
    if device.mode is Mode.OFFLINE:
        yield _at(_silent(device, context, least_ms, lambda rules: rules.forget_after_ms), Trigger.FORGET)
    if device.mode is Mode.DECOMMISSIONED:
        yield _at(_out_of_service(device, context), Trigger.FORGET)


def _at(due_ms: int | None, trigger: Trigger) -> tuple[int, Trigger] | None:
    return None if due_ms is None else (due_ms, trigger)


def _silent(device: Device, context: EvaluationContext, least_ms: int, limit: Callable[[Rules], int]) -> int | None:
    """Return the instant at which the silence of a device reaches a limit."""
    quiet_ms = device.quiet_covered_ms + device.excused_ms
    return _reached(
        device,
        context,
        max(least_ms, device.quiet_since_ms),
        lambda rules: context.coverage(device).earliest(quiet_ms + limit(rules)),
    )


def _dead(device: Device, context: EvaluationContext, least_ms: int) -> int | None:
    """Return the instant at which the grace period after the will ends."""
    if device.death_ms is None or device.death_covered_ms is None:
        return None
    dead_ms = device.death_covered_ms
    return _reached(
        device,
        context,
        max(least_ms, device.death_ms),
        lambda rules: context.coverage(device).earliest(dead_ms + rules.death_grace_ms),
    )


def _cut_off(device: Device, context: EvaluationContext, least_ms: int, limit: Callable[[Rules], int]) -> int | None:
    """Return the instant at which the outage of a device's gateway reaches a limit."""
    if device.outage_ms is None or device.outage_covered_ms is None:
        return None
    dead_ms = device.outage_covered_ms
    return _reached(
        device, context, max(least_ms, device.outage_ms), lambda rules: context.coverage(device).earliest(dead_ms + limit(rules))
    )


def _out_of_service(device: Device, context: EvaluationContext) -> int | None:
    """Return the instant at which a decommissioned device is forgotten, by event time."""
    return _reached(device, context, device.mode_since_ms, lambda rules: device.mode_since_ms + rules.forget_after_ms)


def _idle(device: Device, context: EvaluationContext) -> int | None:
    """Return the instant at which the session of a device ends by idleness, by event time."""
    last_ms = device.quiet_since_ms
    return _reached(device, context, last_ms, lambda rules: last_ms + rules.session_idle_ms)


def _reached(device: Device, context: EvaluationContext, least_ms: int, due: Callable[[Rules], int | None]) -> int | None:
    """Return the first instant at which a limit of the rules in force is reached.

    Args:
        device: a device.
        context: coverage and policies.
        least_ms: earliest instant to return, epoch milliseconds. Policies whose span ended before
            are not evaluated: they may have been dropped.
        due: function from rules to the instant at which their limit is reached, or to None.
    """
    least_ms = max(least_ms, device.class_since_ms)
    for dated, since_ms, end_ms in context.policies.spans(least_ms):
        due_ms = due(device.rules(dated.policy))
        if due_ms is not None:
            due_ms = max(due_ms, since_ms, least_ms)
            if end_ms is None or due_ms < end_ms:
                return due_ms
    return None
