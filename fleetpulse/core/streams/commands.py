"""Commands to devices, their answers, and the twin of a device: its desired and its reported state.

Rule 1: a command has an id that its sender chooses. It may reach the device several times, so a device must treat
a second command with the same id as the first. Two rows with one device and one id are one command: the first one counts.
Rule 2: the first answer to a command, in the order of receipt, counts. Further answers are listed.
Rule 3: an answer counts if it was received within the timeout: that of the command, and at most that of the home. An answer
without such a command is *unmatched*.
Rule 4: no verdict depends on a command. An answer is a signal, since it proves its device alive.
Rule 5: states are merged as in RFC 7396: objects key by key, and null removes a key.
"""

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, cast

COMMAND_FIELDS: Final = ("id", "name", "payload", "timeout_ms")  # of the control row of a command, beside ``op``
LEAST_TIMEOUT_MS: Final = 1_000
COMMAND: Final = "command"  # ``op`` of the control row of a command, and last level of the topic that delivers it
ACCEPTED: Final = "accepted"  # status of an answer
REJECTED: Final = "rejected"  # status of an answer
ANSWERS: Final = (ACCEPTED, REJECTED)
SET: Final = "set"  # name of a command whose payload changes the desired state
FIRMWARE: Final = "firmware"  # name of a command whose payload has the desired ``version``; key of it in a state


class CommandStatus(StrEnum):
    """State of a command, or of an answer without a command."""

    PENDING = "pending"  # sent, and not answered yet
    ACKNOWLEDGED = "acknowledged"  # the device accepted it
    REJECTED = "rejected"  # the device refused it
    TIMED_OUT = "timed_out"  # not answered within the timeout
    UNMATCHED = "unmatched"  # an answer without a command, or after the timeout


FINAL: Final = (CommandStatus.ACKNOWLEDGED, CommandStatus.REJECTED, CommandStatus.TIMED_OUT)


def is_control(topic: str) -> bool:
    """Return whether a topic is the control topic of a device: ``fleet/<site>/<device_id>/control``."""
    levels = topic.split("/")
    return len(levels) == 4 and levels[0] == "fleet" and levels[3] == "control"


def is_for_device(topic: str) -> bool:
    """Return whether a topic delivers commands to a device: ``fleet/<site>/<device_id>/command``."""
    levels = topic.split("/")
    return len(levels) == 4 and levels[0] == "fleet" and levels[3] == COMMAND


def delivery(control_topic: str, content: Mapping[str, Any], sent_at_ms: int) -> tuple[str, bytes] | None:
    """Return topic and payload that deliver a command to its device; None if a row is no command to a device.

    Args:
        control_topic: topic of the control row.
        content: content of the control row.
        sent_at_ms: time at which the command was sent, epoch milliseconds.
    """
    if content.get("op") != COMMAND or not is_control(control_topic):
        return None
    content = {name: content.get(name) for name in ("id", "name", "payload")}
    payload = json.dumps({**content, "payload": content["payload"] or {}, "sent_at": sent_at_ms}, separators=(",", ":"))
    return f"{control_topic.rpartition('/')[0]}/{COMMAND}", payload.encode()


def merged(state: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state after a change, see rule 5."""
    result = dict(state)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            inner = cast("dict[str, Any]", before) if isinstance(before, dict) else {}
            result[key] = merged(inner, cast("dict[str, Any]", value))
        else:
            result[key] = value
    return result


def desired_state(commands: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the desired state of a device.

    Args:
        commands: name and payload of the commands to the device, in the order of sending.
    """
    state: dict[str, Any] = {}
    for name, payload in commands:
        if name == SET:
            state = merged(state, payload)
        elif name == FIRMWARE and "version" in payload:
            state = merged(state, {FIRMWARE: payload["version"]})
    return state


def difference(desired: Mapping[str, Any], reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the desired state that the reported state does not have."""
    missing: dict[str, Any] = {}
    for key, value in desired.items():
        other = reported.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if inner := difference(cast("dict[str, Any]", value), cast("dict[str, Any]", other)):
                missing[key] = inner
        elif value != other or key not in reported:
            missing[key] = value
    return missing
