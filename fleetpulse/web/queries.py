"""Filters, sorting and keyset paging of the tables in memory, from the parameters of a request.

Rule 1: names of columns come from this module; values of users are SQL parameters.
Rule 2: every order ends with the device id, or the number of the transition, so that it is total and a page can
begin after any row.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.core.errors import Misuse
from fleetpulse.core.lifecycle import TROUBLE, Mode, Trigger
from fleetpulse.core.presence.presence_time import clock_description
from fleetpulse.core.rows import Trust
from fleetpulse.core.tables import literals
from fleetpulse.core.times import END_OF_TIME_MS, parse_instant_ms
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports.present.id_index import IdIndex, those_in
from fleetpulse.reports.present.mirror import CHANGED, HASH, LISTED
from fleetpulse.reports.present.parts import UNJUDGED
from fleetpulse.reports.present.tally import COUNTED

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from fleetpulse.reports.present.id_index import Numbers

MOST_ROWS: Final = 1_000  # of a page
MOST_TEXT: Final = 200  # characters of a value
_MOST_CHOICES: Final = 1_000  # characters of several values
_MOST_CURSOR: Final = 4_096  # bytes
_INT64: Final = range(-(2**63), 2**63)
_EXACT: Final = {"site": "site", "class": "device_class", "gateway": "gateway"}
_SORTS: Final = {  # sort key -> its column
    "since": "since", "device": "device_id", "site": "site", "class": "device_class", "mode": "mode",
}  # fmt: skip
_KEYS: Final = {
    "since": "devices.since_ms",
    "device": "device_id",
}  # sort key -> SQL that is compared; otherwise the column, or empty
SORT_KEYS: Final = tuple(key for one in _SORTS for key in (one, f"-{one}"))
_COLUMN: Final = {"mode": "mode", **_EXACT, "trigger": "trigger", "clock": "clock"}
ALL_FACETS: Final = tuple(_COLUMN)
FACETS: Final = tuple(name for name in _COLUMN if name != "gateway")  # of the API
_ALL: Final = "all"  # facet of all devices


@dataclass(frozen=True, slots=True)
class Condition:
    """SQL condition with its parameters.

    Attributes:
        sql: condition; ``true`` if there is none.
        values: parameters.
        counted: table of the numbers ``n`` of the devices that it selects from.
        searched: text that the ids must have; empty if there is none.
        others: the condition without this text; None if there is none.
        numbers: numbers of the devices that it selects, ascending, if `search` has found too many to keep; otherwise None.
        among: number of devices that ``others`` selects, likewise.
    """

    sql: str
    values: Sequence[Any]
    counted: str = "live.counted"
    searched: str = ""
    others: "Condition | None" = None
    numbers: "Numbers | None" = field(default=None, compare=False)
    among: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether `search` has kept the devices that it selects, so that further queries are quick."""
        return self is _MATCHED


EVERYTHING: Final = Condition("true", ())
_EACH: Final = "(SELECT *, 1 AS n FROM live.devices)"  # in place of `live.counted`, which has no ids
_MATCHED: Final = Condition("true", (), "matched")  # devices that a search has found
_MOST_MATCHES: Final = 50_000  # that are kept for the further queries of a request
_NEAR: Final = 2  # devices that are read for each one of a page, if those that are searched are spread evenly
_MOST_NEAR: Final = 5_000  # reading more takes as long as reading all ids
_N: Final = "coalesce(sum(n), 0)::BIGINT"
MODES: Final = f"""SELECT mode, {_N} AS n, coalesce(sum(n) FILTER (never_seen), 0)::BIGINT AS never_seen
                  FROM live.counted GROUP BY mode HAVING sum(n) > 0 ORDER BY sum(n) DESC, mode"""
WRONG_CLOCKS: Final = f"""SELECT clock, {_N} AS n FROM live.counted WHERE clock != '{Trust.ON_TIME}'
                          GROUP BY clock HAVING sum(n) > 0 ORDER BY clock"""


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


def text_of(parameters: Mapping[str, str], name: str, most: int = MOST_TEXT) -> str:
    """Return a parameter; empty if it is absent.

    Raises:
        Misuse: it is too long.
    """
    value = parameters.get(name, "")
    if len(value) > most:
        raise Misuse(f'parameter "{name}" has {len(value):,} characters; at most {most} are allowed', code="parameter-invalid")
    return value


def choices_of(parameters: Mapping[str, str], name: str, choices: Sequence[str]) -> list[str]:
    """Return the comma-separated values of a parameter, each one of the choices.

    Raises:
        Misuse: a value is none of them.
    """
    values = [one for one in text_of(parameters, name, _MOST_CHOICES).split(",") if one]
    for one in values:
        if one not in choices:
            raise Misuse(
                f'parameter "{name}" must be one or several of: {", ".join(choices)}; got {one!r}', code="parameter-invalid"
            )
    return values


def limit_of(parameters: Mapping[str, str], default: int, most: int = MOST_ROWS) -> int:
    """Return the parameter ``limit``.

    Raises:
        Misuse: it is not a number from 1 to ``most``.
    """
    text = text_of(parameters, "limit") or str(default)
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= most:
        raise Misuse(f'parameter "limit" must be a number from 1 to {most:,}; got {text!r}', code="parameter-invalid")
    return int(text)


def flag_of(parameters: Mapping[str, str], name: str) -> bool:
    """Return a parameter that is true or false; false if it is absent.

    Raises:
        Misuse: it is neither.
    """
    return choice_of(parameters, name, ("false", "true"), "false") == "true"


def choice_of(parameters: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    """Return a parameter that is one of several words.

    Raises:
        Misuse: it is none of them.
    """
    value = text_of(parameters, name) or default
    if value not in choices:
        raise Misuse(f'parameter "{name}" must be one of: {", ".join(choices)}; got {value!r}', code="parameter-invalid")
    return value


def instant_of(parameters: Mapping[str, str], name: str) -> int | None:
    """Return a parameter that is an instant, epoch milliseconds; None if it is absent.

    Raises:
        FleetError: it is not an instant that the tables can store.
    """
    if not (text := text_of(parameters, name)):
        return None
    instant_ms = parse_instant_ms(text)
    if not 0 <= instant_ms <= END_OF_TIME_MS:
        raise Misuse(f'parameter "{name}" must be an instant of the years 1970 to 9999; got {text!r}', code="parameter-invalid")
    return instant_ms


def condition(parameters: Mapping[str, str]) -> Condition:
    """Return the condition on devices that the parameters of a request name.

    ``q``: text within the id; ``mode``, ``trigger``, ``clock``: values, comma-separated; ``site``, ``class``,
    ``gateway``: one value each.

    Raises:
        Misuse: a value is invalid.
    """
    parts, values = ["true"], list[Any]()
    modes = (*(mode.value for mode in Mode), UNJUDGED)
    for name, choices in (("mode", modes), ("trigger", [one.value for one in Trigger]), ("clock", [one.value for one in Trust])):
        if chosen := choices_of(parameters, name, choices):
            parts.append(f'"{name}" IN ({", ".join("?" * len(chosen))})')
            values += chosen
    for name, column in _EXACT.items():
        if text := text_of(parameters, name):
            parts.append(f"{column} = ?")
            values.append(text)
    if flag_of(parameters, "never_seen"):
        parts.append("never_seen")
    others = Condition(" AND ".join(parts), values)
    searched = text_of(parameters, "q")
    if not searched:
        return others
    has_case = not searched.isascii() or any(map(str.isalpha, searched))
    part = "contains(lower(device_id), lower(?))" if has_case else "contains(device_id, ?)"
    return Condition(f"{part} AND {others.sql}", [searched, *values], _EACH, searched, others)


def search(cursor: "DuckDBPyConnection", ids: IdIndex, where: Condition) -> Condition:
    """Return a condition that selects the same devices; a search in all ids runs once.

    Args:
        cursor: connection of one request; the returned condition can be used until it is closed, in one transaction.
        ids: index with the ids of all devices of the connection.
        where: condition on the devices.
    """
    if where.others is None:
        return where
    cursor.begin()
    cursor.execute("SELECT 1 FROM live.devices LIMIT 1").fetchall()  # devices from now on are not in the transaction
    [(lower,)] = cursor.execute("SELECT lower(?)", [where.searched]).fetchall()  # Python has other lower case for some texts
    numbers = ids.find(lower)
    if len(numbers) > _MOST_MATCHES:
        listed = cursor.execute(f"SELECT number FROM live.devices WHERE {where.others.sql}", where.others.values)
        among = np.asarray(listed.fetchnumpy()["number"], np.uint32)
        numbers = those_in(numbers, among)
        if len(numbers) > _MOST_MATCHES:
            return replace(where, numbers=numbers, among=len(among))
    cursor.register("numbers", pa.table({"number": numbers}))
    columns = ", ".join(f'"{name}"' for name in ("since_ms", *COUNTED))
    found = f"number IN (SELECT number FROM numbers) AND {where.others.sql}"
    cursor.execute(
        f"CREATE TEMP TABLE matched AS SELECT rowid AS place, {columns}, 1 AS n FROM live.devices WHERE {found}",
        list(where.others.values),
    )
    return _MATCHED


def device_filter(parameters: Mapping[str, str], default_limit: int = 50) -> DeviceFilter:
    """Return the filter of a request for devices: see `condition`; ``sort``, ``after`` and ``limit``.

    Raises:
        Misuse: a value is invalid.
    """
    key = text_of(parameters, "sort") or "-since"
    name = key.removeprefix("-")
    if name not in _SORTS:
        raise Misuse(f'parameter "sort" must be one of: {", ".join(SORT_KEYS)}; got {key!r}', code="parameter-invalid")
    return DeviceFilter(
        condition(parameters), name, key.startswith("-"), _after(parameters.get("after", "")), limit_of(parameters, default_limit)
    )


def _after(text: str) -> tuple[Any, str] | None:
    if not text:
        return None
    value, device_id = decoded_cursor(text, (str, int, NoneType), (str,))
    return value, device_id


def encoded_cursor(*values: str | int | None) -> str:
    """Return the text of a cursor, which `decoded_cursor` reads."""
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def decoded_cursor(text: str, *types: tuple[type, ...]) -> list[Any]:
    """Return the values of a cursor.

    Args:
        text: text of a user.
        types: allowed types of each value.

    Raises:
        Misuse: the text is no cursor with such values.
    """
    try:
        values = json.loads(base64.b64decode(text.encode()[:_MOST_CURSOR], b"-_", validate=True))
        if not isinstance(values, list) or len(values) != len(types):
            raise ValueError(text)
        for value, allowed in zip(values, types, strict=True):
            is_bounded = value in _INT64 if type(value) is int else "\0" not in (value or "")
            if type(value) not in allowed or not is_bounded:
                raise ValueError(text)
            if isinstance(value, str):
                value.encode()  # JSON may have half of a pair of surrogates
    except (ValueError, RecursionError, TypeError):
        raise Misuse('parameter "after" must be the "next" of a page', code="parameter-invalid") from None
    return values


def cursor_of(row: Mapping[str, Any], wanted: DeviceFilter) -> str:
    """Return the text with which the page after a row begins."""
    value = row["since_ms"] if wanted.sort == "since" else row[_SORTS[wanted.sort]]
    return encoded_cursor(value, row["device_id"])


def device_rows(cursor: "DuckDBPyConnection", wanted: DeviceFilter, *, backwards: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a page of devices, see `devices_sql`.

    Args:
        cursor: connection of the request.
        wanted: filter; its condition comes from `search`.
        backwards: see `devices_sql`.
    """
    if (places := _places_near(cursor, wanted, backwards=backwards)) is None:
        return fetch(cursor, *devices_sql(wanted, backwards=backwards))
    found = Condition(f"rowid IN (SELECT unnest({places}))", ())  # of a list itself, all rows would be read
    return fetch(cursor, *devices_sql(replace(wanted, where=found, after=None), paged=False, backwards=backwards))[: wanted.limit]


def _places_near(cursor: "DuckDBPyConnection", wanted: DeviceFilter, *, backwards: bool) -> list[int] | None:
    """Return the places of the devices of a page, and of those with the key of its last row; None if they are not near.

    If many devices have the text that is searched, a page of them is likely among the first devices that the other conditions
    select. Their numbers are enough: ids are slow to read. Other keys than ``since`` are equal for many devices.
    """
    where, limit = wanted.where, wanted.limit
    if where.numbers is None or where.others is None or wanted.sort != "since":
        return None
    first = _NEAR * limit * where.among // len(where.numbers)
    if first > _MOST_NEAR:
        return None
    key, direction = _order_of(wanted, backwards=backwards)
    others, values = _after_row(replace(wanted, where=where.others), key, direction, backwards=backwards)
    rows = cursor.execute(
        f"""SELECT {key} AS key, number, rowid AS place FROM live.devices AS devices WHERE {others}
            ORDER BY key {direction} LIMIT {first}""",
        values,
    ).fetchall()
    numbers = np.array([number for _, number, _ in rows], np.uint32)
    place_of = np.minimum(np.searchsorted(where.numbers, numbers), len(where.numbers) - 1)
    found = [row for row, is_found in zip(rows, where.numbers[place_of] == numbers, strict=True) if is_found]
    if len(found) < limit or found[limit - 1][0] == rows[-1][0]:
        return None  # further devices, or some with the last key, were not read
    return [place for key, _, place in found[:limit]] + [place for key, _, place in found[limit:] if key == found[limit - 1][0]]


def devices_sql(wanted: DeviceFilter, *, paged: bool = True, backwards: bool = False) -> tuple[str, list[Any]]:
    """Return SQL and parameters for a page of devices; instants are ``<name>_ms``.

    A page needs the ids of devices only from the key of its last row on: they are slow to read.

    Args:
        wanted: filter.
        paged: whether to return one page; otherwise all rows, in the same order.
        backwards: whether the page is before the row of ``wanted.after``; its rows are in reversed order.
    """
    key, direction = _order_of(wanted, backwards=backwards)
    order = f"{key} {direction}, device_id {'DESC' if backwards else 'ASC'}"
    where, values = wanted.where.sql, list(wanted.where.values)
    limit = ""
    if paged:
        limit = f"LIMIT {wanted.limit}"
        where, values = _after_row(wanted, key, direction, backwards=backwards)
        has_keys = wanted.sort != "device"
        last, sign = ("min", ">=") if direction == "DESC" else ("max", "<=")
        if wanted.where is _MATCHED:
            places = "SELECT place FROM matched AS devices"
            if has_keys and wanted.after is None:
                keys = f"SELECT {key} AS key FROM matched AS devices ORDER BY key {direction} {limit}"
                places += f" WHERE {key} {sign} (SELECT {last}(key) FROM ({keys}))"
            where = f"rowid IN ({places}) AND {where}"
        elif has_keys:
            keys = f"SELECT {key} AS key FROM live.devices AS devices WHERE {where} ORDER BY key {direction} {limit}"
            where, values = f"{where} AND {key} {sign} (SELECT {last}(key) FROM ({keys}))", [*values, *values]
    return f"SELECT {_device_columns()} FROM live.devices AS devices WHERE {where} ORDER BY {order} {limit}", values


def _order_of(wanted: DeviceFilter, *, backwards: bool) -> tuple[str, str]:
    """Return SQL of the key that orders a page before the id, and its direction."""
    key = _KEYS.get(wanted.sort) or f"coalesce({_SORTS[wanted.sort]}, '')"
    return key, "DESC" if wanted.descending is not backwards else "ASC"


def _after_row(wanted: DeviceFilter, key: str, direction: str, *, backwards: bool) -> tuple[str, list[Any]]:
    """Return the condition and the parameters of the rows after the row of ``wanted.after`` in an order."""
    where, values = wanted.where.sql, list(wanted.where.values)
    if wanted.after is None:
        return where, values
    value, device_id = wanted.after
    none = -1 if wanted.sort == "since" else ""
    if isinstance(value, str) is not isinstance(none, str) and value is not None:
        raise Misuse('parameter "after" is of another order; begin with the first page', code="parameter-invalid")
    sign = "<" if direction == "DESC" else ">"
    found = none if value is None else value
    following = f"{key} {sign} ? OR ({key} = ? AND device_id {'<' if backwards else '>'} ?)"
    return f"{where} AND {key} {sign}= ? AND ({following})", [*values, found, found, found, device_id]


def device_sql(device_id: str) -> tuple[str, list[Any]]:
    """Return SQL and parameters for the row of one device, as `devices_sql` returns it."""
    is_wanted = f"id_hash = {HASH.format('?')} AND device_id = ?"
    return f"SELECT {_device_columns()} FROM live.devices WHERE {is_wanted}", [device_id, device_id]


def _device_columns() -> str:
    return instants(LISTED, ("since", "last_seen"))


def instants(columns: Sequence[str], of: Sequence[str]) -> str:
    """Return SQL that selects columns, with instants in milliseconds as ``<name>_ms``."""
    return ", ".join(f'epoch_ms("{name}") AS {name}_ms' if name in of else f'"{name}"' for name in columns)


def facets_sql(where: Condition, names: Sequence[str], most: int) -> tuple[str, list[Any]]:
    """Return SQL and parameters for the number of devices that match, and the most frequent values of facets among them.

    Args:
        where: condition on the devices.
        names: names of `ALL_FACETS`.
        most: maximum number of values of a facet.

    Returns:
        SQL of rows with ``facet``, ``value`` and ``n``, for `facets_of`.
    """
    if not names and where.numbers is not None:
        return f"SELECT '{_ALL}' AS facet, {len(where.numbers)} AS n", []
    if not names:
        return f"SELECT '{_ALL}' AS facet, {_N} AS n FROM {where.counted} WHERE {where.sql}", list(where.values)
    columns = {name: f'"{_COLUMN[name]}"' for name in names}
    sets = ", ".join(f"({column})" for column in columns.values())
    picked = " ".join(f"WHEN grouping({column}) = 0 THEN '{name}'" for name, column in columns.items())  # one column of each set
    sql = f"""
        SELECT * FROM (
            SELECT CASE {picked} ELSE '{_ALL}' END AS facet, coalesce({", ".join(columns.values())}) AS value, {_N} AS n
            FROM {where.counted} WHERE {where.sql} GROUP BY GROUPING SETS ({sets}, ()))
        WHERE (value IS NOT NULL AND n > 0) OR facet = '{_ALL}'
        QUALIFY row_number() OVER (PARTITION BY facet ORDER BY n DESC, value) <= {int(most)}
        ORDER BY facet, n DESC, value
    """
    return sql, list(where.values)


def facets_of(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the number of devices, and the values of each facet with theirs, most frequent first.

    Args:
        rows: rows of `facets_sql`.
        names: its names.
    """
    count, found = 0, {name: list[dict[str, Any]]() for name in names}
    for row in rows:
        if row["facet"] == _ALL:
            count = row["n"]
        else:
            found[row["facet"]].append({"value": row["value"], "n": row["n"]})
    return count, found


def changes_sql(parameters: Mapping[str, str], frontier_ms: int | None) -> Condition:
    """Return the condition on recent transitions that the parameters of a request name.

    ``site``, ``class``, ``gateway``, ``trigger``, ``from_mode``, ``to_mode``, ``device``; ``since`` and ``until``:
    instants; ``last``: a number of minutes before the frontier.

    Raises:
        Misuse: a value is invalid.
    """
    parts, values = ["true"], list[Any]()
    for name, column in (*_EXACT.items(), ("device", "device_id")):
        if text := text_of(parameters, name):
            parts.append(f"{column} = ?")
            values.append(text)
    modes = [mode.value for mode in Mode]
    for name, choices in (("from_mode", modes), ("to_mode", modes), ("trigger", [one.value for one in Trigger])):
        if chosen := choices_of(parameters, name, choices):
            parts.append(f'"{name}" IN ({", ".join("?" * len(chosen))})')
            values += chosen
    for name, sign in (("since", ">="), ("until", "<")):
        if (instant_ms := instant_of(parameters, name)) is not None:
            parts.append(f"event_ms {sign} {instant_ms}")
    if text := text_of(parameters, "last"):
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1_440:
            raise Misuse(f'parameter "last" must be a number of minutes from 1 to 1440; got {text!r}', code="parameter-invalid")
        parts.append(f"event_ms > {(frontier_ms or 0) - int(text) * 60_000}")
    return Condition(" AND ".join(parts), values)


def shown_device(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `devices_sql` with its clock as a description."""
    clock = row["clock"]
    return {**row, "clock": clock and clock_description(Trust(clock), row["clock_offset_ms"])}


CHANGE_COLUMNS: Final = instants(CHANGED, ("event_time", "last_seen", "judged_at", "life"))
_CHANGE_KEY: Final = (
    "(event_ms, device_id, coalesce(epoch_ms(life), -1), coalesce(amendment_no, -1), coalesce(transition_no, -1))"
)


def change_cursor(row: Mapping[str, Any]) -> str:
    """Return the text with which the page after a transition begins."""
    numbers = (-1 if row[name] is None else row[name] for name in ("life_ms", "amendment_no", "transition_no"))
    return encoded_cursor(row["event_time_ms"], row["device_id"], *numbers)


def change_rows_sql(where: Condition, after: str, limit: int | None) -> tuple[str, list[Any]]:
    """Return SQL and parameters for transitions of the last day, newest first.

    Args:
        where: condition, see `changes_sql`.
        after: cursor of the page before; empty for the first page.
        limit: maximum number of rows; None: all.

    Raises:
        Misuse: the cursor is invalid.
    """
    sql, values = where.sql, list(where.values)
    if after:
        sql += f" AND {_CHANGE_KEY} < (?, ?, ?, ?, ?)"
        values += decoded_cursor(after, (int,), (str,), (int,), (int,), (int,))
    page = "" if limit is None else f"LIMIT {limit}"
    return f"SELECT {CHANGE_COLUMNS} FROM live.changes WHERE {sql} ORDER BY {_CHANGE_KEY} DESC {page}", values


def device_changes_sql(device_id: str) -> tuple[str, list[Any]]:
    """Return SQL and parameters for the transitions of one device in the last day."""
    is_wanted = f"id_hash = {HASH.format('?')} AND device_id = ?"
    return f"SELECT {CHANGE_COLUMNS} FROM live.changes WHERE {is_wanted}", [device_id, device_id]


def change_count_sql(where: Condition) -> tuple[str, list[Any]]:
    """Return SQL and parameters for the number ``n`` of transitions that match, see `changes_sql`."""
    return f"SELECT count(*) AS n FROM live.changes WHERE {where.sql}", list(where.values)


def groups_sql(column: str, where: Condition, order: str, limit: int) -> tuple[str, list[Any]]:
    """Return SQL and parameters for numbers of devices by mode, of each site or class.

    Args:
        column: site or device_class.
        where: condition on the devices, see `condition`.
        order: trouble, devices or name.
        limit: maximum number of rows.
    """
    by = {"trouble": "trouble DESC, devices DESC, name", "devices": "devices DESC, name", "name": "name"}[order]
    return f"{_groups_sql(column, where)} ORDER BY {by} LIMIT {limit}", list(where.values)


def sites_sql(in_service: Sequence[str], since_ms: int, limit: int, *, by_share: bool) -> str:
    """Return SQL for numbers of devices by mode of each site, trouble first, with its newest transitions.

    Args:
        in_service: modes of the devices of which trouble is a share.
        since_ms: instant after which transitions count, epoch milliseconds.
        limit: maximum number of rows.
        by_share: whether the share of devices in trouble orders the sites; otherwise their number does.

    Returns:
        SQL of the rows of `groups_sql`, with ``in_service``, the number of such devices; ``worse`` and ``better``,
        the numbers of transitions to and from trouble; ``site_count``, the number of all sites.
    """
    trouble = literals(TROUBLE)
    served = " + ".join(f"coalesce(modes['{mode}'], 0)" for mode in in_service)
    order = "trouble / greatest(1, in_service) DESC, trouble DESC" if by_share else "trouble DESC"
    return f"""
        WITH changed AS (
            SELECT coalesce(site, '') AS name, count(*) FILTER (to_mode IN ({trouble}) AND from_mode NOT IN ({trouble})) AS worse,
                   count(*) FILTER (from_mode IN ({trouble}) AND to_mode NOT IN ({trouble})) AS better
            FROM live.changes WHERE event_ms > {since_ms} GROUP BY name)
        SELECT counted.*, {served} AS in_service, coalesce(worse, 0) AS worse, coalesce(better, 0) AS better,
               count(*) OVER () AS site_count
        FROM ({_groups_sql("site", EVERYTHING)}) AS counted LEFT JOIN changed USING (name)
        ORDER BY {order}, name LIMIT {int(limit)}
    """


def _groups_sql(column: str, where: Condition) -> str:
    return f"""
        SELECT name, sum(n)::BIGINT AS devices, coalesce(sum(n) FILTER (mode IN ({literals(TROUBLE)})), 0)::BIGINT AS trouble,
               map_from_entries(list((mode, n) ORDER BY mode)) AS modes
        FROM (SELECT coalesce("{column}", '') AS name, mode, {_N} AS n FROM {where.counted}
              WHERE {where.sql} AND mode != '{UNJUDGED}' GROUP BY ALL HAVING sum(n) > 0)
        GROUP BY name
    """
