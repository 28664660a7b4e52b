"""Delivery of commands to devices, at least once, after their rows are durable in a segment.

`command_reader.Spool` moves the file of a command here when its segment is durable. The bridge publishes the
commands with QoS 1, and removes the file when the broker has confirmed all of them.

Rule 1: a command is published again after a crash, a lost connection, or a missing confirmation. Devices recognise
it by its id.
Rule 2: files are delivered one after the other. A file whose commands the broker does not confirm is set aside, so
that it does not delay others: until the next connection, or for a pause that grows each time. (The embedded broker
never confirms a topic with a space.)
Rule 3: a command is published on ``fleet/<site>/<device_id>/command`` and not retained: a device that is away gets it
if the broker keeps its session.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import structlog

from fleetpulse.core.streams.commands import delivery
from fleetpulse.io.mqtt.subscriber import AckToken

_LOG: Final = structlog.get_logger("bridge")
MOST_OPEN: Final = 1_000  # published commands that the broker has not confirmed yet
UNCONFIRMED_S: Final = 30.0
FIRST_PAUSE_S: Final = 60.0  # of a file that was set aside
LONGEST_PAUSE_S: Final = 3_600.0
_SENT: Final = re.compile(r"(\d{1,18})-")  # time at which a command was spooled, in the name of its file


_Command = tuple[str, bytes]  # topic and payload


class _SetAside(NamedTuple):
    """File whose delivery is tried again at ``due_s``, after a pause, with its unconfirmed commands."""

    due_s: float
    pause_s: float
    commands: list[_Command]  # empty: the file is read again


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
        self._commands: list[_Command] = []
        self._next = 0  # index of the next command to publish
        self._open: dict[AckToken, _Command] = {}
        self._changed_s = 0.0
        self._set_aside: dict[str, _SetAside] = {}  # by file name
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
        for token in channel.confirmed():
            if self._open.pop(token, None) is not None:
                self._changed_s = now_s
        if self._file is None and (self._may_have_files or any(one.due_s <= now_s for one in self._set_aside.values())):
            self._take_next(now_s)
        if self._file is not None:
            self._publish(self._file, channel, now_s)

    def _take_next(self, now_s: float) -> None:
        files = {path.name: path for path in self._folder.glob("*.json")}
        self._set_aside = {name: one for name, one in self._set_aside.items() if name in files}
        fresh = sorted(files.keys() - self._set_aside.keys())
        again = sorted(name for name, one in self._set_aside.items() if one.due_s <= now_s)
        self._may_have_files = bool(fresh)
        if not fresh and not again:
            return
        name = (fresh or again)[0]
        self._file, self._next, self._open, self._changed_s = files[name], 0, {}, now_s
        try:
            self._commands = (self._set_aside[name].commands if name in self._set_aside else []) or _commands_in(files[name])
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._commands = []
            self._put_aside(files[name], now_s, f"the file cannot be read: {error}")

    def _publish(self, file: Path, channel: CommandChannel, now_s: float) -> None:
        while self._next < len(self._commands) and len(self._open) < MOST_OPEN:
            command = self._commands[self._next]
            token = channel.send(*command)
            if token is None:
                break
            self._open[token] = command
            self._next, self._changed_s = self._next + 1, now_s
        if self._next == len(self._commands) and not self._open:
            self._file = None
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                self._put_aside(file, now_s, f"the file cannot be removed: {error.strerror}")
        elif now_s - self._changed_s > UNCONFIRMED_S:
            self._put_aside(file, now_s, "the broker does not confirm them")

    def _put_aside(self, file: Path, now_s: float, why: str) -> None:
        before_s = self._set_aside[file.name].pause_s if file.name in self._set_aside else 0.0
        pause_s = min(max(2 * before_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        left = [*self._open.values(), *self._commands[self._next :]]
        _LOG.error("commands are set aside; they are sent again later", file=file.name, why=why, pause_s=pause_s)
        self._set_aside[file.name] = _SetAside(now_s + pause_s, pause_s, left)
        self._file = None


def _commands_in(file: Path) -> list[_Command]:
    """Return topic and payload of the commands to devices in a file, which the spool has checked."""
    content: Any = json.loads(file.read_bytes())
    sent = _SENT.match(file.name)
    sent_at_ms = int(sent[1]) if sent else round(file.stat().st_mtime * 1000)
    items: list[Any] = content if isinstance(content, list) else [content]
    found = (delivery(item["topic"], item["payload"], sent_at_ms) for item in items)
    return [one for one in found if one is not None]
