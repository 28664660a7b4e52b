"""Bitemporal queries: the fleet, or the life of a device, as of an event time.

Rule 1: a query has two instants: the event time, and the time by which verdicts had been judged. By
default all verdicts judged so far count.
Rule 2: only `_known` selects the verdicts that count, after amendments.
Rule 3: a report computes no verdict. A mode is that of the newest transition, or of the registry if
the device has none.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.catalog import transitions_in
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.policy import DEFAULT_CLASS
from fleetpulse.core.tables import DEVICES, JUDGEMENTS
from fleetpulse.core.times import END_OF_TIME_MS, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, reading

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

READ: Final = (JUDGEMENTS.name, DEVICES.name)
_BY_SILENCE: Final = frozenset({Trigger.SILENCE, Trigger.DEATH, Trigger.FORGET})
_BY_GATEWAY: Final = {Trigger.GATEWAY_DEATH: "died", Trigger.GATEWAY_RETURN: "returned"}
_BY_ERRORS: Final = frozenset({Trigger.ERRORS, Trigger.SEQUENCE, Trigger.VELOCITY})
_COLUMNS: Final = """device_id, life, transition_no, from_mode, to_mode, "trigger", event_time, site, device_class, gateway,
    last_seen, never_seen, runtime_ms, last_errors, reason, policy_version, judged_at, amendment_no"""
NEWEST: Final = "event_time DESC, coalesce(amendment_no, transition_no) DESC"  # order of a device's transitions


@dataclass(frozen=True, slots=True)
class Moment:
    """Instants of a query, epoch milliseconds.

    Attributes:
        at_ms: event time of the result.
        known_ms: time by which verdicts had been judged, and rows of the registry received.
        judged_to_ms: frontier at that time; a registration after it has not taken effect.
    """

    at_ms: int
    known_ms: int = END_OF_TIME_MS
    judged_to_ms: int = END_OF_TIME_MS


def _known(moment: Moment, among: str = "") -> tuple[str, list[Any]]:
    """Return SQL and parameters that select the transitions that count at a moment.

    These were judged by ``known_ms`` and have an event time up to ``at_ms``. Retractions and
    additions count from their own ``judged_at`` on.
    """
    judged = f"(SELECT * FROM judgements {only(among)} WHERE epoch_ms(judged_at) <= {int(moment.known_ms)})"
    return f"SELECT {_COLUMNS} FROM ({transitions_in(judged)}) WHERE epoch_ms(event_time) <= ?", [moment.at_ms]


def only(among: str) -> str:
    """Return the SQL join that limits rows to the devices of a table; nothing if its name is empty."""
    return f"SEMI JOIN {among} USING (device_id)" if among else ""


def _registered(moment: Moment, among: str = "") -> tuple[str, list[Any]]:
    """Return SQL and parameters that select the registrations in effect at a moment.

    Refused ones are excluded.
    """
    sql = f"""SELECT device_id, site, device_class, gateway, effective_from, received_at FROM devices {only(among)}
             WHERE op = 'add' AND epoch_ms(effective_from) <= ? AND epoch_ms(received_at) <= ?
             AND (device_id, effective_from, received_at) NOT IN (SELECT (device_id, event_time, received_at) FROM refusals
             WHERE message_kind = 'registry' AND event_time IS NOT NULL AND received_at IS NOT NULL)"""
    return sql, [min(moment.at_ms, moment.judged_to_ms), moment.known_ms]


def fleet(home: Home, moment: Moment) -> list[dict[str, Any]]:
    """Return every device that had a mode at a moment, ordered by id.

    A device that was neither registered nor judged has no mode.
    """
    with reading(home, READ) as tables:
        return fleet_of(tables, moment)


def fleet_of(tables: "DuckDBPyConnection", moment: Moment) -> list[dict[str, Any]]:
    """Like `fleet`, but read tables (`READ`) through an open connection."""
    sql, values = fleet_in(moment)
    return fetch(tables, f"{sql} ORDER BY device_id", values)


def fleet_in(moment: Moment, among: str = "") -> tuple[str, list[Any]]:
    """Return SQL and parameters that select the devices with a mode at a moment.

    Args:
        moment: instants of the query.
        among: table with the ids of the wanted devices; empty: all devices.
    """
    known, known_values = _known(moment, among)
    registered, registered_values = _registered(moment, among)
    newest_entry = "(effective_from, received_at)"
    sql = f"""
    WITH known AS ({known}),
    newest AS MATERIALIZED (SELECT * FROM known QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY {NEWEST}) = 1),
    registrations AS ({registered}),
    begun AS MATERIALIZED (
        SELECT registrations.* FROM registrations LEFT JOIN newest USING (device_id) WHERE newest.to_mode IS NULL
        OR (newest.to_mode = 'forgotten' AND registrations.effective_from > newest.event_time))
    SELECT device_id, to_mode AS mode, event_time AS since, "trigger", site, device_class, gateway, last_seen, never_seen,
           runtime_ms, life, transition_no, amendment_no, judged_at
    FROM newest WHERE device_id NOT IN (SELECT device_id FROM begun)
    UNION ALL BY NAME
    SELECT device_id, 'provisioned' AS mode, false AS never_seen, min(effective_from) AS since,
           arg_max(site, {newest_entry}) AS site,
           coalesce(arg_max(nullif(device_class, ''), {newest_entry}), '{DEFAULT_CLASS}') AS device_class,
           arg_max(gateway, {newest_entry}) AS gateway FROM begun GROUP BY device_id
    """
    return sql, [*known_values, *registered_values]


def life(home: Home, device_id: str, moment: Moment) -> list[dict[str, Any]]:
    """Return a device's modes up to a moment, oldest first, over all its lives.

    Returns:
        Rows with ``mode``, ``since_ms``, ``until_ms`` (None if it was the mode at the moment),
        ``lasted_ms`` (of the last mode, up to the moment), ``trigger``, ``reason``,
        ``transition_no``, ``life_ms``, ``last_errors``, ``policy_version``, ``judged_at``,
        ``site``, ``device_class``, ``gateway``. Empty if the device had no mode.
    """
    with reading(home, READ) as tables:
        return life_of(tables, device_id, moment)


def life_of(tables: "DuckDBPyConnection", device_id: str, moment: Moment) -> list[dict[str, Any]]:
    """Like `life`, but read tables (`READ`) through an open connection."""
    known, values = _known(moment)
    changes = fetch(
        tables,
        f"""SELECT *, epoch_ms(event_time) AS at_ms, epoch_ms(life) AS life_ms, epoch_ms(last_seen) AS last_seen_ms
            FROM ({known}) WHERE device_id = ? ORDER BY event_time, coalesce(amendment_no, transition_no)""",
        [*values, device_id],
    )
    spans = [span for place, change in enumerate(changes) for span in _spans(changes[place - 1] if place else None, change)]
    registered, values = _registered(moment)
    sql = f"SELECT epoch_ms(effective_from) AS at_ms FROM ({registered}) WHERE device_id = ? ORDER BY effective_from"
    forgotten_ms = -1 if not changes else changes[-1]["at_ms"] if changes[-1]["to_mode"] == Mode.FORGOTTEN else None
    if forgotten_ms is not None:  # no transition since: a registration may have started a life
        registrations = (row["at_ms"] for row in fetch(tables, sql, [*values, device_id]) if row["at_ms"] > forgotten_ms)
        if (since_ms := next(registrations, None)) is not None:
            spans.append(_span(Mode.PROVISIONED, since_ms, reason="registered"))
    for place, span in enumerate(spans):
        span["until_ms"] = spans[place + 1]["since_ms"] if place + 1 < len(spans) else None
        end_ms = min(moment.at_ms, moment.judged_to_ms) if span["until_ms"] is None else span["until_ms"]
        span["lasted_ms"] = max(0, end_ms - span["since_ms"])
    return spans


def _spans(before: dict[str, Any] | None, change: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the mode into which a transition led, as a span.

    The first transition of a life is preceded by the initial mode of the life, if that lasted.
    """
    spans: list[dict[str, Any]] = []
    if (before is None or before["life_ms"] != change["life_ms"]) and change["life_ms"] < change["at_ms"]:
        reason = "registered" if change["from_mode"] == Mode.PROVISIONED else "imported with the initial list of devices"
        spans.append(_span(change["from_mode"], change["life_ms"], reason=reason, life_ms=change["life_ms"]))
    names = ("trigger", "transition_no", "life_ms", "policy_version", "judged_at", "site", "device_class", "gateway")
    copied = {name: change[name] for name in names}
    errors = json.loads(change["last_errors"] or "[]")
    return [
        *spans,
        _span(change["to_mode"], change["at_ms"], reason=_reason(change, errors), last_errors=change["last_errors"], **copied),
    ]


def _span(mode: str, since_ms: int, *, reason: str | None = None, **more: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(
        ("trigger", "transition_no", "life_ms", "policy_version", "judged_at", "site", "device_class", "gateway")
    )
    span = {"mode": str(mode), "since_ms": since_ms, "until_ms": None, "lasted_ms": None, "reason": reason, "last_errors": None}
    return {**span, **nothing, **more}


def _reason(change: dict[str, Any], errors: list[str]) -> str | None:
    """Return the reason of a transition for people, as emitted or from its row."""
    if change["reason"]:
        return change["reason"]
    if change["trigger"] in _BY_GATEWAY:
        return f"gateway {change['gateway']} {_BY_GATEWAY[change['trigger']]}"
    if change["trigger"] in _BY_SILENCE:
        return "never heard" if change["last_seen_ms"] is None else f"last heard {format_instant(change['last_seen_ms'])}"
    return f"last errors {', '.join(errors)}" if change["trigger"] in _BY_ERRORS and errors else None


def judged_between(home: Home) -> tuple[datetime | None, datetime | None]:
    """Return the first and newest ``judged_at``; None and None without judgements."""
    with reading(home, (JUDGEMENTS.name,)) as tables:
        found = fetch(tables, "SELECT min(judged_at) AS first, max(judged_at) AS last FROM judgements")[0]
    return found["first"], found["last"]


def first_instant_ms(home: Home, first_row_ms: int) -> int:
    """Return the first instant with data: that of the first verdict or row of bronze.

    Args:
        home: home to read.
        first_row_ms: ``received_at`` of the first row of bronze. Verdicts can be older: retention
            removes rows, but not verdicts.
    """
    with reading(home, (JUDGEMENTS.name,)) as tables:
        found = fetch(tables, "SELECT epoch_ms(min(event_time)) AS first FROM transitions")[0]["first"]
    return first_row_ms if found is None else min(found, first_row_ms)
