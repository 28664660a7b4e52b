"""Answers of the API: JSON with a version, and files as CSV or NDJSON.

Rule 1: a failure before the first byte of a file is an error with its status. A later one ends the connection
before the end of the file, so that a client notices it. So does a client that reads for longer than `EXPORT_S`.
Rule 2: an answer from the facts in memory names their version. It has an ETag, unless it has other facts as well,
which can change within a version.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import BoundedSemaphore, Timer
from typing import TYPE_CHECKING, Any, Final

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.reports.history.feed import Cursor
from fleetpulse.reports.present.mirror import Reached
from fleetpulse.web.api.openapi import Endpoint, Operation, Parameter, Schema, obj, optional, text, whole
from fleetpulse.web.live import QUERY_S, LiveFleet, QueryTooLong
from fleetpulse.web.readings import one_a_core, sharing

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_EXPORTS: Final = 2  # files that are written at once: each holds its sorted rows in memory
EXPORT_S: Final = 600.0  # for all of a file: a client that stops to read holds its rows, and one of `MOST_EXPORTS`
_FETCHED: Final = 1_000  # rows that are read at a time for a file
_ATTEMPTS: Final = 3  # readings of facts that change in between
NDJSON, CSV = "application/x-ndjson", "text/csv"
MEDIA: Final = {"csv": CSV, "ndjson": NDJSON}
_exports = BoundedSemaphore(MOST_EXPORTS)

Answer = Callable[[LiveFleet, Request], dict[str, Any]]
Query = Callable[[Reached, Mapping[str, str]], tuple[str, list[Any]]]


def facts(answer: Answer, *, reads_tables: bool = False) -> Endpoint:
    """Return an endpoint that answers from the facts in memory, and with 304 if the client has the same facts.

    Args:
        answer: function that returns the answer.
        reads_tables: whether the function also reads tables; see `tables` for the limit.
    """

    async def endpoint(request: Request) -> Response:
        live: LiveFleet = request.app.state.live
        reached = await run_in_threadpool(live.reached)
        tag = _etag(live, reached)
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        read = partial(_consistent, live, _reading(answer, live, request, reads_tables=reads_tables))
        reached, tag, found = await (one_a_core(request, read) if reads_tables else run_in_threadpool(read))
        return JSONResponse(_versioned(reached, found), headers={"ETag": tag})

    return endpoint


def current(answer: Answer, *, reads_tables: bool = False) -> Endpoint:
    """Return an endpoint that answers from the facts in memory and from tables, without an ETag.

    Args:
        answer: function that returns the answer.
        reads_tables: whether each request reads tables, see `tables`.
    """

    async def endpoint(request: Request) -> Response:
        live: LiveFleet = request.app.state.live
        await run_in_threadpool(live.reached)
        read = partial(_consistent, live, _reading(answer, live, request, reads_tables=reads_tables))
        reached, _, found = await (one_a_core(request, read) if reads_tables else run_in_threadpool(read))
        return JSONResponse(_versioned(reached, found))

    return endpoint


def tables(answer: Answer) -> Endpoint:
    """Return an endpoint that answers from tables, without the facts in memory.

    Their number is limited, see `readings`.
    """

    async def endpoint(request: Request) -> Response:
        return JSONResponse(await one_a_core(request, _reading(answer, request.app.state.live, request, reads_tables=True)))

    return endpoint


def _reading(answer: Answer, live: LiveFleet, request: Request, *, reads_tables: bool) -> Callable[[], dict[str, Any]]:
    read = partial(answer, live, request)
    return sharing(read) if reads_tables else read


def versioned(properties: dict[str, Schema]) -> Schema:
    """Return the schema of an answer from the facts in memory."""
    return obj(
        {
            "version": text("version of the facts"),
            "frontier_ms": optional(whole("event time up to which the job has judged, epoch milliseconds")),
            "cursor": text("place in the feed of changes after these facts"),
            **properties,
        }
    )


def _versioned(reached: Reached, found: dict[str, Any]) -> dict[str, Any]:
    cursor = str(Cursor(reached.versions[JUDGEMENTS.name] + 1))
    return {"version": reached.tag, "frontier_ms": reached.frontier_ms, "cursor": cursor, **found}


def _etag(live: LiveFleet, reached: Reached) -> str:
    return f'"{reached.tag}-{live.mirror.loaded_ms:x}"'  # facts that are loaded again may have newer clocks in the same version


def _consistent(live: LiveFleet, answer: Callable[[], dict[str, Any]]) -> tuple[Reached, str, dict[str, Any]]:
    """Return an answer with the version and the ETag of its facts: read again if a refresh ended while it was read."""
    reached = live.mirror.reached
    tag, found = _etag(live, reached), answer()
    for _ in range(_ATTEMPTS - 1):
        is_replacing, newest = live.mirror.is_replacing, live.mirror.reached  # in the reverse order of a refresh
        if _etag(live, newest) == tag and not is_replacing:
            break
        reached, tag, found = newest, _etag(live, newest), answer()
    return reached, tag, found


def exported(
    live: LiveFleet,
    form: str,
    name: str,
    sql: str,
    values: Sequence[Any],
    opened: "Callable[[], DuckDBPyConnection] | None" = None,
) -> Response:
    """Return the rows of a query as a streamed file; reads the first rows, so call it in a thread.

    Args:
        live: facts in memory.
        form: csv or ndjson.
        name: name of the file without its ending.
        sql: query.
        values: its parameters.
        opened: function that opens the connection of the query; None for the facts in memory.

    Raises:
        QueryTooLong: the query takes too long, or too many files are being written.
    """
    if form not in MEDIA:
        return JSONResponse({"error": {"code": "not-found", "message": "the formats are csv and ndjson"}}, 404)
    rows = _Rows(opened or live.mirror.cursor, sql, values)
    lines = _csv_lines(rows) if form == "csv" else _json_lines(rows)
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}
    return _File(rows, lines, headers=headers, media_type=MEDIA[form] + ("; charset=utf-8" if form == "csv" else ""))


def export_operations(noun: str, query: Query, parameters: tuple[Parameter, ...], summary: str, notes: str) -> list[Operation]:
    """Return the operations that export the rows of a query, one for each of `MEDIA`.

    Args:
        noun: name of the rows, of the route and of the file.
        query: function that returns SQL and its parameters for a request.
        parameters: parameters of the request.
        summary: description in one sentence, without the format and the full stop.
        notes: further sentences.
    """

    def endpoint_of(form: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            live: LiveFleet = request.app.state.live
            reached = await run_in_threadpool(live.reached)
            sql, values = query(reached, request.query_params)
            return await run_in_threadpool(exported, live, form, noun, sql, values)

        return endpoint

    return [
        Operation(
            f"/{noun}.{form}", f"{noun}_{form}", f"{summary}, as {form.upper()}.", endpoint_of(form), None, parameters, media,
            notes=notes,
        )
        for form, media in MEDIA.items()
    ]  # fmt: skip


class _File(StreamingResponse):
    def __init__(self, rows: "_Rows", lines: Iterator[str], headers: dict[str, str], media_type: str) -> None:
        super().__init__(lines, headers=headers, media_type=media_type)
        self._rows = rows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "HEAD":
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": b""})
                return
            with anyio.fail_after(EXPORT_S):
                await super().__call__(scope, receive, send)
        finally:
            self._rows.close()


class _Rows:
    """Rows of a query, read in parts; the first part is read at once, with the limit of a query.

    Args:
        opened: function that opens the connection of the query.
        sql: query.
        values: its parameters.
    """

    def __init__(self, opened: "Callable[[], DuckDBPyConnection]", sql: str, values: Sequence[Any]) -> None:
        import duckdb

        if not _exports.acquire(blocking=False):
            raise QueryTooLong(f"the server writes {MOST_EXPORTS} other files; try again when they are complete", code="busy")
        try:
            self._cursor = opened()  # the client decides how quickly it reads, so it holds no core
        except BaseException:
            _exports.release()
            raise
        timer = Timer(QUERY_S, self._cursor.interrupt)
        timer.daemon = True
        try:
            timer.start()
            self._result = self._cursor.execute(sql, list(values))
            self.names = [column[0] for column in self._result.description]
            self._first = self._result.fetchmany(_FETCHED)
        except BaseException as error:
            self.close()
            if isinstance(error, duckdb.InterruptException):
                text_ = f"the query took longer than {QUERY_S:g} s and was interrupted; ask for less"
                raise QueryTooLong(text_, code="query-too-long") from None
            raise
        finally:
            timer.cancel()

    def parts(self) -> Iterator[list[Any]]:
        """Yield lists of rows."""
        rows = self._first
        while rows:
            yield rows
            rows = self._result.fetchmany(_FETCHED)

    def close(self) -> None:
        """End the query; may be called again."""
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            _exports.release()
            with suppress(Exception):  # a failed query
                cursor.close()


def _json_lines(rows: _Rows) -> Iterator[str]:
    for part in rows.parts():
        yield "".join(json.dumps(dict(zip(rows.names, row, strict=True)), ensure_ascii=False) + "\n" for row in part)


def _csv_lines(rows: _Rows) -> Iterator[str]:
    yield _as_csv([rows.names])
    for part in rows.parts():
        yield _as_csv(part)


def _as_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as CSV; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    held = io.StringIO()
    csv.writer(held).writerows([[_cell(value) for value in row] for row in rows])
    return held.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def unknown_parameters(request: Request, names: Sequence[str]) -> FleetError | None:
    """Return the fault of a request with a parameter that is unknown or given twice; None if there is none."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            known = ", ".join(names) or "none"
            return FleetError(f'unknown parameter "{name[:100]}"; the parameters are: {known}', code="parameter-invalid")
        if name in seen:
            return FleetError(
                f'parameter "{name}" is given twice; give several values as one, with commas', code="parameter-invalid"
            )
        seen.add(name)
    return None
