"""The fleet at present: devices with their modes, counts of devices and rows.

Rule: a report computes no verdict. `parts` defines the facts; `kept` reads them at a cost that does
not grow with history.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.judgements import AMENDMENTS
from fleetpulse.core.presence.presence_time import clock_description
from fleetpulse.core.rows import Trust
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, files_of
from fleetpulse.reports.history.time_travel import fleet_in
from fleetpulse.reports.messages import span
from fleetpulse.reports.present.kept import Present, counted, open_present
from fleetpulse.reports.present.parts import DOUBT, UNJUDGED, listed_sql, now, through, trust_of

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

COUNTED: Final = ("judgements", "quarantine", "devices")
_WANTED: Final = "wanted"  # table with the ids of the wanted devices


def devices(home: Home, frontier_ms: int | None, mode: str | None = None, device_id: str | None = None) -> list[dict[str, Any]]:
    """Return the devices that were registered or heard, with their modes, ordered by id.

    A device without a mode is ``unjudged``, with the reason. ``never_seen`` is true for an offline
    device that was never heard. ``clock`` describes a wrong clock, with ``clock_offset_ms``, see
    `core.presence.presence_time`.

    Args:
        home: home to read.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
        mode: mode to filter by; None: all.
        device_id: device to filter by; None: all.
    """
    with open_present(home, frontier_ms) as present:
        if device_id is not None:
            present.connection.execute(f"CREATE TEMP TABLE {_WANTED} AS SELECT ? AS device_id", [device_id])
        return _listed(present, "" if device_id is None else _WANTED, mode)


def newest_devices(home: Home, frontier_ms: int | None, mode: str | None, last: int) -> tuple[list[dict[str, Any]], int]:
    """Return the devices with the newest mode changes, ordered by id, and the number of all devices.

    Devices without a mode are last. See `devices` for a row.

    Args:
        home: home to read.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
        mode: mode to filter by; None: all.
        last: maximum number of rows.
    """
    with open_present(home, frontier_ms) as present:
        judged, values = present.judged()
        where, of_mode = ("WHERE mode = ?", [mode]) if mode else ("WHERE mode IS NOT NULL", [])
        chosen = f"SELECT device_id FROM ({judged}) {where} ORDER BY since DESC, device_id LIMIT {int(last)}"
        present.connection.execute(f"CREATE TEMP TABLE {_WANTED} AS {chosen}", [*values, *of_mode])
        [(count,)] = present.connection.execute(f"SELECT count(*) FROM {_WANTED}").fetchall()
        if count < last and mode in (None, UNJUDGED):
            facts, values = present.facts()
            others = f"""SELECT device_id FROM ({listed_sql(present.limits, f"({facts})")}) WHERE mode = '{UNJUDGED}'
                         ORDER BY device_id LIMIT {int(last) - count}"""
            present.connection.execute(f"INSERT INTO {_WANTED} {others}", values)
        rows = _listed(present, _WANTED, mode)
        return rows, max(len(rows), present.device_count(mode))


def _listed(present: Present, among: str, mode: str | None) -> list[dict[str, Any]]:
    facts, values = present.facts(among)
    where, of_mode = ("WHERE mode = ?", [mode]) if mode else ("", [])
    sql = f"SELECT * FROM ({listed_sql(present.limits, f'({facts})')}) {where} ORDER BY device_id"
    found = fetch(present.connection, sql, [*values, *of_mode])
    return [{**row, "clock": row["clock"] and clock_description(Trust(row["clock"]), row["clock_offset_ms"])} for row in found]


def counts(home: Home, frontier_ms: int | None) -> dict[str, Any]:
    """Return the number of devices by mode, and of rows by kind of judgement.

    ``clocks`` has the number of devices with a wrong clock, by class of the newest signal, see
    `core.presence.presence_time`.

    Args:
        home: home to read.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
    """
    with open_present(home, frontier_ms) as present:
        judged, values = present.judged()
        found = _counts(home, present.connection, f"({judged}) WHERE mode IS NOT NULL", values, present.counts())
        return {**found, "clocks": _clocks(present)}


def _clocks(present: Present) -> dict[str, int]:
    """Count the devices with a wrong clock.

    Only devices with doubts are read: a message was listed as late, or with a clock fault.
    """
    source = "judgements" if present.position is None else "new_judgements"
    sql = f"CREATE TEMP TABLE {_WANTED} AS SELECT DISTINCT device_id FROM {source} WHERE {DOUBT} AND received_at IS NOT NULL"
    if present.position is not None:
        sql += " UNION SELECT device_id FROM kept WHERE doubt_received_at IS NOT NULL"
    present.connection.execute(sql)
    if not present.connection.execute(f"SELECT 1 FROM {_WANTED} LIMIT 1").fetchone():
        return {}
    by_trust = f"SELECT trust, count(*) AS n FROM (SELECT {trust_of(present.limits)} AS trust FROM ({present.heard(_WANTED)}))"
    found = fetch(present.connection, f"{by_trust} WHERE trust != '{Trust.ON_TIME}' GROUP BY trust ORDER BY trust")
    return {row["trust"]: row["n"] for row in found}


def counts_of(home: Home, tables: "DuckDBPyConnection", frontier_ms: int | None) -> dict[str, Any]:
    """Like `counts`, but read tables (`COUNTED`) through an open connection.

    Rows of bronze are counted from its log.
    """
    fleet, values = fleet_in(now(through(frontier_ms)))
    return _counts(home, tables, f"({fleet})", values, counted(tables, "judgements", "quarantine"))


def _counts(
    home: Home,
    tables: "DuckDBPyConnection",
    fleet: str,
    values: list[Any],
    rows: tuple[dict[str, int], dict[str, int], dict[str, int]],
) -> dict[str, Any]:
    counted_ = "count(*) AS n, count(*) FILTER (never_seen) AS never_seen"
    modes = fetch(tables, f"SELECT mode, {counted_} FROM {fleet} GROUP BY mode ORDER BY n DESC, mode", values)
    return {
        "devices": {row["mode"]: row["n"] for row in modes},
        "never_seen": sum(row["never_seen"] for row in modes),
        **counts_of_rows(*rows),
        **bronze_counts(home),
    }


def counts_of_rows(kinds: Mapping[str, int], transitions: Mapping[str, int], refused: Mapping[str, int]) -> dict[str, Any]:
    """Return the part of `counts` about transitions, judgements and refused messages, from `kept.counted`."""
    return {
        "transitions": dict(transitions),
        "judgements": {kind: n for kind, n in kinds.items() if kind not in AMENDMENTS},
        "amended": {kind: n for kind, n in kinds.items() if kind in AMENDMENTS},
        "quarantine": dict(refused),
    }


def bronze_counts(home: Home) -> dict[str, Any]:
    """Return the part of `counts` about landed messages, from the log of bronze."""
    received_span = span(home)
    return {
        "messages": sum(file.rows or 0 for file in files_of(home, MESSAGES, "received_at")),
        "newest_received_at_ms": received_span[1] if received_span else None,
    }
