"""Commands of programs: messages on control topics, which the bridge passes to the spool of commands.

Rule 1: only an operator of the broker may publish on a control topic, see `io.mqtt.acl`. A valid command takes the way of
those of the command line: a file of the spool, a row of bronze, the delivery.
Rule 2: a message is acknowledged when its file is durable. Until then the broker delivers it again, after a lost
connection or a crash. A command that is in the spool twice has the same id twice, so it is one command.
Rule 3: a message that is no valid command is a row like any other, and landing quarantines it with the reason.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fleetpulse.io.mqtt.subscriber import AckToken, Arrived
from fleetpulse.io.system.fsync import atomic_write


class _Waiting(NamedTuple):
    topic: str
    content: Mapping[str, Any]
    size_bytes: int  # of the payload
    token: AckToken | None


class ProgramCommands:
    """Commands that have arrived and are not in the spool yet.

    Attributes:
        size_bytes: size of their topics and payloads.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Arrived, content: Mapping[str, Any]) -> None:
        """Take a message on a control topic, with the command that it contains."""
        self._waiting.append(_Waiting(message.topic, content, len(message.payload), message.token))
        self.size_bytes += len(message.topic) + len(message.payload)

    def lost(self) -> list[tuple[str, int]]:
        """Drop the commands that the broker delivers again after a lost connection; return topics and sizes of payloads."""
        dropped = [one for one in self._waiting if one.token is not None]
        self._waiting = [one for one in self._waiting if one.token is None]
        self.size_bytes -= sum(len(one.topic) + one.size_bytes for one in dropped)
        return [(one.topic, one.size_bytes) for one in dropped]

    def save(self, spool: Path, now_ms: int) -> list[AckToken]:
        """Write the waiting commands to a file of the spool; return the tokens to acknowledge.

        Args:
            spool: folder of the spool.
            now_ms: time at which they are sent, epoch milliseconds.

        Raises:
            OSError: the disk refuses the file; the commands are still waiting.
        """
        if not self._waiting:
            return []
        name = f"{now_ms}-{secrets.token_hex(4)}.json"
        commands = [{"topic": one.topic, "payload": one.content} for one in self._waiting]
        atomic_write(spool / name, json.dumps(commands), temporary=spool / f".{name}.new")
        tokens = [one.token for one in self._waiting if one.token is not None]
        self._waiting, self.size_bytes = [], 0
        return tokens
