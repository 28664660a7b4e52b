"""Server-sent events: the feed of changes, pushed to browsers and programs.

Rule 1: a stream holds no thread while it waits. It looks for new commits each second, and reads them in a thread.
Rule 2: the number of streams is bounded. A stream ends when its client closes the connection, and when the server
stops, and within `HEARTBEAT_S` after its token was revoked or its session has expired.
Rule 3: the id of an event is the cursor after it, so a client that connects again receives each row once.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.reports.history.feed import NEWEST, Changes, changes_after, parse_cursor
from fleetpulse.web.live import LiveFleet, QueryTooLong

EVENTS: Final = "text/event-stream"
MOST_STREAMS: Final = 20
HEARTBEAT_S: Final = 15.0
_POLL_S: Final = 1.0
_RETRY_MS: Final = 3_000  # pause of a client before it connects again
_ROWS: Final = 500  # rows that are read at a time


class Streams:
    """Open streams of a server."""

    def __init__(self) -> None:
        self.open = 0
        self._end: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def enter(self) -> None:
        """Count a new stream; call it in the event loop.

        Raises:
            QueryTooLong: there are too many streams.
        """
        if self.open >= MOST_STREAMS:
            raise QueryTooLong(
                f"the server has {MOST_STREAMS} streams of events, the maximum; read the feed instead: /transitions/feed",
                code="busy",
            )
        if self._end is None:
            self._end = asyncio.get_running_loop(), asyncio.Event()
        self.open += 1

    def leave(self) -> None:
        """Count the end of a stream."""
        self.open -= 1

    def close(self) -> None:
        """End all streams, since the server ends; call it in any thread."""
        if self._end is not None:
            loop, event = self._end
            with suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(event.set)

    async def is_closing(self, limit_s: float) -> bool:
        """Wait for the end of the server; return whether it ends.

        Args:
            limit_s: limit of the wait, seconds.
        """
        assert self._end is not None, "a stream has entered"
        with anyio.move_on_after(limit_s):
            await self._end[1].wait()
        return self._end[1].is_set()


async def stream_changes(request: Request) -> Response:
    """Answer with the feed of changes as events."""
    live: LiveFleet = request.app.state.live
    streams: Streams = request.app.state.streams
    log = DeltaLog(live.home.table(JUDGEMENTS.name))
    after = request.headers.get("last-event-id") or request.query_params.get("after") or NEWEST
    cursor = await run_in_threadpool(parse_cursor, after, log)
    first = await run_in_threadpool(changes_after, log, cursor, _ROWS)
    if request.method == "HEAD":
        return Response(media_type=EVENTS)
    streams.enter()
    return _EventStream(streams, log, first, request.scope["user_now"])


async def _events(streams: Streams, log: DeltaLog, first: Changes, user_now: Callable[[], object]) -> AsyncIterator[str]:
    """Yield the events of a feed until the server ends, or there is no user any more."""
    yield f"retry: {_RETRY_MS}\n\n"
    found, sent_s = first, time.monotonic()
    admitted_s = sent_s
    while True:
        if time.monotonic() - admitted_s >= HEARTBEAT_S:
            if await run_in_threadpool(user_now) is None:
                yield _error("not-authenticated", "the token was revoked, or the session has expired; log in again")
                return
            admitted_s = time.monotonic()
        if found.rows:
            yield "".join(_event(row["kind"], row["cursor"], json.dumps(row)) for row in found.rows)
            sent_s = time.monotonic()
        if found.at_end:
            if await streams.is_closing(_POLL_S):
                return
            if time.monotonic() - sent_s >= HEARTBEAT_S:
                yield f": heartbeat\nid: {found.following}\n\n"  # an id without data is remembered by the client
                sent_s = time.monotonic()
            if log.latest() < found.following.version:
                found = replace(found, rows=[])
                continue
        try:
            found = await run_in_threadpool(changes_after, log, found.following, _ROWS)
        except FleetError as error:
            yield _error(error.code, str(error))
            return


def _event(kind: str, cursor: str, data: str) -> str:
    return f"id: {cursor}\nevent: {kind}\ndata: {data}\n\n"


def _error(code: str, text: str) -> str:
    return f"event: error\ndata: {json.dumps({'code': code, 'message': text})}\n\n"


class _EventStream(Response):
    media_type = EVENTS

    def __init__(self, streams: Streams, log: DeltaLog, first: Changes, user_now: Callable[[], object]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._streams, self._log, self._first, self._user_now = streams, log, first, user_now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client closes the connection, or the server ends."""
        del scope
        try:
            async with anyio.create_task_group() as group:

                async def await_end() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(await_end)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for text in _events(self._streams, self._log, self._first, self._user_now):
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                group.cancel_scope.cancel()
        finally:
            self._streams.leave()
