"""Limit of the requests that read tables: of the API, and of the pages.

Rule: at most as many of them read at once as there are cores. Others wait without a thread, at most `QUERY_S`; then
their answer is an error with the status 503.
"""

from collections.abc import Callable
from typing import TypeVar

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from fleetpulse.io.tables.tables import one_instance
from fleetpulse.web.live import QUERY_S, QueryTooLong

T = TypeVar("T")


async def one_a_core(request: Request, read: Callable[[], T]) -> T:
    """Run a function that reads tables in a thread, and return its result.

    Args:
        request: request that needs the result.
        read: function; see `sharing`.

    Raises:
        QueryTooLong: too many other requests read tables.
    """
    readings: anyio.CapacityLimiter = request.app.state.readings
    try:
        with anyio.fail_after(QUERY_S):
            await readings.acquire_on_behalf_of(request)
    except TimeoutError:
        raise QueryTooLong(
            f"too many requests read tables: the server is busy with others, and no core was free for {QUERY_S:g} s; try again",
            code="busy",
        ) from None
    try:
        return await run_in_threadpool(read)
    finally:
        readings.release_on_behalf_of(request)


def sharing(read: Callable[[], T]) -> Callable[[], T]:
    """Return a function whose readings share an instance and versions, see `one_instance`; its next call reads newer tables."""

    def shared() -> T:
        with one_instance():
            return read()

    return shared
