"""Requests to an ASGI application in this process, without a server."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import httpx
from starlette.types import ASGIApp


def get(app: ASGIApp, path: str, headers: Mapping[str, str] = MappingProxyType({}), method: str = "GET") -> httpx.Response:
    """Send one request, and return its answer; errors of the application are answers with status 500."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=dict(headers))

    return asyncio.run(send())
