"""Lines of the embedded broker's log, and counts of failed logins and refused messages.

NATS answers each login at once and never locks out a client. Generated passwords have 192 random
bits, so they cannot be guessed; failures are only reported, and their rate is not limited.

Rule: clients choose user names and client ids. NATS quotes them in its log, and this module keeps the
quotes, so that a name cannot forge a line.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from fleetpulse.core.times import format_instant

STATUS: Final = "broker-log"  # name of the status file with the counts
_QUOTED: Final = rb'"((?:[^"\\]|\\.)*)"'
_CLIENT: Final = rb"\[\d+\] (?P<date>\d{4}/\d\d/\d\d \d\d:\d\d:\d\d)\.\d+ \[%b\] (?P<at>\S+):\d+ - [mc]id:\d+ - "
_FAILURE: Final = re.compile(
    _CLIENT % b"ERR"
    + rb"(?:"
    + _QUOTED
    + rb" - )?(?:(?P<login>authentication error)(?: - User (?P<user>"
    + _QUOTED
    + rb"))?|(?:Publish|Subscription) Violation - |(?P<qos2>QoS=2 is disabled|server does not accept QoS2))"
)
TAKEOVER: Final = re.compile(  # see `fleetpulse.io.mqtt.embedded.takeovers`
    _CLIENT % b"WRN"
    + rb'\S+ - Replacing old client "(?P<replaced>\S+):\d+ - mid:\d+ - \S+" since both have the same client ID "(?P<id>\S+)"'
)
_PIECE_BYTES: Final = 65_536
_READ_BYTES: Final = 4_194_304  # limit of one call; the next call reads the rest
_USERS: Final = 1_000  # users whose failures are counted separately
_SHOWN_USERS: Final = 5
_SHOWN_CHARS: Final = 64


@dataclass(slots=True)
class BrokerLog:
    """Reader of the broker's log; it counts failures since its creation.

    Attributes:
        path: path of the log.
        since_ms: time of the creation, epoch milliseconds.
        failed_logins: number of failed logins.
        refused: number of messages and subscriptions that the rights of their user do not permit.
        qos2: number of messages and wills of QoS 2, which the broker refuses.
    """

    path: Path
    since_ms: int
    failed_logins: int = 0
    refused: int = 0
    qos2: int = 0
    _newest: dict[str, Any] | None = None
    _users: Counter[str] = field(default_factory=Counter[str])
    _file: BinaryIO | None = None
    _rest: bytes = b""

    def __post_init__(self) -> None:
        """Skip the lines of earlier runs."""
        if self.path.exists():
            self._file = self.path.open("rb")
            self._file.seek(0, os.SEEK_END)

    def read(self, now_ms: int) -> bool:
        """Read the new lines, also those of a file that was rotated since the last call.

        If the broker rotates its log several times between two calls, the counts are too low.

        Args:
            now_ms: current instant, epoch milliseconds.

        Returns:
            Whether the counts changed.
        """
        before, left = (self.failed_logins, self.refused, self.qos2), _READ_BYTES
        while left > 0 and (piece := self._piece()):
            left -= len(piece)
            lines = (self._rest + piece).split(b"\n")
            self._rest = lines.pop()[-_PIECE_BYTES:]
            for line in lines:
                self._count(line, now_ms)
        return before != (self.failed_logins, self.refused, self.qos2)

    def _piece(self) -> bytes:
        piece = self._file.read(_PIECE_BYTES) if self._file else b""
        if piece:
            return piece
        try:
            if self._file and os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return b""
            fresh = self.path.open("rb")
        except OSError:
            return b""
        self.close()
        self._file, self._rest = fresh, b""
        return fresh.read(_PIECE_BYTES)

    def _count(self, line: bytes, now_ms: int) -> None:
        found = _FAILURE.match(line)
        if found is None:
            return
        if not found["login"]:
            self.qos2 += found["qos2"] is not None
            self.refused += found["qos2"] is None
            return
        self.failed_logins += 1
        user = (found["user"] or b'""').decode(errors="replace")[:_SHOWN_CHARS]
        if user in self._users or len(self._users) < _USERS:
            self._users[user] += 1
        self._newest = {"user": user, "from": found["at"].decode(errors="replace"), "at_ms": now_ms}

    def status(self) -> dict[str, Any]:
        """Return the counts as the content of a status file.

        ``users`` has the users with most failures, and ``newest`` the newest failed login; user
        names are quoted as in the log.
        """
        return {
            "since_ms": self.since_ms,
            "failed_logins": self.failed_logins,
            "refused": self.refused,
            "qos2": self.qos2,
            "users": dict(self._users.most_common(_SHOWN_USERS)),
            "newest": self._newest,
        }

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
            self._file = None


def refusals_of(status: Mapping[str, Any]) -> str:
    """Describe the counts of a `BrokerLog`; empty if they are 0.

    Args:
        status: content of the status file, see `BrokerLog.status`.
    """
    parts: list[str] = []
    if failed := status.get("failed_logins"):
        users = ", ".join(f"{count:,} as {user}" for user, count in status["users"].items())
        newest = status["newest"]
        logins = "login" if failed == 1 else "logins"
        parts.append(f"{failed:,} {logins} ({users}; the newest {format_instant(newest['at_ms'])} from {newest['from']})")
    if refused := status.get("refused"):
        requests = "message or subscription" if refused == 1 else "messages or subscriptions"
        parts.append(f"{refused:,} {requests} without the right to it")
    if qos2 := status.get("qos2"):
        parts.append(f"{qos2:,} {'message' if qos2 == 1 else 'messages'} of QoS 2: publish with QoS 1")
    return f"the broker refused {' and '.join(parts)} since {format_instant(status['since_ms'])}" if parts else ""
