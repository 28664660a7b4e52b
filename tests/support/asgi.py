"""Requests to an ASGI application in this process, without a server. Paths are sent as they are written."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

LIMIT_S = 60.0  # of one request
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass
class Answer:
    """Answer to a request.

    Attributes:
        address: requested address.
        status: status code.
        headers: headers, by name in lower case.
        parts: parts of the body as sent.
        is_complete: whether the application sent the end of the body.
    """

    address: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    parts: list[bytes] = field(default_factory=list[bytes])
    is_complete: bool = False

    @property
    def content(self) -> bytes:
        """Body."""
        return b"".join(self.parts)

    @property
    def text(self) -> str:
        """Body as text."""
        return self.content.decode()

    def json(self) -> Any:
        """Parse the body."""
        return json.loads(self.content)

    @property
    def code(self) -> str:
        """Code of the error in JSON."""
        return self.json()["error"]["code"]

    def add(self, message: Message) -> None:
        """Add a message of the application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class Client:
    """Client of an application; each request has an event loop of its own.

    Args:
        app: application.
        headers: headers of each request.
        root_path: path below which a server or another application mounts it.
        scheme: http or https.
    """

    def __init__(self, app: ASGIApp, headers: Mapping[str, str] = NO_HEADERS, root_path: str = "", scheme: str = "http") -> None:
        self.app, self._headers = app, {"host": "localhost", **_named(headers)}
        self._root, self._scheme = root_path, scheme

    def get(self, address: str, headers: Mapping[str, str] = NO_HEADERS, method: str = "GET", body: bytes = b"") -> Answer:
        """Send one request, and return its complete answer; an error of the application is raised."""
        return self.run(self.send(address, headers, method=method, body=body))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, with a limit."""
        return asyncio.run(asyncio.wait_for(work, LIMIT_S))

    async def send(
        self,
        address: str,
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        method: str = "GET",
        body: bytes = b"",
        on_part: Callable[[Answer], bool] = lambda _: True,
    ) -> Answer:
        """Send one request.

        Args:
            address: percent-encoded path and query.
            headers: further headers.
            method: method.
            body: body.
            on_part: function that is called after each part of the body; the client closes the connection if it
                returns False.
        """
        closed, answer = asyncio.Event(), Answer(address)
        sent = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await closed.wait()
            return {"type": "http.disconnect"}

        async def collect(message: Message) -> None:
            answer.add(message)
            if message["type"] == "http.response.body" and not on_part(answer):
                closed.set()

        await self.app(self._scope(address, {**self._headers, **_named(headers)}, method), receive, collect)
        return answer

    def _scope(self, address: str, headers: Mapping[str, str], method: str) -> Scope:
        raw_path, _, query = address.partition("#")[0].partition("?")
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "scheme": self._scheme, "path": self._root + unquote(raw_path), "raw_path": (self._root + raw_path).encode(),
            "root_path": self._root, "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": ("localhost", 80), "client": ("127.0.0.1", 1),
        }  # fmt: skip


class LastingClient(Client):
    """Client with one event loop for all requests; `close` ends it."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(app, headers)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, with a limit."""
        return self._runner.run(asyncio.wait_for(work, LIMIT_S))
