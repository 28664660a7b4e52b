"""Twin of a device: desired state, reported state, and their difference.

Rule 1: commands give the desired state, answers the reported one, see `core.streams.commands`.
Rule 2: the reported firmware is that of the newest message that names one.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.core.rows import SIGNALS, hash64
from fleetpulse.core.streams.commands import FIRMWARE, CommandStatus, desired_state, difference, merged
from fleetpulse.core.tables import MESSAGES, literals
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query
from fleetpulse.reports.streams.commands import commands, reported

NEWEST: Final = 5  # number of commands that a twin lists beside the pending ones


@dataclass(frozen=True, slots=True)
class Twin:
    """Twin of a device.

    Attributes:
        device_id: id of the device.
        desired: state that the commands ask for.
        reported: state that the device reported.
        difference: part of ``desired`` that ``reported`` does not have.
        metrics: metrics of the newest message with metrics.
        commands: pending commands and the newest ones, oldest first, see `commands`.
    """

    device_id: str
    desired: dict[str, Any]
    reported: dict[str, Any]
    difference: dict[str, Any]
    metrics: dict[str, Any]
    commands: list[dict[str, Any]]


def twin(home: Home, device_id: str) -> Twin:
    """Return the twin of a device; its states are empty if it has neither commands nor messages."""
    sent = [row for row in commands(home, device_id) if row["sent_at"] is not None]
    desired = desired_state((row["name"], row["payload"] or {}) for row in sent)
    state: dict[str, Any] = {}
    for change in reported(home, device_id):
        state = merged(state, change)
    firmware, metrics = _newest(home, device_id)
    if firmware is not None:
        state[FIRMWARE] = firmware
    shown = [row for place, row in enumerate(sent, NEWEST - len(sent)) if place >= 0 or row["status"] == CommandStatus.PENDING]
    return Twin(device_id, desired, state, difference(desired, state), metrics, shown)


def _newest(home: Home, device_id: str) -> tuple[str | None, dict[str, Any]]:
    """Return the newest firmware and metrics in the messages of a device."""
    newest = "arg_max({0}, (received_at, coalesce(position, 0))) FILTER ({0} IS NOT NULL) AS {0}"
    sql = f"""SELECT {newest.format("firmware")}, {newest.format("metrics")} FROM messages
        WHERE device_hash = {hash64(device_id)} AND device_id = ? AND kind IN ({literals(SIGNALS)})"""
    found = query(home, sql, [device_id], tables=[MESSAGES.name])[0]
    return found["firmware"], json.loads(found["metrics"] or "{}")
