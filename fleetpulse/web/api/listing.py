"""Filters, pages and files of the lists of streams, for the API and the pages.

Rule 1: a list without a device has the results of a span, by default of the last day before the newest one, so that a
request reads the files of that span only. A list of one device has no default span.
Rule 2: a page ends before the result that its cursor names; the order is total.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from fleetpulse.core.errors import Misuse
from fleetpulse.core.streams.commands import CommandStatus
from fleetpulse.core.streams.sessions import EndedBy
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.delta.corruption import reporting_corruption
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports.streams.lists import (
    COMMAND_LIST,
    SESSION_LIST,
    StreamList,
    Wanted,
    key_of,
    list_sql,
    open_list,
)
from fleetpulse.web import queries
from fleetpulse.web.api.answers import MEDIA, exported
from fleetpulse.web.api.openapi import Endpoint, Operation, Parameter
from fleetpulse.web.live import LiveFleet

STATUSES: Final = tuple(one.value for one in CommandStatus)
REASONS: Final = tuple(one.value for one in EndedBy)
_OF_SESSIONS: Final = {"ended_by": REASONS, "open": ("true", "false")}
_JSON: Final = frozenset({"payload", "reported"})  # columns with JSON objects
Equal = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """List of a stream in the API and on a page.

    Attributes:
        noun: name of the results, of the route and of its files.
        of: the list.
        equal: function that returns the wanted values of columns for the parameters of a request.
        key_types: types of the values of a cursor.
    """

    noun: str
    of: StreamList
    equal: Callable[[Mapping[str, str]], Equal]
    key_types: tuple[tuple[type, ...], ...]

    def wanted(self, home: Home, given: Mapping[str, str]) -> Wanted:
        """Return the results that the parameters of a request name: ``device``, ``since``, ``after`` and those of `equal`.

        Raises:
            Misuse: a value is invalid.
        """
        device_id, since_ms = queries.text_of(given, "device") or None, queries.instant_of(given, "since")
        if since_ms is None and device_id is None and (newest := self.of.newest_ms(home)) is not None:
            since_ms = newest - DAY_MS
        after = given.get("after", "")
        return Wanted(since_ms, device_id, self.equal(given), queries.decoded_cursor(after, *self.key_types) if after else None)

    def page(self, home: Home, wanted: Wanted, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """Return the results of a page, newest first, and the cursor of the next page; None after the last one."""
        sql, values = list_sql(home, self.of, wanted, limit + 1)
        with reporting_corruption(f'the table {self.of.table.name} of "{home.path}"'):
            connection = open_list(home, self.of, wanted.since_ms)
            try:
                rows = fetch(connection, sql, values)
            finally:
                connection.close()
        shown = [{name: _value(name, value) for name, value in row.items()} for row in rows[:limit]]
        return shown, queries.encoded_cursor(*key_of(self.of, shown[-1])) if len(rows) > limit else None

    def files(self, parameters: tuple[Parameter, ...], summary: str, notes: str) -> list[Operation]:
        """Return the operations that export the results, one for each format.

        Args:
            parameters: parameters of a request.
            summary: description in one sentence, without the format and the full stop.
            notes: further sentences.
        """
        return [
            Operation(
                f"/{self.noun}.{form}", f"{self.noun}_{form}", f"{summary}, as {form.upper()}.", self._export(form), None,
                parameters, media, notes=notes,
            )
            for form, media in MEDIA.items()
        ]  # fmt: skip

    def _export(self, form: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(self._file, request.app.state.live, form, request.query_params)

        return endpoint

    def _file(self, live: LiveFleet, form: str, given: Mapping[str, str]) -> Response:
        wanted = replace(self.wanted(live.home, given), after=None)
        sql, values = list_sql(live.home, self.of, wanted, None)
        with reporting_corruption(f'the table {self.of.table.name} of "{live.home.path}"'):
            return exported(live, form, self.noun, sql, values, lambda: open_list(live.home, self.of, wanted.since_ms))


def _value(name: str, value: Any) -> Any:
    return json.loads(value) if name in _JSON and value is not None else value


def _equal_of_commands(given: Mapping[str, str]) -> Equal:
    status = queries.choice_of(given, "status", ("", *STATUSES), "")
    return (("status", status),) if status else ()


def _equal_of_sessions(given: Mapping[str, str]) -> Equal:
    reason, is_open = (queries.choice_of(given, name, ("", *choices), "") for name, choices in _OF_SESSIONS.items())
    if reason and is_open == "true":
        raise Misuse('parameters "open" and "ended_by" exclude each other: an open session has no end', code="parameter-invalid")
    return (
        *((("ended_by", reason),) if reason else ()),
        *((("(ended_at IS NULL)", is_open == "true"),) if is_open else ()),
    )


COMMANDS: Final = Listing("commands", COMMAND_LIST, _equal_of_commands, ((int,), (str,), (str,), (str,)))
SESSIONS: Final = Listing("sessions", SESSION_LIST, _equal_of_sessions, ((int,), (str,), (int,)))
