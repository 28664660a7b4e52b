"""Requests to the application of the HTTP server, without a network: a small ASGI client."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

from fleetpulse.io.home.home import Home
from fleetpulse.web.access import User, WebRole
from fleetpulse.web.app import create_app

VIEWER = User("viewer", WebRole.VIEWER)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the application.

    Attributes:
        status: status.
        headers: headers, with names in lower case.
        content: body.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """Body as text."""
        return self.content.decode()


class Client:
    """Client of an application.

    Args:
        app: application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    def get(self, address: str, **headers: str) -> Answer:
        """Send a GET request.

        Args:
            address: path and query, with the escapes of an address.
            headers: further headers; an underscore stands for a hyphen.
        """
        return asyncio.run(self._answer(address, headers))

    async def _answer(self, address: str, headers: Mapping[str, str]) -> Answer:
        raw, _, query = address.partition("#")[0].partition("?")
        sent = {"host": "localhost", "accept": "text/html", **{name.replace("_", "-"): text for name, text in headers.items()}}
        scope = {
            "type": "http", "method": "GET", "path": unquote(raw), "raw_path": raw.encode(), "query_string": query.encode(),
            "headers": [(name.encode(), text.encode()) for name, text in sent.items()], "root_path": "", "scheme": "http",
            "server": ("localhost", 80), "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        messages = list[dict[str, Any]]()
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not ended.is_set():
                ended.set()
                return {"type": "http.request", "body": b"", "more_body": False}
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        run: Callable[..., Awaitable[None]] = self.app
        await asyncio.wait_for(run(scope, receive, send), 60)
        body = b"".join(one.get("body", b"") for one in messages[1:])
        found = {name.decode().lower(): text.decode("latin-1") for name, text in messages[0]["headers"]}
        return Answer(messages[0]["status"], found, body)


@contextmanager
def served(home: Home, user: User | None = VIEWER) -> Iterator[Client]:
    """Start the application of a home; every request is of a user."""
    app = create_app(home, hosts=("localhost",), authenticate=lambda _request: user)
    app.state.live.start()
    try:
        yield Client(app)
    finally:
        app.state.live.stop()


@dataclass
class Page(HTMLParser):
    """Elements of a page.

    Attributes:
        elements: name and attributes of each element, in order.
        texts: texts outside of scripts.
    """

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list[tuple[str, dict[str, str | None]]])
    texts: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element."""
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        if data.strip():
            self.texts.append(data.strip())

    @classmethod
    def of(cls, text: str) -> "Page":
        """Parse a page."""
        page = cls()
        page.feed(text)
        return page

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Return the attributes of the elements with a name and some attributes."""
        return [found for name, found in self.elements if name == tag and attributes.items() <= found.items()]

    @property
    def links(self) -> list[str]:
        """Addresses of the links, and of files that the page loads."""
        found = [(one.get("href") or one.get("src") or one.get("hx-get"), name) for name, one in self.elements]
        return [address for address, name in found if address and not address.startswith("#") and name != "use"]
