"""Policy rules in force for a device at an instant, from the landed rows."""

from fleetpulse.core.device import EvaluationContext
from fleetpulse.core.policy import Policy, Rules
from fleetpulse.core.registry.registry import class_at
from fleetpulse.core.replay import outcome
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query
from fleetpulse.reports import registry
from fleetpulse.reports.messages import ROW, as_row, span, through


def rules_at(home: Home, device_id: str, instant_ms: int) -> tuple[str, Rules] | None:
    """Return a device's class and its rules in force; None before any row has landed.

    Args:
        home: home to read.
        device_id: id of the device; an unregistered device has the default class.
        instant_ms: instant at which the rules are in force, epoch milliseconds.
    """
    known = evaluation_context(home, None)
    return None if known is None else rules_in(home, known.policies.at(instant_ms).policy, device_id, instant_ms)


def rules_in(home: Home, policy: Policy, device_id: str, instant_ms: int) -> tuple[str, Rules]:
    """Return a device's class at an instant, and the rules that a policy has for it."""
    device_class = class_at(registry.entries(home, device_id), instant_ms)
    return device_class, policy.of(device_class)


def evaluation_context(home: Home, through_ms: int | None) -> EvaluationContext | None:
    """Return coverage and all policies, by the rows received up to an instant.

    Policies that are no longer in force are included. None before the first row.

    Args:
        home: home to read.
        through_ms: ``received_at`` of the last rows to read, epoch milliseconds; None reads all.
    """
    listened = span(home)
    if listened is None:
        return None
    found = query(home, f"SELECT {ROW} FROM messages WHERE kind IN ('policy', 'gap')", tables=["messages"])
    judged = outcome(through([as_row(one) for one in found], listened, through_ms), home.deployment())
    return None if judged.shards is None else EvaluationContext(judged.shards, judged.policies)
