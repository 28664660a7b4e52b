"""Requests to the embedded broker at its NATS port, which listens on the loopback only.

Only fleetpulse itself may log in there, see `acl`.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from fleetpulse.io.mqtt.address import BrokerAddress

INBOX: Final = "$FLEET"  # first word of subjects of answers; MQTT filters such as "+/#" do not match a "$"
_ANSWER_S: Final = 10.0
Ask = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""Function from a subject and the content of a request to the content of the answer."""


@contextmanager
def broker_api(folder: Path, pid: int, address: BrokerAddress) -> Iterator[Ask]:
    """Connect to a running broker, and yield a function that sends it requests.

    Args:
        folder: folder of the broker.
        pid: process id of the server.
        address: address with the broker's own user and password.

    Raises:
        OSError: the server cannot be reached, or does not answer.
        ValueError: it refused the login or a request.
    """
    with socket.create_connection(_local(folder, pid), timeout=_ANSWER_S) as connection, connection.makefile("rb") as lines:
        login = {"verbose": False, "user": address.username, "pass": address.password, "lang": "fleetpulse", "version": "1"}
        inbox = f"{INBOX}.{secrets.token_hex(8)}".encode()
        connection.sendall(b"CONNECT %b\r\nSUB %b 1\r\n" % (json.dumps(login).encode(), inbox))
        yield lambda subject, content: _asked(connection, lines, inbox, subject, content)


def _local(folder: Path, pid: int) -> tuple[str, int]:
    """Return host and port of the server's own protocol, which listens on the loopback only."""
    path, deadline_s = folder / f"nats-server_{pid}.ports", time.monotonic() + _ANSWER_S
    while True:
        try:
            host, _, port = json.loads(path.read_text())["nats"][0].removeprefix("nats://").rpartition(":")
            return host, int(port)
        except (OSError, ValueError):  # not written to its end yet
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _asked(connection: socket.socket, lines: BinaryIO, inbox: bytes, subject: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of the server to a request."""
    body = json.dumps(dict(content)).encode()
    connection.sendall(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), inbox, len(body), body))
    for line in lines:
        if line.startswith(b"MSG "):
            return json.loads(lines.read(int(line.rsplit(b" ", 1)[1])))
        if line.startswith(b"PING"):
            connection.sendall(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            raise ValueError(line.decode(errors="replace").strip())
    raise ValueError("the connection was closed")
