"""Next deadline of a device, from the definition."""

from collections.abc import Iterable
from typing import Any

from fleetpulse.core.deadlines import next_due
from fleetpulse.core.device import EvaluationContext
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.replay import EMPTY_OUTCOME, Outcome, outcome
from fleetpulse.core.rows import Row
from fleetpulse.io.home.home import Home

LEADS_TO = {Trigger.SILENCE: Mode.OFFLINE, Trigger.DEATH: Mode.OFFLINE, Trigger.GATEWAY_DEATH: Mode.UNREACHABLE}
_MODES = {**LEADS_TO, Trigger.FORGET: Mode.FORGOTTEN}


def upcoming(home: Home, rows: Iterable[Row], device_id: str, initial: Outcome = EMPTY_OUTCOME) -> dict[str, Any] | None:
    """Return the next deadline of a device; None if it has none.

    Args:
        home: home with the settings of the installation.
        rows: rows of the device, and rows that concern all devices.
        device_id: id of the device.
        initial: outcome of the rows before them.

    Returns:
        ``at_ms``, ``trigger``, and ``mode``: the mode to which it leads; None if that depends on the facts
        about the device.
    """
    found = due_of(outcome(rows, home.deployment(), initial=initial), device_id)
    return None if found is None else {"at_ms": found[0], "trigger": found[1], "mode": _MODES.get(found[1])}


def due_of(judged: Outcome, device_id: str) -> tuple[int, Trigger] | None:
    """Return instant and trigger of the next deadline of a device; None if there is none."""
    device = judged.devices.get(device_id)
    if device is None or judged.shards is None:
        return None
    return next_due(device, EvaluationContext(judged.shards, judged.policies))
