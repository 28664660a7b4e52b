"""Which rules a device is under, and were in force when, by what has landed."""

from fleetpulse.core.device import EvaluationContext
from fleetpulse.core.policy import Rules
from fleetpulse.core.registry.registry import class_at
from fleetpulse.core.replay import outcome
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query
from fleetpulse.reports import registry
from fleetpulse.reports.messages import ROW, as_row, span, through


def rules_at(home: Home, device_id: str, instant_ms: int) -> tuple[str, Rules] | None:
    """Return a device's class and the rules that are in force for it; None before anything has landed.

    Args:
        home: the home.
        device_id: the device; one that is not registered is of the default class.
        instant_ms: at which they are, epoch milliseconds.
    """
    known = world(home, None)
    if known is None:
        return None
    device_class = class_at(registry.entries(home, device_id), instant_ms)
    return device_class, known.policies.at(instant_ms).policy.of(device_class)


def world(home: Home, through_ms: int | None) -> EvaluationContext | None:
    """Return when we listened and all policies, those whose time is over as well, by the rows received up to an instant.

    None before the first row.

    Args:
        home: the home.
        through_ms: epoch milliseconds; None takes all that has landed.
    """
    listened = span(home)
    if listened is None:
        return None
    found = query(home, f"SELECT {ROW} FROM messages WHERE kind IN ('policy', 'gap')", tables=["messages"])
    judged = outcome(through([as_row(one) for one in found], listened, through_ms), home.deployment())
    return None if judged.shards is None else EvaluationContext(judged.shards, judged.policies)
