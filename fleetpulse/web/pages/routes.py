"""Routes of the operations page: HTML that the server renders, which works without JavaScript.

Rule 1: a page computes no verdict; it shows rows of `fleetpulse.reports` and of the facts in memory.
Rule 2: every filter, order and range is in the address.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages import devices, fleet, operations, past, streams
from fleetpulse.web.pages.rendering import STATIC, page, static_file


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route(f"{STATIC}{{digest:str}}/{{name:path}}", static_file),
        Route("/", page("fleet.html", fleet.fleet)),
        Route("/devices", page("devices.html", devices.devices)),
        Route("/devices/{rest:path}", devices.device),
        Route("/changes", page("changes.html", fleet.changes)),
        Route("/changes.{form:str}", fleet.export_changes),
        Route("/past", page("past.html", past.fleet, reads_tables=True)),
        Route("/fragments/freshness", page("freshness.html", _nothing)),
        Route("/help", page("help.html", _nothing)),
        *operations.routes(),
        *streams.routes(),
    ]


def _nothing(_live: LiveFleet, _request: Request) -> Mapping[str, Any]:
    return {}
