"""Requests to an ASGI application in this process, without a server and without a client library."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the application; names of headers are in lower case."""

    status_code: int
    headers: Mapping[str, str]
    text: str


class AsgiClient:
    """Client of an application.

    Args:
        app: application.
        root_path: path below which a server or another application mounts it.
    """

    def __init__(self, app: Any, root_path: str = "") -> None:
        self._app, self._root = app, root_path

    def get(self, address: str, headers: Mapping[str, str] = NO_HEADERS, method: str = "GET", body: bytes = b"") -> Answer:
        """Return the answer to a request, whose path is passed on as it is written."""
        return asyncio.run(self._ask(address, headers, method, body))

    async def _ask(self, address: str, headers: Mapping[str, str], method: str, body: bytes) -> Answer:
        path, _, query = address.partition("?")
        sent: list[Any] = []
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": self._root + unquote(path),
            "raw_path": (self._root + path).encode(),
            "root_path": self._root,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in {"host": "testserver", **headers}.items()],
            "client": ("127.0.0.1", 50_000),
            "server": ("testserver", 80),
        }

        requested, answered = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if requested:
                return requested.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                answered.set()

        await asyncio.wait_for(self._app(scope, receive, send), 60)
        names = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], names, b"".join(one.get("body", b"") for one in sent[1:]).decode())
