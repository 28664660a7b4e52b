"""Rows of bronze as `core` rows, of all devices or of some.

Rule: rows that concern all devices are returned with the rows of any device. Ticks are frequent, so
two ticks replace them, see `through`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.rows import EVERYONE, SET_WHEN_READ, Clock, GatewayEvent, Kind, Row, for_everyone, hash64
from fleetpulse.core.tables import DEVICES, MESSAGES
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, files_of, query, query_files, reading

ROW: Final = ", ".join(
    f"epoch_ms({name.removesuffix('_ms')}) AS {name}" if name in ("received_at_ms", "event_time_ms") else name
    for name in (field.name for field in fields(Row) if field.name not in SET_WHEN_READ)
)

_CONCERNING: Final = "list_contains(?, device_id) OR kind IN ('gap', 'policy') OR gateway_event IS NOT NULL"


def as_row(found: dict[str, Any]) -> Row:
    """Return a result row of the select list `ROW` as a `Row`."""
    converted = {"kind": Kind(found["kind"]), "clock": Clock(found["clock"]), "position": found["position"] or 0}
    event = found["gateway_event"]
    return Row(**{**found, **converted, "gateway_event": event and GatewayEvent(event)})


def _concerning(found: Iterable[dict[str, Any]], device_ids: Collection[str]) -> list[Row]:
    """Convert result rows; a gateway event of another device becomes its event for everyone."""
    rows_ = map(as_row, found)
    return [row if row.device_id in device_ids else for_everyone(row) or row for row in rows_]


def rows(home: Home, device_ids: Sequence[str] | None = None) -> list[Row]:
    """Return the rows of bronze: all, or those that concern some devices.

    Rows that concern some devices are their own rows and rows that concern all devices, except
    ticks.
    """
    if device_ids is None:
        return [as_row(one) for one in query(home, f"SELECT {ROW} FROM messages", tables=["messages"])]
    wanted, of_all = list(device_ids), "kind IN ('gap', 'policy')"
    hashes = ", ".join(str(hash64(device_id)) for device_id in wanted) or "NULL"
    own, events = "list_contains(?, device_id)", "gateway_event IS NOT NULL"
    # Three queries with simple conditions: statistics of the files exclude row groups, and hashes are compared first.
    parts = (
        (f"device_hash IN ({hashes}) AND {own} AND NOT {of_all}", [wanted]),
        (of_all, []),
        (f"{events} AND NOT {own} AND NOT {of_all}", [wanted]),
    )
    with reading(home, [MESSAGES.name]) as tables:
        found = [row for where, values in parts for row in fetch(tables, f"SELECT {ROW} FROM messages WHERE {where}", values)]
    return _concerning(found, {*device_ids})


def known_hashes(home: Home) -> list[int]:
    """Return `hash64` of the id of each device that was heard or registered."""
    heard = query(home, "SELECT DISTINCT device_hash FROM messages", tables=[MESSAGES.name])
    registered = query(home, "SELECT DISTINCT device_id FROM devices", tables=[DEVICES.name])
    return sorted({row["device_hash"] for row in heard} | {hash64(row["device_id"]) for row in registered})


def rows_since_version(home: Home, device_ids: Sequence[str], origin: tuple[int, int], through_ms: int | None) -> list[Row]:
    """Return the rows that concern some devices, from a version of bronze on.

    Args:
        home: home to read.
        device_ids: ids of the devices.
        origin: first version, and the newest ``received_at`` of the versions before it.
        through_ms: ``received_at`` of the last rows; None: all.

    Raises:
        FleetError: the version was removed.
    """
    version, newest_ms = origin
    parameters = [list(device_ids), newest_ms]
    sql = f"SELECT {ROW} FROM messages WHERE ({_CONCERNING}) AND epoch_ms(received_at)"
    found = query(home, f"{sql} > ?", parameters, tables=["messages"])
    tied = query_files(MESSAGES, files_beside(home, version, newest_ms), f"{sql} = ?", parameters).to_pylist()
    listened = span(home) or (newest_ms, newest_ms)
    return through(_concerning([*tied, *found], {*device_ids}), (newest_ms, listened[1]), through_ms)


def files_beside(home: Home, version: int, newest_ms: int) -> list[Path]:
    """Return files from a version on that may have rows received at ``newest_ms``.

    ``newest_ms`` is the newest ``received_at`` of the versions before. Rows of one millisecond can be
    in two versions.
    """
    log, files = DeltaLog(home.table(MESSAGES.name)), list[Path]()
    latest = log.latest()
    while version <= latest:
        fresh, version = log.span(version)
        files += (Path(name) for name, _ in fresh)
        least = "SELECT epoch_ms(max(received_at)) AS newest_ms FROM messages"
        if fresh and query_files(MESSAGES, files[-len(fresh) :], least).to_pylist()[0]["newest_ms"] != newest_ms:
            break
    return files


def rows_through(home: Home, device_ids: Sequence[str], through_ms: int | None) -> list[Row]:
    """Return the rows that concern some devices, up to a ``received_at``; None: all."""
    listened = span(home)
    return [] if listened is None else through(rows(home, device_ids), listened, through_ms)


def through(rows_: list[Row], listened: tuple[int, int], through_ms: int | None) -> list[Row]:
    """Return rows up to an instant, with one tick at the first ``received_at`` and one at the last."""
    first_ms, last_ms = listened
    through_ms = last_ms if through_ms is None else min(through_ms, last_ms)
    ticks = [Row(at, Kind.TICK, EVERYONE, EVERYONE, at, Clock.RECEIVED) for at in (first_ms, through_ms)]
    return [row for row in rows_ if row.received_at_ms <= through_ms] + ticks


def errors_of(home: Home, device_id: str, last: int) -> list[dict[str, Any]]:
    """Return the newest errors of a device, newest first: ``received_at_ms``, ``event_time_ms``, ``code``.

    Args:
        home: home to read.
        device_id: id of the device.
        last: maximum number of rows.
    """
    sql = f"""SELECT epoch_ms(received_at) AS received_at_ms, epoch_ms(event_time) AS event_time_ms, code FROM messages
        WHERE device_hash = {hash64(device_id)} AND device_id = ? AND kind = '{Kind.ERROR}'
        ORDER BY received_at DESC, event_time DESC LIMIT {int(last)}"""
    return query(home, sql, [device_id], tables=[MESSAGES.name])


LISTED: Final = (
    "kind", "site", "clock", "boot", "session", "seq", "uptime_s", "code", "firmware", "gateway", "metrics", "body", "note",
    "origin", "bridge", "segment",
)  # fmt: skip
Place = tuple[int, int, str, int, int]  # received_at_ms, position, bridge, segment, digest
_PLACE: Final = "(epoch_ms(received_at), coalesce(position, 0), bridge, segment, digest)"


def place_of(message: Mapping[str, Any]) -> Place:
    """Return the place of a row of `messages_of` in its order."""
    return message["received_at_ms"], message["position"], message["bridge"], message["segment"], message["digest"]


def messages_of(
    home: Home, device_id: str, last: int, *, kind: Kind | None = None, before: Place | None = None, has_metrics: bool = False
) -> list[dict[str, Any]]:
    """Return the newest retained rows of a device, newest first; rows that concern all devices are left out.

    Args:
        home: home to read.
        device_id: id of the device.
        last: maximum number of rows.
        kind: kind of the rows; None: all kinds.
        before: place of the row after which the list goes on, see `place_of`; None: from the newest row.
        has_metrics: whether to return only rows with metrics.

    Returns:
        Rows with ``received_at_ms``, ``event_time_ms``, ``position``, ``digest``, and the columns `LISTED`.
    """
    where, values = f"device_hash = {hash64(device_id)} AND device_id = ?", list[Any]([device_id])
    if kind is not None:
        where += " AND kind = ?"
        values.append(kind.value)
    if has_metrics:
        where += " AND metrics IS NOT NULL"
    if before is not None:
        where += f" AND epoch_ms(received_at) <= ? AND {_PLACE} < (?, ?, ?, ?, ?)"
        values += [before[0], *before]
    sql = f"""SELECT epoch_ms(received_at) AS received_at_ms, epoch_ms(event_time) AS event_time_ms,
        coalesce(position, 0) AS position, digest, {", ".join(LISTED)} FROM messages WHERE {where}
        ORDER BY {_PLACE} DESC LIMIT {int(last)}"""
    return query(home, sql, values, tables=[MESSAGES.name])


def span(home: Home) -> tuple[int, int] | None:
    """Return first and newest ``received_at`` of bronze, from its log; None if empty."""
    files = [file for file in files_of(home, MESSAGES, "received_at") if file.rows != 0]
    if not files:
        return None
    if any(file.least is None or file.greatest is None for file in files):
        found = query(home, "SELECT min(received_at) AS a, max(received_at) AS z FROM messages", tables=["messages"])
        least, greatest = found[0]["a"], found[0]["z"]
    else:
        least, greatest = min(file.least for file in files), max(file.greatest for file in files)
    return round(least.timestamp() * 1000), round(greatest.timestamp() * 1000)
