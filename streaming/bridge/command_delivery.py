"""Delivery of commands to devices, at least once, after their rows are durable in a segment.

`command_reader.Spool` moves the file of a command here when its segment is durable. The bridge publishes the
commands with QoS 1, and removes the file when the broker has confirmed all of them.

Rule 1: a command is published again after a crash, a lost connection, or a missing confirmation. Devices recognise
it by its id.
Rule 2: files are delivered one after the other. A file whose commands the broker does not confirm is set aside until
the next connection, so that it does not delay others. (The embedded broker never confirms a topic with a space.)
Rule 3: a command is published on ``fleet/<site>/<device_id>/command`` and not retained: a device that is away gets it
if the broker keeps its session.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import structlog

from fleetpulse.core.streams.commands import delivery
from fleetpulse.io.mqtt.subscriber import AckToken

_LOG: Final = structlog.get_logger("bridge")
MOST_OPEN: Final = 1_000  # published commands that the broker has not confirmed yet
UNCONFIRMED_S: Final = 30.0
_SENT: Final = re.compile(r"(\d{1,18})-")  # time at which a command was spooled, in the name of its file


@runtime_checkable
class CommandChannel(Protocol):
    """Connection on which commands are published, see `Receiver`."""

    connections: int

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection."""
        ...

    def send(self, topic: str, payload: bytes) -> AckToken | None:
        """Publish with QoS 1; return a token, or None if it was not sent."""
        ...

    def confirmed(self) -> Collection[AckToken]:
        """Return the tokens that the broker has confirmed since the last call."""
        ...


class CommandDelivery:
    """Delivery of the command files in a folder.

    Args:
        folder: folder of the files; it may be absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: tuple[int, int] | None = None
        self._file: Path | None = None
        self._commands: list[tuple[str, bytes]] = []
        self._next = 0  # index of the next command to publish
        self._open: set[AckToken] = set()
        self._changed_s = 0.0
        self._set_aside: set[str] = set()
        self._may_have_files = True

    def added(self) -> None:
        """Notice that a file was added to the folder."""
        self._may_have_files = True

    def step(self, channel: CommandChannel, now_s: float) -> None:
        """Publish waiting commands, and remove the file whose commands are all confirmed.

        Args:
            channel: connection to the broker.
            now_s: a monotonic time, seconds.
        """
        if not channel.connected:
            return
        if self._connection != (connection := (id(channel), channel.connections)):
            self._connection, self._file, self._may_have_files = connection, None, True
            self._set_aside.clear()
        if confirmed := self._open.intersection(channel.confirmed()):
            self._open -= confirmed
            self._changed_s = now_s
        if self._file is None and self._may_have_files:
            self._take_next(now_s)
        if self._file is not None:
            self._publish(self._file, channel, now_s)

    def _take_next(self, now_s: float) -> None:
        waiting = sorted(path for path in self._folder.glob("*.json") if path.name not in self._set_aside)
        self._may_have_files = bool(waiting)
        if waiting:
            self._file, self._next, self._open, self._changed_s = waiting[0], 0, set(), now_s
            try:
                self._commands = _commands_in(waiting[0])
            except (OSError, ValueError, LookupError, TypeError) as error:
                self._put_aside(waiting[0], f"the file cannot be read: {error}")

    def _publish(self, file: Path, channel: CommandChannel, now_s: float) -> None:
        while self._next < len(self._commands) and len(self._open) < MOST_OPEN:
            token = channel.send(*self._commands[self._next])
            if token is None:
                break
            self._open.add(token)
            self._next, self._changed_s = self._next + 1, now_s
        if self._next == len(self._commands) and not self._open:
            self._file = None
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                self._put_aside(file, f"the file cannot be removed: {error.strerror}")
        elif now_s - self._changed_s > UNCONFIRMED_S:
            self._put_aside(file, "the broker does not confirm them")

    def _put_aside(self, file: Path, why: str) -> None:
        _LOG.error("commands are set aside; they are sent again at the next connection", file=file.name, why=why)
        self._set_aside.add(file.name)
        self._file = None


def _commands_in(file: Path) -> list[tuple[str, bytes]]:
    """Return topic and payload of the commands to devices in a file, which the spool has checked."""
    content: Any = json.loads(file.read_bytes())
    sent = _SENT.match(file.name)
    sent_at_ms = int(sent[1]) if sent else round(file.stat().st_mtime * 1000)
    items: list[Any] = content if isinstance(content, list) else [content]
    found = (delivery(item["topic"], item["payload"], sent_at_ms) for item in items)
    return [one for one in found if one is not None]
