"""Application of the HTTP server over a home of a test, with its client."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.web.access import User, WebRole
from fleetpulse.web.api.routes import PREFIX
from fleetpulse.web.app import create_app
from tests.support.asgi import Answer, LastingClient

READER = User("test", WebRole.API_READER)


class Api:
    """Application over a home.

    Args:
        home: home to serve.
    """

    def __init__(self, home: Home) -> None:
        self.app = create_app(home, hosts=("localhost",), authenticate=lambda _: READER)
        self.live = self.app.state.live
        self.client = LastingClient(self.app)
        self.live.start()

    def get(self, address: str, headers: Mapping[str, str] = MappingProxyType({}), method: str = "GET") -> Answer:
        """Request an address below `PREFIX`."""
        return self.client.get(PREFIX + address, headers, method)

    def rows(self, address: str) -> Any:
        """Request an address, and return the content of the answer, which must have succeeded."""
        answer = self.get(address)
        assert answer.status == 200, answer.text
        return answer.json()

    def refresh(self) -> None:
        """Fold new rows into the facts in memory."""
        self.live.reached()
        self.live.mirror.refresh(wall_clock_ms())

    def close(self) -> None:
        """Stop the application."""
        self.live.stop()
        self.client.close()
