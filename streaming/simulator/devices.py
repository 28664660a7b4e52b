"""Simulated devices that take commands: settings, and firmware, good and bad.

Rule 1: no clock and no socket; the same seed, commands and instants give the same answers and messages.
Rule 2: a command that a device has answered gets the same answer again, without a further effect.
Rule 3: a version of firmware with `BAD` in its name is bad: some devices are silent after the update, the others send
errors. A silent device still takes firmware, as a boot loader would, and no other command.
"""

import heapq
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, cast

from fleetpulse.core.rows import SIGNALS, Kind
from fleetpulse.core.streams.commands import ACCEPTED, FIRMWARE, REJECTED, SET, merged
from streaming.simulator.scenario import Scenario, Sent, command_topics

BAD: Final = "bad"
ERROR_CODE: Final = "firmware"  # of the errors that bad firmware sends
_DELAY_MS: Final = (200, 2_000)  # from a command to its answer
_REMEMBERED: Final = 16  # answered commands of a device
_SIGNALS: Final = frozenset(kind.value for kind in SIGNALS)


@dataclass(slots=True)
class _Taken:
    """Effects of commands on a device."""

    firmware: str | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    answers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # by id of the command


class SimulatedDevices:
    """State of the devices of a scenario that have taken commands.

    Args:
        scenario: scenario of the devices.
        before: state that `to_plain` returned.

    Attributes:
        changes: number of commands that had an effect.
    """

    def __init__(self, scenario: Scenario, before: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.changes = 0
        self._seed, self._topics = scenario.seed, command_topics(scenario)
        self._devices = {device: _Taken(**taken) for device, taken in (before or {}).items()}
        self._due: list[tuple[int, int, str, dict[str, Any]]] = []  # instant, number, topic of the command, command
        self._number = 0

    def to_plain(self) -> dict[str, Any]:
        """Return the state for JSON."""
        return {
            device: {"firmware": one.firmware, "settings": one.settings, "answers": one.answers}
            for device, one in self._devices.items()
        }

    def receive(self, topic: str, payload: bytes, now_ms: int) -> None:
        """Take a message on a command topic; its device answers after a short delay."""
        if topic not in self._topics:
            return
        try:
            command: Any = json.loads(payload)
        except ValueError:
            return
        if not isinstance(command, dict) or not isinstance(cast("dict[str, Any]", command).get("id"), str):
            return
        command = cast("dict[str, Any]", command)
        delay_ms = Random(f"{self._seed}:{topic}:{command['id']}").randint(*_DELAY_MS)
        self._number += 1
        heapq.heappush(self._due, (now_ms + delay_ms, self._number, topic, command))

    def due(self, now_ms: int) -> Iterator[Sent]:
        """Yield the answers that are due, and let their commands take effect."""
        while self._due and self._due[0][0] <= now_ms:
            at_ms, _, topic, command = heapq.heappop(self._due)
            _, site, device, _ = topic.split("/")
            answer = self._answer(device, command)
            if answer is not None:
                payload = json.dumps({"ts": at_ms, "id": command["id"], **answer}, separators=(",", ":")).encode()
                yield Sent(at_ms, f"fleet/{site}/{device}/{Kind.ACK}", payload)

    def _answer(self, device: str, command: Mapping[str, Any]) -> dict[str, Any] | None:
        taken, name = self._devices.setdefault(device, _Taken()), command.get("name")
        if name != FIRMWARE and self.is_silent(device):
            return None
        if (known := taken.answers.get(command["id"])) is not None:
            return known
        payload: Any = command.get("payload")
        payload = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
        version = payload.get("version")
        if name == SET:
            taken.settings = merged(taken.settings, payload)
            answer: dict[str, Any] = {"status": ACCEPTED, "reported": payload}
        elif name == FIRMWARE and isinstance(version, str) and version:
            taken.firmware = version
            answer = {"status": ACCEPTED, "reported": {FIRMWARE: version}}
        elif name == FIRMWARE:
            answer = {"status": REJECTED, "reason": "version must be a text"}
        else:
            answer = {"status": REJECTED, "reason": f"unknown command; expected {SET} or {FIRMWARE}"}
        taken.answers[command["id"]] = answer
        while len(taken.answers) > _REMEMBERED:
            del taken.answers[next(iter(taken.answers))]
        self.changes += 1
        return answer

    def is_silent(self, device: str) -> bool:
        """Return whether bad firmware keeps a device from sending."""
        return self._is_bad(device) and self._draw(device) < 0.5

    def _is_bad(self, device: str) -> bool:
        taken = self._devices.get(device)
        return taken is not None and taken.firmware is not None and BAD in taken.firmware

    def _draw(self, device: str) -> float:
        return Random(f"{self._seed}:{device}:{self._devices[device].firmware}").random()

    def adapted(self, sent: Sent) -> Sent | None:
        """Return a message as its device sends it with its firmware; None if the device is silent."""
        levels = sent.topic.split("/")
        taken = self._devices.get(levels[2]) if len(levels) == 4 else None
        if taken is None or taken.firmware is None or levels[3] not in _SIGNALS:
            return sent
        if self.is_silent(levels[2]):
            return None
        try:
            content: Any = json.loads(sent.payload)
        except ValueError:
            return sent
        if not isinstance(content, dict):
            return sent
        changed = {**cast("dict[str, Any]", content), "firmware": taken.firmware}
        if self._is_bad(levels[2]):
            levels[3], changed["code"] = Kind.ERROR.value, ERROR_CODE
        return Sent(sent.received_at_ms, "/".join(levels), json.dumps(changed, separators=(",", ":")).encode())
