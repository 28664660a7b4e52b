"""Routes of the read-only API below ``/api/v1``, which answer in JSON, NDJSON or CSV.

Rule 1: a report computes no verdict; the routes return rows of `fleetpulse.reports` and of the facts in memory.
Rule 2: instants are epoch milliseconds, named ``<name>_ms``. Only answers that equal the output of a command with
``--json`` have instants as text.
Rule 3: each route is declared by an `Operation` in a module of its subject, with its parameters; a request with
another parameter is refused.
"""

from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from fleetpulse.web.api import changes, devices, fleet, messages, modes, records, rollouts, streams
from fleetpulse.web.api.answers import exported, unknown_parameters
from fleetpulse.web.api.openapi import PREFIX, Endpoint, Operation, any_object, document

__all__ = ["PREFIX", "exported", "operations", "routes"]


async def _openapi(request: Request) -> Response:
    return JSONResponse(document(operations(), request.app.state.access.cookie))


_DOCUMENT: Final = Operation("/openapi.json", "openapi", "Return this document.", _openapi, any_object("document of OpenAPI 3.1"))


def operations() -> Sequence[Operation]:
    """Return the declarations of all routes."""
    return (
        *fleet.OPERATIONS,
        *modes.OPERATIONS,
        *messages.OPERATIONS,
        *streams.OPERATIONS,
        *rollouts.OPERATIONS,
        *devices.OPERATIONS,
        *changes.OPERATIONS,
        *records.OPERATIONS,
        _DOCUMENT,
    )


def routes() -> list[Route]:
    """Return the routes."""
    return [
        _DeviceRoute(one.path, _checked(one)) if "{" in one.path else Route(PREFIX + one.path, _checked(one))
        for one in operations()
    ]


def _checked(one: Operation) -> Endpoint:
    """Return the endpoint of an operation, which refuses unknown parameters."""
    names = [parameter.name for parameter in one.parameters if parameter.place == "query"]

    async def endpoint(request: Request) -> Response:
        fault = unknown_parameters(request, names)
        if fault is not None:
            raise fault
        return await one.endpoint(request)

    return endpoint


class _DeviceRoute(Route):
    """Route with the id of a device, which may have a slash.

    The path after the id is compared as sent: the device ``a/why`` is ``a%2Fwhy``, and ``a/why`` is the
    explanation of the device ``a``.

    Args:
        path: path of an operation.
        endpoint: function that answers a request.
    """

    def __init__(self, path: str, endpoint: Endpoint) -> None:
        super().__init__(PREFIX + path.replace("{device_id}", "{device_id:path}"), endpoint)
        self._ending = path.rpartition("}")[2].encode()

    def matches(self, scope: Scope) -> tuple[Match, Any]:
        """Return whether a request matches, with its path parameters."""
        if scope["type"] == "http" and not scope.get("raw_path", scope["path"].encode()).endswith(self._ending):
            return Match.NONE, {}
        return super().matches(scope)
