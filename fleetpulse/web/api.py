"""Routes of the read-only API below ``/api/v1``, which answer in JSON, NDJSON or CSV.

Rule 1: a report computes no verdict; the routes return rows of `fleetpulse.reports` and of the facts in memory.
Rule 2: instants are epoch milliseconds, named ``<name>_ms``. An answer names the version of the facts, ``version``.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fleetpulse.web import queries
from fleetpulse.web.live import LiveFleet

PREFIX: Final = "/api/v1"
_FETCHED: Final = 1_000  # rows that are read at a time for an export
_FACETS: Final = 20
_NDJSON, _CSV = "application/x-ndjson", "text/csv; charset=utf-8"


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route(f"{PREFIX}/fleet", _json(fleet)),
        Route(f"{PREFIX}/devices", _json(devices)),
        Route(f"{PREFIX}/devices.{{form:str}}", export_devices),
    ]


def _json(answer: Callable[[LiveFleet, Request], dict[str, Any]]) -> Callable[[Request], Any]:
    """Return a route that answers with a dictionary, and with 304 if the client has the same version."""

    async def route(request: Request) -> Response:
        live: LiveFleet = request.app.state.live
        reached = await run_in_threadpool(live.reached)
        tag = f'"{reached.tag}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        found = await run_in_threadpool(answer, live, request)
        return JSONResponse({"version": reached.tag, "frontier_ms": reached.frontier_ms, **found}, headers={"ETag": tag})

    return route


def fleet(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Count devices by mode, and by mode of each site and class."""
    del request
    with live.reading() as cursor:
        modes = cursor.execute(
            "SELECT mode, count(*) AS n FROM live.devices WHERE mode != 'unjudged' GROUP BY mode ORDER BY n DESC, mode"
        ).fetchall()
        never_seen = cursor.execute("SELECT count(*) FROM live.devices WHERE never_seen").fetchall()[0][0]
    return {"devices": dict(modes), "never_seen": never_seen}


def devices(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Return a page of devices that match, with their number and the values of the facets."""
    wanted = queries.device_filter(request.query_params)
    rows = live.query(*queries.devices_sql(wanted))
    [count] = live.query(*queries.count_sql(wanted.where))
    facets = {name: live.query(*queries.facet_sql(wanted.where, name, _FACETS)) for name in queries.FACETS}
    following = queries.cursor_of(rows[-1], wanted) if len(rows) == wanted.limit else None
    return {"devices": [queries.shown_device(row) for row in rows], "count": count["n"], "next": following, "facets": facets}


async def export_devices(request: Request) -> Response:
    """Return all devices that match, as CSV or NDJSON."""
    live: LiveFleet = request.app.state.live
    wanted = queries.device_filter(request.query_params)
    await run_in_threadpool(live.reached)
    form = request.path_params["form"]
    sql, values = queries.devices_sql(wanted, paged=False)
    return exported(live, form, "devices", sql, values)


def exported(live: LiveFleet, form: str, name: str, sql: str, values: Sequence[Any]) -> Response:
    """Return the rows of a query as a streamed file."""
    if form not in ("csv", "ndjson"):
        return JSONResponse({"error": {"code": "not-found", "message": "the formats are csv and ndjson"}}, 404)
    write = _csv_lines if form == "csv" else _json_lines
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}
    return StreamingResponse(partial(write, live, sql, values)(), media_type=_CSV if form == "csv" else _NDJSON, headers=headers)


def _json_lines(live: LiveFleet, sql: str, values: Sequence[Any]) -> Iterator[str]:
    names, pages = _pages(live, sql, values)
    for rows in pages:
        yield "".join(json.dumps(dict(zip(names, row, strict=True)), default=str) + "\n" for row in rows)


def _csv_lines(live: LiveFleet, sql: str, values: Sequence[Any]) -> Iterator[str]:
    names, pages = _pages(live, sql, values)
    yield _as_csv([names])
    for rows in pages:
        yield _as_csv(rows)


def _pages(live: LiveFleet, sql: str, values: Sequence[Any]) -> tuple[list[str], Iterator[list[Any]]]:
    cursor = live.mirror.cursor()  # without the time limit of a query: the client decides how quickly it reads
    result = cursor.execute(sql, list(values))

    def pages() -> Iterator[list[Any]]:
        while rows := result.fetchmany(_FETCHED):
            yield rows
        cursor.close()

    return [column[0] for column in result.description], pages()


def _as_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as CSV; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    held = io.StringIO()
    csv.writer(held).writerows([[_cell(value) for value in row] for row in rows])
    return held.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
