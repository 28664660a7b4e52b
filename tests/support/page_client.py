"""Application of the HTTP server for tests of pages, and the elements of a page."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser

from fleetpulse.io.home.home import Home
from fleetpulse.web.access import User, WebRole
from fleetpulse.web.app import create_app
from tests.support.asgi import Client

VIEWER = User("viewer", WebRole.VIEWER)
BROWSER = {"accept": "text/html"}


@contextmanager
def served(home: Home, user: User | None = VIEWER) -> Iterator[Client]:
    """Start the application of a home; every request is of a user."""
    app = create_app(home, hosts=("localhost",), authenticate=lambda _request: user)
    app.state.live.start()
    try:
        yield Client(app, BROWSER)
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
