"""Filters, sorting and keyset paging of the tables in memory, from the parameters of a request.

Rule 1: names of columns come from this module; values of users are SQL parameters.
Rule 2: every order ends with the device id, or the number of the transition, so that it is total and a page can
begin after any row.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.core.errors import Misuse
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.presence.presence_time import clock_description
from fleetpulse.core.rows import Trust
from fleetpulse.core.times import parse_instant_ms
from fleetpulse.reports.present.mirror import CHANGED, LISTED
from fleetpulse.reports.present.parts import UNJUDGED

MOST_ROWS: Final = 1_000  # of a page
MOST_TEXT: Final = 200  # characters of a value
_EXACT: Final = {"site": "site", "class": "device_class", "gateway": "gateway"}
_SORTS: Final = {  # sort key -> its expressions; the first is compared for paging
    "since": "since", "device": "device_id", "site": "site", "class": "device_class", "mode": "mode",
}  # fmt: skip
FACETS: Final = ("mode", "site", "class", "trigger", "clock")
_COLUMN: Final = {"mode": "mode", "class": "device_class", "site": "site", "trigger": "trigger", "clock": "clock"}


@dataclass(frozen=True, slots=True)
class Condition:
    """SQL condition with its parameters.

    Attributes:
        sql: condition; ``true`` if there is none.
        values: parameters.
    """

    sql: str
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class DeviceFilter:
    """Filter, order and page of a list of devices.

    Attributes:
        where: condition of the filter.
        sort: key of the order, see `_SORTS`.
        descending: whether the order is descending.
        after: values of the last row of the previous page; None for the first page.
        limit: maximum number of rows.
    """

    where: Condition
    sort: str
    descending: bool
    after: tuple[Any, str] | None
    limit: int


def _text(parameters: Mapping[str, str], name: str) -> str:
    value = parameters.get(name, "")
    if len(value) > MOST_TEXT:
        raise Misuse(
            f'parameter "{name}" has {len(value):,} characters; at most {MOST_TEXT} are allowed', code="parameter-invalid"
        )
    return value


def _choice(parameters: Mapping[str, str], name: str, choices: Sequence[str]) -> list[str]:
    """Return the comma-separated values of a parameter, each one of the choices."""
    values = [one for one in _text(parameters, name).split(",") if one]
    for one in values:
        if one not in choices:
            raise Misuse(f'parameter "{name}" must be of: {", ".join(choices)}; got {one!r}', code="parameter-invalid")
    return values


def _limit(parameters: Mapping[str, str], default: int) -> int:
    text = _text(parameters, "limit") or str(default)
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MOST_ROWS:
        raise Misuse(f'parameter "limit" must be a number from 1 to {MOST_ROWS:,}; got {text!r}', code="parameter-invalid")
    return int(text)


def condition(parameters: Mapping[str, str]) -> Condition:
    """Return the condition on devices that the parameters of a request name.

    ``q``: text within the id; ``mode``, ``trigger``, ``clock``: values, comma-separated; ``site``, ``class``,
    ``gateway``: one value each.

    Raises:
        Misuse: a value is invalid.
    """
    parts, values = ["true"], list[Any]()
    if text := _text(parameters, "q"):
        parts.append("contains(lower(device_id), ?)")
        values.append(text.lower())
    modes = (*(mode.value for mode in Mode), UNJUDGED)
    for name, choices in (("mode", modes), ("trigger", [one.value for one in Trigger]), ("clock", [one.value for one in Trust])):
        if chosen := _choice(parameters, name, choices):
            parts.append(f'"{name}" IN ({", ".join("?" * len(chosen))})')
            values += chosen
    for name, column in _EXACT.items():
        if text := _text(parameters, name):
            parts.append(f"{column} = ?")
            values.append(text)
    if _text(parameters, "never_seen") == "true":
        parts.append("never_seen")
    return Condition(" AND ".join(parts), values)


def device_filter(parameters: Mapping[str, str], default_limit: int = 50) -> DeviceFilter:
    """Return the filter of a request for devices: see `condition`; ``sort``, ``after`` and ``limit``.

    Raises:
        Misuse: a value is invalid.
    """
    key = _text(parameters, "sort") or "-since"
    name = key.removeprefix("-")
    if name not in _SORTS:
        choices = ", ".join(text for one in _SORTS for text in (one, f"-{one}"))
        raise Misuse(f'parameter "sort" must be one of: {choices}; got {key!r}', code="parameter-invalid")
    return DeviceFilter(
        condition(parameters), name, key.startswith("-"), _after(parameters.get("after", "")), _limit(parameters, default_limit)
    )


def _after(text: str) -> tuple[Any, str] | None:
    if not text:
        return None
    try:
        value, device_id = json.loads(base64.urlsafe_b64decode(text.encode()[:4_096]))
        if not isinstance(device_id, str) or not isinstance(value, str | int | None):
            raise ValueError(text)
    except ValueError:
        raise Misuse('parameter "after" must be the "next" of a page', code="parameter-invalid") from None
    return value, device_id


def cursor_of(row: Mapping[str, Any], wanted: DeviceFilter) -> str:
    """Return the text with which the page after a row begins."""
    value = row["since_ms"] if wanted.sort == "since" else row[_SORTS[wanted.sort]]
    return base64.urlsafe_b64encode(json.dumps([value, row["device_id"]]).encode()).decode()


def devices_sql(wanted: DeviceFilter, *, paged: bool = True, backwards: bool = False) -> tuple[str, list[Any]]:
    """Return SQL and parameters for a page of devices; instants are ``<name>_ms``.

    Args:
        wanted: filter.
        paged: whether to return one page; otherwise all rows, in the same order.
        backwards: whether the page is before the row of ``wanted.after``; its rows are in reversed order.
    """
    expression = "coalesce(epoch_ms(since), -1)" if wanted.sort == "since" else f"coalesce({_SORTS[wanted.sort]}, '')"
    descends = wanted.descending is not backwards
    order = f"{expression} {'DESC' if descends else 'ASC'}, device_id {'DESC' if backwards else 'ASC'}"
    where, values = wanted.where.sql, list(wanted.where.values)
    if paged and wanted.after is not None:
        value, device_id = wanted.after
        sign = "<" if descends else ">"
        where += f" AND ({expression} {sign} ? OR ({expression} = ? AND device_id {'<' if backwards else '>'} ?))"
        none = -1 if wanted.sort == "since" else ""
        if isinstance(value, str) is not isinstance(none, str) and value is not None:
            raise Misuse('parameter "after" is of another order; begin with the first page', code="parameter-invalid")
        found = none if value is None else value
        values += [found, found, device_id]
    limit = f"LIMIT {wanted.limit}" if paged else ""
    return f"SELECT {instants(LISTED, ('since', 'last_seen'))} FROM live.devices WHERE {where} ORDER BY {order} {limit}", values


def instants(columns: Sequence[str], of: Sequence[str]) -> str:
    """Return SQL that selects columns, with instants as epoch milliseconds named ``<name>_ms``."""
    return ", ".join(f'epoch_ms("{name}") AS {name}_ms' if name in of else f'"{name}"' for name in columns)


def count_sql(where: Condition) -> tuple[str, list[Any]]:
    """Return SQL and parameters for the number of devices that match."""
    return f"SELECT count(*) AS n FROM live.devices WHERE {where.sql}", list(where.values)


def facet_sql(where: Condition, name: str, most: int) -> tuple[str, list[Any]]:
    """Return SQL and parameters for the most frequent values of a facet among the devices that match."""
    column = _COLUMN[name]
    sql = f"""SELECT "{column}" AS value, count(*) AS n FROM live.devices WHERE {where.sql} AND "{column}" IS NOT NULL
              GROUP BY 1 ORDER BY n DESC, value LIMIT {int(most)}"""
    return sql, list(where.values)


def changes_sql(parameters: Mapping[str, str], frontier_ms: int | None) -> Condition:
    """Return the condition on recent transitions that the parameters of a request name.

    ``site``, ``class``, ``gateway``, ``trigger``, ``from_mode``, ``to_mode``, ``device``; ``since`` and ``until``:
    instants; ``last``: a number of minutes before the frontier.

    Raises:
        Misuse: a value is invalid.
    """
    parts, values = ["true"], list[Any]()
    for name, column in (*_EXACT.items(), ("device", "device_id")):
        if text := _text(parameters, name):
            parts.append(f"{column} = ?")
            values.append(text)
    modes = [mode.value for mode in Mode]
    for name, choices in (("from_mode", modes), ("to_mode", modes), ("trigger", [one.value for one in Trigger])):
        if chosen := _choice(parameters, name, choices):
            parts.append(f'"{name}" IN ({", ".join("?" * len(chosen))})')
            values += chosen
    for name, sign in (("since", ">="), ("until", "<")):
        if text := _text(parameters, name):
            parts.append(f"epoch_ms(event_time) {sign} {parse_instant_ms(text)}")
    if text := _text(parameters, "last"):
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1_440:
            raise Misuse(f'parameter "last" must be a number of minutes from 1 to 1440; got {text!r}', code="parameter-invalid")
        parts.append(f"epoch_ms(event_time) > {(frontier_ms or 0) - int(text) * 60_000}")
    return Condition(" AND ".join(parts), values)


def shown_device(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `devices_sql` with its clock as a description."""
    clock = row["clock"]
    return {**row, "clock": clock and clock_description(Trust(clock), row["clock_offset_ms"])}


CHANGE_COLUMNS: Final = instants(CHANGED, ("event_time", "last_seen", "judged_at", "life"))
