"""The fleet at any instant, as it is known now or was known then, and one device's life up to it.

Rule 1: two instants are asked for: of when is told, and by when it had been judged. What is known now is all.
Rule 2: which verdicts count is chosen in `_known` and nowhere else: what amends them is to be heeded there.
Rule 3: a report computes no verdict: a mode is what the newest transition says, or the registry of a device that has none.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.policy import DEFAULT_CLASS
from fleetpulse.core.tables import DEVICES, JUDGEMENTS, transitions_in
from fleetpulse.core.times import END_OF_TIME_MS, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, reading

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

READ: Final = (JUDGEMENTS.name, DEVICES.name)
_BY_SILENCE: Final = frozenset({Trigger.SILENCE, Trigger.DEATH, Trigger.FORGET})
_BY_GATEWAY: Final = {Trigger.GATEWAY_DEATH: "died", Trigger.GATEWAY_RETURN: "returned"}
_BY_ERRORS: Final = frozenset({Trigger.ERRORS, Trigger.SEQUENCE})
_COLUMNS: Final = """device_id, life, transition_no, from_mode, to_mode, "trigger", event_time, site, device_class, gateway,
    last_seen, never_seen, runtime_ms, last_errors, reason, policy_version, judged_at, amendment_no"""
_NEWEST: Final = "event_time DESC, coalesce(amendment_no, transition_no) DESC"


@dataclass(frozen=True, slots=True)
class Moment:
    """What is asked for. Instants are epoch milliseconds.

    Attributes:
        at_ms: of when.
        known_ms: by when it had been judged, or received where the registry says it.
        judged_to_ms: up to where was judged by then: a registration that lies behind it has not taken effect.
    """

    at_ms: int
    known_ms: int = END_OF_TIME_MS
    judged_to_ms: int = END_OF_TIME_MS


def _known(moment: Moment) -> tuple[str, list[Any]]:
    """Return the transitions that count at a moment, as SQL with its parameters: all that was judged by then, of up to then.

    A verdict that was taken back, or one that was put in later, counts or not by when that was said.
    """
    said = f"(SELECT * FROM judgements WHERE epoch_ms(judged_at) <= {int(moment.known_ms)})"
    return f"SELECT {_COLUMNS} FROM ({transitions_in(said)}) WHERE epoch_ms(event_time) <= ?", [moment.at_ms]


def _registered(moment: Moment) -> tuple[str, list[Any]]:
    """Return the registrations in effect at a moment, but for the refused, as SQL with its parameters."""
    sql = """SELECT device_id, site, device_class, gateway, effective_from FROM devices
             WHERE op = 'add' AND epoch_ms(effective_from) <= ? AND epoch_ms(received_at) <= ?
             AND (device_id, effective_from, received_at) NOT IN (SELECT (device_id, event_time, received_at) FROM refusals
             WHERE message_kind = 'registry' AND event_time IS NOT NULL AND received_at IS NOT NULL)"""
    return sql, [min(moment.at_ms, moment.judged_to_ms), moment.known_ms]


def fleet(home: Home, moment: Moment) -> list[dict[str, Any]]:
    """Return every device that had a mode at a moment, by id; one that nobody registered and that was not judged has none."""
    with reading(home, READ) as tables:
        return fleet_of(tables, moment)


def fleet_of(tables: "DuckDBPyConnection", moment: Moment) -> list[dict[str, Any]]:
    """Return what `fleet` does, from tables (`READ`) that are open."""
    sql, values = fleet_in(moment)
    return fetch(tables, f"{sql} ORDER BY device_id", values)


def fleet_in(moment: Moment) -> tuple[str, list[Any]]:
    """Return what selects the devices that have a mode at a moment, as SQL with its parameters."""
    known, known_values = _known(moment)
    registered, registered_values = _registered(moment)
    sql = f"""
    WITH known AS ({known}),
    newest AS MATERIALIZED (SELECT * FROM known QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY {_NEWEST}) = 1),
    registrations AS ({registered}),
    begun AS MATERIALIZED (
        SELECT registrations.* FROM registrations LEFT JOIN newest USING (device_id) WHERE newest.to_mode IS NULL
        OR (newest.to_mode = 'forgotten' AND registrations.effective_from > newest.event_time))
    SELECT device_id, to_mode AS mode, event_time AS since, "trigger", site, device_class, gateway, last_seen, never_seen,
           runtime_ms, life, transition_no, judged_at FROM newest WHERE device_id NOT IN (SELECT device_id FROM begun)
    UNION ALL BY NAME
    SELECT device_id, 'provisioned' AS mode, false AS never_seen, min(effective_from) AS since,
           arg_max(site, effective_from) AS site,
           coalesce(arg_max(nullif(device_class, ''), effective_from), '{DEFAULT_CLASS}') AS device_class,
           arg_max(gateway, effective_from) AS gateway FROM begun GROUP BY device_id
    """
    return sql, [*known_values, *registered_values]


def life(home: Home, device_id: str, moment: Moment) -> list[dict[str, Any]]:
    """Return a device's modes up to a moment, oldest first, over all its lives; none where it had none.

    Returns:
        ``mode``, ``since_ms``, ``until_ms`` (None: it still had it), ``lasted_ms`` (of the last one up to the moment),
        ``trigger``, ``reason``, ``transition_no``, ``life_ms``, ``last_errors``, ``policy_version``, ``judged_at``.
    """
    with reading(home, READ) as tables:
        return life_of(tables, device_id, moment)


def life_of(tables: "DuckDBPyConnection", device_id: str, moment: Moment) -> list[dict[str, Any]]:
    """Return what `life` does, from tables (`READ`) that are open."""
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
    if forgotten_ms is not None:  # no life is known that a signal began since: the registry may have begun one
        begun = (row["at_ms"] for row in fetch(tables, sql, [*values, device_id]) if row["at_ms"] > forgotten_ms)
        if (since_ms := next(begun, None)) is not None:
            spans.append(_span(Mode.PROVISIONED, since_ms, reason="registered"))
    for place, span in enumerate(spans):
        span["until_ms"] = spans[place + 1]["since_ms"] if place + 1 < len(spans) else None
        end_ms = min(moment.at_ms, moment.judged_to_ms) if span["until_ms"] is None else span["until_ms"]
        span["lasted_ms"] = max(0, end_ms - span["since_ms"])
    return spans


def _spans(before: dict[str, Any] | None, change: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the mode that a transition led to; before the first of a life the one with which that begins, if it lasted."""
    spans: list[dict[str, Any]] = []
    if (before is None or before["life_ms"] != change["life_ms"]) and change["life_ms"] < change["at_ms"]:
        reason = "registered" if change["from_mode"] == Mode.PROVISIONED else "in a list of devices that the fleet began with"
        spans.append(_span(change["from_mode"], change["life_ms"], reason=reason, life_ms=change["life_ms"]))
    names = ("trigger", "transition_no", "life_ms", "policy_version", "judged_at", "site", "device_class", "gateway")
    told = {name: change[name] for name in names}
    errors = json.loads(change["last_errors"] or "[]")
    return [
        *spans,
        _span(change["to_mode"], change["at_ms"], reason=_reason(change, errors), last_errors=change["last_errors"], **told),
    ]


def _span(mode: str, since_ms: int, *, reason: str | None = None, **more: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(
        ("trigger", "transition_no", "life_ms", "policy_version", "judged_at", "site", "device_class", "gateway")
    )
    span = {"mode": str(mode), "since_ms": since_ms, "until_ms": None, "lasted_ms": None, "reason": reason, "last_errors": None}
    return {**span, **nothing, **more}


def _reason(change: dict[str, Any], errors: list[str]) -> str | None:
    """Say why, in words: as it was said, or from what stands in the row."""
    if change["reason"]:
        return change["reason"]
    if change["trigger"] in _BY_GATEWAY:
        return f"gateway {change['gateway']} {_BY_GATEWAY[change['trigger']]}"
    if change["trigger"] in _BY_SILENCE:
        return "never heard" if change["last_seen_ms"] is None else f"last heard {format_instant(change['last_seen_ms'])}"
    return f"last errors {', '.join(errors)}" if change["trigger"] in _BY_ERRORS and errors else None


def judged_between(home: Home) -> tuple[datetime | None, datetime | None]:
    """Return when the job said something first and last; None and None where it never did."""
    with reading(home, (JUDGEMENTS.name,)) as tables:
        found = fetch(tables, "SELECT min(judged_at) AS first, max(judged_at) AS last FROM judgements")[0]
    return found["first"], found["last"]


def begun_ms(home: Home, first_row_ms: int) -> int:
    """Return the first instant of which anything is known: of the first verdict, or of the first row of bronze.

    Args:
        home: the home.
        first_row_ms: ``received_at`` of the first row that bronze has: it may have lost older ones, and verdicts stay.
    """
    with reading(home, (JUDGEMENTS.name,)) as tables:
        found = fetch(tables, "SELECT epoch_ms(min(event_time)) AS first FROM transitions")[0]["first"]
    return first_row_ms if found is None else min(found, first_row_ms)
