"""Requests to an ASGI application in this process, with one event loop for all of them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

LIMIT_S = 60.0  # of one request


@dataclass
class Answer:
    """Answer to a request.

    Attributes:
        status: status code.
        headers: headers, by name in lower case.
        parts: parts of the body as sent.
        is_complete: whether the application sent the end of the body.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """Body as text."""
        return b"".join(self.parts).decode()

    def json(self) -> Any:
        """Parse the body."""
        return json.loads(self.text)

    def add(self, message: Message) -> None:
        """Add a message of the application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)


class Client:
    """Client of an application.

    Args:
        app: application.
        headers: headers of each request.
    """

    def __init__(self, app: ASGIApp, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._app, self._headers = app, {"host": "localhost", **headers}
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()

    def get(self, address: str, headers: Mapping[str, str] = MappingProxyType({}), method: str = "GET") -> Answer:
        """Send one request, and return its complete answer."""
        return self.run(self.send(address, headers, method=method))

    def run(self, work: Awaitable[Any]) -> Any:
        """Run a coroutine in the event loop, with a limit."""

        async def limited() -> Any:
            return await asyncio.wait_for(work, LIMIT_S)

        return self._runner.run(limited())

    async def send(
        self,
        address: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        method: str = "GET",
        on_part: Callable[[Answer], bool] = lambda _: True,
    ) -> Answer:
        """Send one request.

        Args:
            address: percent-encoded path and query.
            headers: further headers.
            method: method.
            on_part: function that is called after each part of the body; the client closes the connection if it
                returns False.
        """
        raw_path, _, query = address.partition("?")
        closed, answer = asyncio.Event(), Answer()
        sent = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await closed.wait()
            return {"type": "http.disconnect"}

        async def collect(message: Message) -> None:
            answer.add(message)
            if message["type"] == "http.response.body" and not on_part(answer):
                closed.set()

        await self._app(_scope(raw_path, query, {**self._headers, **headers}, method), receive, collect)
        return answer


def _scope(raw_path: str, query: str, headers: Mapping[str, str], method: str) -> Scope:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": unquote(raw_path), "raw_path": raw_path.encode(), "query_string": query.encode(),
        "root_path": "", "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "server": ("localhost", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip
