"""Requests to the embedded broker at its NATS port, which listens on the loopback only.

Only fleetpulse itself may log in there, see `acl`.
"""

import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from fleetpulse.io.mqtt.address import BrokerAddress

INBOX: Final = "$FLEET"  # first token of the subjects of answers; MQTT filters such as "+/#" do not match a "$"
_ANSWER_S: Final = 10.0
_CROWDED: Final = 0.5
_PAGE: Final = 500  # connections in an answer
_BATCH: Final = 1_000  # messages of one request
_CONSUMER: Final = {"ack_policy": "none", "deliver_policy": "all", "headers_only": True, "mem_storage": True}
_UNUSED_NS: Final = 60_000_000_000  # time after which the server removes a consumer that nobody uses


class StreamUse(NamedTuple):
    """Use of a stream, or of a part of it.

    Attributes:
        size_bytes: size of its messages.
        messages: number of its messages.
        most_bytes: limit of the size; 0 or less for no limit.
        most_messages: limit of the number; 0 or less for no limit.
    """

    size_bytes: int
    messages: int
    most_bytes: int = 0
    most_messages: int = 0

    @property
    def share(self) -> float:
        """Used share of the limit of size or of number, whichever is greater."""
        limited = (self.size_bytes, self.most_bytes), (self.messages, self.most_messages)
        return max(used / most if most > 0 else 0.0 for used, most in limited)

    @property
    def is_crowded(self) -> bool:
        """Whether the stream is more than half full."""
        return self.share > _CROWDED


class BrokerApi:
    """Connection to the server at its NATS port.

    Args:
        connection: connection that is logged in.
        lines: reader of the bytes that the connection receives.
        inbox: subject of answers, to which the connection has subscribed.
    """

    def __init__(self, connection: socket.socket, lines: BinaryIO, inbox: str) -> None:
        self._connection, self._lines, self._inbox = connection, lines, inbox

    def __call__(self, subject: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request; return the content of the answer.

        Raises:
            OSError: the server does not answer.
            ValueError: it refused the request.
        """
        self._send(subject, self._inbox, content)
        return json.loads(self._next()[2])

    def tell(self, subject: str, content: Mapping[str, Any]) -> None:
        """Publish a message to which the server sends no answer."""
        self._send(subject, "", content)

    def use_of(self, stream: str) -> StreamUse:
        """Return the sizes and limits of a stream; zeros if the stream does not exist."""
        known = self(f"$JS.API.STREAM.INFO.{stream}", {})
        if "error" in known:
            return StreamUse(0, 0)
        state, config = known["state"], known["config"]
        return StreamUse(int(state["bytes"]), int(state["messages"]), int(config["max_bytes"]), int(config["max_msgs"]))

    def connections(self, subject: str = "$SYS.REQ.ACCOUNT.PING.CONNZ") -> Iterator[dict[str, Any]]:
        """Yield all connections, oldest first.

        Args:
            subject: subject of the request; the default lists the connections of the user's account.
        """
        offset, total = 0, 1
        while offset < total:
            page = self(subject, {"limit": _PAGE, "offset": offset, "auth": True})["data"]
            yield from page.get("connections") or ()
            offset, total = offset + _PAGE, int(page["total"])

    @contextmanager
    def headers(self, stream: str) -> Iterator[Iterator[tuple[str, int, dict[str, str]]]]:
        """Read subject, number and headers of the messages of a stream, oldest first.

        The context yields an iterator, which need not be read to its end. Do not send requests in the context.
        """
        config = {**_CONSUMER, "inactive_threshold": _UNUSED_NS}
        made = self(f"$JS.API.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
        if error := made.get("error"):
            raise ValueError(f"{stream}: {error['description']}")
        name = made["name"]
        try:
            yield chain.from_iterable(iter(partial(self._batch, stream, name), []))
        finally:
            self(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", {})

    def _batch(self, stream: str, name: str) -> list[tuple[str, int, dict[str, str]]]:
        self._send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", self._inbox, {"batch": _BATCH, "no_wait": True})
        found = list[tuple[str, int, dict[str, str]]]()
        while len(found) < _BATCH:
            words, headers, _ = self._next()
            if len(words) == 3 or not words[2].startswith("$JS.ACK."):  # a status message: the stream has no more
                break
            place = words[2].split(".")
            found.append((words[0], int(place[place.index(stream) + 3]), headers))
        return found

    def _send(self, subject: str, inbox: str, content: Mapping[str, Any]) -> None:
        body = json.dumps(dict(content))
        self._connection.sendall(f"PUB {subject} {inbox} {len(body)}\r\n{body}\r\n".encode())

    def _next(self) -> tuple[list[str], dict[str, str], bytes]:
        """Return the next message: words of its first line (subject, subscription, answer subject, size), headers, body."""
        for line in self._lines:
            verb, *words = line.decode(errors="replace").split()
            if verb in ("MSG", "HMSG"):
                received = self._lines.read(int(words[-1]) + 2)[:-2]
                of_headers = int(words.pop(-2)) if verb == "HMSG" else 0
                return words, _headers(received[:of_headers]), received[of_headers:]
            if verb == "PING":
                self._connection.sendall(b"PONG\r\n")
            elif verb == "-ERR":
                raise ValueError(line.decode(errors="replace").strip())
        raise ValueError("the connection was closed")


def _headers(lines: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines.decode(errors="replace").split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in pairs}


@contextmanager
def broker_api(folder: Path, pid: int, address: BrokerAddress) -> Iterator[BrokerApi]:
    """Connect to a running broker, and yield the connection.

    Args:
        folder: folder of the broker.
        pid: process id of the server.
        address: address with the broker's own user and password.

    Raises:
        OSError: the server cannot be reached, or does not answer.
        ValueError: it refused the login or a request.
    """
    with socket.create_connection(_local(folder, pid), timeout=_ANSWER_S) as connection, connection.makefile("rb") as lines:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message without an answer delays no request
        login = {"verbose": False, "user": address.username, "pass": address.password, "lang": "fleetpulse", "version": "1"}
        inbox = f"{INBOX}.{secrets.token_hex(8)}"
        connection.sendall(f"CONNECT {json.dumps({**login, 'headers': True})}\r\nSUB {inbox} 1\r\n".encode())
        yield BrokerApi(connection, lines, inbox)


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
