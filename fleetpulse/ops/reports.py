"""Reports: what came of the messages, read from the tables of a home.

Rule: a report computes no verdict. What is due for a device is asked of the definition (`core.replay`).
"""

import json
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from fleetpulse.columnar.blocks import ROW_SCHEMA, batch_to_rows
from fleetpulse.core.device import World, next_due
from fleetpulse.core.health import THRESHOLDS
from fleetpulse.core.machine import Trigger
from fleetpulse.core.messages import EVERYONE, SIGNALS, Clock, Kind, Row
from fleetpulse.core.replay import Outcome, outcome
from fleetpulse.core.tables import STREAM_HEALTH
from fleetpulse.core.times import format_instant
from fleetpulse.io.delta import query
from fleetpulse.io.home import Home

_SIGNALS: Final = ", ".join(f"'{kind.value}'" for kind in sorted(SIGNALS))
_NEWEST_OF_DEVICE: Final = """
    SELECT * FROM transitions
    QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY life DESC, transition_no DESC) = 1
"""
_TRANSITION: Final = """
    device_id, life, transition_no, from_mode, to_mode, "trigger", event_time, site, device_class, gateway, last_seen,
    runtime_ms, last_errors, reason, policy_version, received_at, judged_at
"""


def transitions(home: Home, device_id: str | None = None, last: int | None = None) -> list[dict[str, Any]]:
    """Return transitions, in order of event time.

    Args:
        home: the home.
        device_id: of this device only.
        last: only so many, the newest.
    """
    where, parameters = ("WHERE device_id = ?", [device_id]) if device_id else ("", [])
    limit = f"LIMIT {int(last)}" if last is not None else ""
    order = "event_time {0}, device_id {0}, life {0}, transition_no {0}"
    inner = f"SELECT {_TRANSITION} FROM transitions {where} ORDER BY {order.format('DESC')} {limit}"
    return query(home, f"SELECT * FROM ({inner}) ORDER BY {order.format('ASC')}", parameters)


def transitions_since(home: Home, version: int | None) -> list[dict[str, Any]]:
    """Return the transitions judged after an instant of `judged_at` (epoch microseconds), oldest first."""
    where = "" if version is None else f"WHERE epoch_us(judged_at) > {int(version)}"
    return query(home, f"SELECT {_TRANSITION} FROM transitions {where} ORDER BY judged_at, event_time, device_id, transition_no")


def late(home: Home, last: int | None = None) -> list[dict[str, Any]]:
    """Return late messages, in the order in which they were received."""
    return _unjudged(home, "late_events", last)


def _unjudged(home: Home, reading: str, last: int | None) -> list[dict[str, Any]]:
    limit = f"LIMIT {int(last)}" if last is not None else ""
    inner = f"""SELECT device_id, message_kind, seq, event_time, received_at, late_by_ms, reason, site, gateway, judged_at
                FROM {reading} ORDER BY received_at DESC, device_id DESC {limit}"""
    return query(home, f"SELECT * FROM ({inner}) ORDER BY received_at, device_id, event_time")


def quarantine(home: Home, last: int | None = None) -> list[dict[str, Any]]:
    """Return what could not be decoded, oldest first, with the payload as text."""
    limit = f"LIMIT {int(last)}" if last is not None else ""
    inner = f"SELECT received_at, topic, reason, detail, payload FROM quarantine ORDER BY received_at DESC {limit}"
    rows = query(home, f"SELECT * FROM ({inner}) ORDER BY received_at, topic", tables=["quarantine"])
    return [{**row, "payload": (row["payload"] or b"").decode(errors="backslashreplace")} for row in rows]


def devices(home: Home, mode: str | None = None) -> list[dict[str, Any]]:
    """Return every device that was registered or heard, with its mode; ``unjudged`` with the reason where none was judged."""
    sql = f"""
    WITH newest AS ({_NEWEST_OF_DEVICE}),
    registered AS (SELECT * FROM devices QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY effective_from DESC,
                   received_at DESC) = 1),
    heard AS (SELECT device_id, any_value(site) site, count(*) AS messages, max(event_time) FILTER (WHERE clock != 'invalid'
              AND event_time <= received_at + INTERVAL 1 DAY) AS last_heard, max(received_at) AS last_received
              FROM messages WHERE kind IN ({_SIGNALS}) GROUP BY device_id),
    doubted AS (SELECT device_id, arg_max(reason, received_at) AS reason FROM judgements WHERE kind IN ('late', 'clock',
                'unknown_device') GROUP BY device_id)
    SELECT device_id,
           coalesce(newest.to_mode, CASE WHEN registered.op = 'add' THEN 'provisioned' ELSE 'unjudged' END) AS mode,
           newest.event_time AS since, heard.last_heard AS last_seen, heard.last_received,
           coalesce(newest.site, registered.site, heard.site) AS site,
           coalesce(newest.device_class, registered.device_class) AS device_class, newest.gateway,
           coalesce(newest.transition_no, 0) AS transitions, newest.runtime_ms, coalesce(heard.messages, 0) AS messages,
           CASE WHEN newest.to_mode IS NULL AND registered.op IS NULL
                THEN coalesce(doubted.reason, 'waiting for the frontier') END AS reason
    FROM newest FULL JOIN registered USING (device_id) FULL JOIN heard USING (device_id) LEFT JOIN doubted USING (device_id)
    """
    where = "WHERE mode = ?" if mode else ""
    return query(
        home,
        f"SELECT * FROM ({sql}) {where} ORDER BY device_id",
        [mode] if mode else [],
        tables=["judgements", "devices", "messages"],
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """One device as it stands.

    Attributes:
        summary: what is known of it, by name.
        transitions: its transitions, oldest first.
    """

    summary: dict[str, Any]
    transitions: list[dict[str, Any]]


def standing(home: Home, device_id: str, judged_ms: int | None) -> Standing | None:
    """Return how a device stands: last seen, due offline at, judged up to; None where it was never heard of.

    Args:
        home: the home.
        device_id: the device.
        judged_ms: ``received_at`` up to which the job has judged.
    """
    listed = [row for row in devices(home) if row["device_id"] == device_id]
    if not listed:
        return None
    told = outcome(_rows(home, device_id, judged_ms), home.deployment())
    return Standing({**listed[0], **_due(told, device_id)}, transitions(home, device_id))


def frontier_ms(home: Home, judged_ms: int | None) -> int | None:
    """Return the frontier of what has been judged, in epoch milliseconds."""
    if judged_ms is None:
        return None
    told = outcome(_rows(home, EVERYONE, judged_ms), home.deployment())
    return told.listening.frontier_ms if told.listening else None


def _rows(home: Home, device_id: str, judged_ms: int | None) -> list[Row]:
    """Return a device's rows and those for everybody, as far as is judged; two ticks stand for how far we have listened."""
    span = query(home, "SELECT epoch_ms(min(received_at)) a, epoch_ms(max(received_at)) z FROM messages", tables=["messages"])
    first_ms, last_ms = span[0]["a"], span[0]["z"]
    if first_ms is None:
        return []
    through_ms = last_ms if judged_ms is None else min(judged_ms, last_ms)
    ticks = [Row(at, Kind.TICK, EVERYONE, EVERYONE, at, Clock.RECEIVED) for at in (first_ms, through_ms)]
    return [row for row in rows(home, device_id) if row.received_at_ms <= through_ms] + ticks


def rows(home: Home, device_id: str | None = None) -> list[Row]:
    """Return the rows of bronze: all, or those of a device and those that concern everybody but ticks."""
    names = ", ".join(
        f"epoch_ms({name.removesuffix('_ms')}) AS {name}" if name in ("received_at_ms", "event_time_ms") else name
        for name in ROW_SCHEMA.names
    )
    where = "" if device_id is None else "WHERE device_id = ? OR kind IN ('gap', 'policy')"
    found = query(home, f"SELECT {names} FROM messages {where}", [] if device_id is None else [device_id], tables=["messages"])
    return batch_to_rows(pa.Table.from_pylist(found, schema=ROW_SCHEMA))


def _due(told: Outcome, device_id: str) -> dict[str, Any]:
    device, listening = told.devices.get(device_id), told.listening
    facts: dict[str, Any] = {"judged_up_to_ms": listening.frontier_ms if listening else None}
    facts["waiting"] = sum(row.device_id == device_id for row in told.waiting)
    if device is None or listening is None:
        return facts
    due = next_due(device, World(listening.coverage, told.policies))
    facts |= {"life_ms": device.life_ms, "reboots": device.reboots, "runtime_ms": device.runtime_ms}
    facts |= {"degraded_until_ms": device.degraded_until_ms, "flagged_until_ms": device.flagged_until_ms}
    facts |= {"held_until_ms": device.held_until_ms}
    if due is not None:
        name = "due_offline_at_ms" if due[1] in (Trigger.SILENCE, Trigger.DEATH) else f"due_{due[1].value}_at_ms"
        facts[name] = due[0]
    return facts


def health(home: Home, batches: int = 100) -> dict[str, Any] | None:
    """Return how the lifecycle job fares; None before its first batch.

    Args:
        home: the home.
        batches: over how many batches, the newest, the worst of each figure is told.

    Returns:
        ``newest``, the row of the newest batch, and ``rated``, a row for each threshold.
    """
    names = ", ".join(
        f"epoch_ms({column.name}) AS {column.name}" if column.type == "timestamp" else column.name
        for column in STREAM_HEALTH.columns
    )
    sql = f"SELECT {names} FROM stream_health ORDER BY began_at DESC, batch_id DESC LIMIT {int(batches)}"
    found = query(home, sql, tables=[STREAM_HEALTH.name])
    if not found:
        return None
    rated: list[dict[str, Any]] = []
    for threshold in THRESHOLDS:
        values = [row[threshold.column] for row in found if row[threshold.column] is not None]
        newest = values[0] if values else None  # the newest known: a batch that writes nothing says nothing of writing
        rated.append(
            {
                "metric": threshold.metric,
                "column": threshold.column,
                "value": newest,
                "worst": max(values, default=None),
                "good_below": threshold.good_below,
                "critical_above": threshold.critical_above,
                "rating": threshold.rate(newest),
            }
        )
    return {"newest": _newest_batch(found[0]), "rated": rated, "batches": len(found)}


def _newest_batch(row: dict[str, Any]) -> dict[str, Any]:
    shown = dict(row)
    for column in STREAM_HEALTH.columns:
        value = row[column.name]
        if column.type == "timestamp" and value is not None:
            shown[column.name] = format_instant(value)
    for name in ("devices", "judgements", "source_offset"):
        shown[name] = json.loads(row[name]) if row[name] else None
    return shown


def counts(home: Home) -> dict[str, Any]:
    """Return how many devices are in which mode, and how many rows there are of each kind of judgement."""
    modes = query(home, f"SELECT to_mode AS mode, count(*) AS n FROM ({_NEWEST_OF_DEVICE}) GROUP BY to_mode ORDER BY n DESC")
    kinds = query(home, "SELECT kind, count(*) AS n FROM judgements WHERE kind != 'summary' GROUP BY kind ORDER BY kind")
    became = query(home, "SELECT to_mode AS mode, count(*) AS n FROM transitions GROUP BY to_mode ORDER BY to_mode")
    landed = query(home, "SELECT count(*) AS n, epoch_ms(max(received_at)) AS newest FROM messages", tables=["messages"])
    refused = query(home, "SELECT reason, count(*) AS n FROM quarantine GROUP BY reason ORDER BY reason", tables=["quarantine"])
    silent = query(
        home,
        """SELECT count(*) AS n FROM (SELECT device_id, arg_max(op, effective_from) AS op FROM devices GROUP BY device_id)
           WHERE op = 'add' AND device_id NOT IN (SELECT device_id FROM transitions)""",
        tables=["devices", "judgements"],
    )
    by_mode = {row["mode"]: row["n"] for row in modes}
    if silent[0]["n"]:
        by_mode["provisioned"] = by_mode.get("provisioned", 0) + silent[0]["n"]
    return {
        "devices": by_mode,
        "transitions": {row["mode"]: row["n"] for row in became},
        "judgements": {row["kind"]: row["n"] for row in kinds},
        "messages": landed[0]["n"],
        "newest_received_at_ms": landed[0]["newest"],
        "quarantine": {row["reason"]: row["n"] for row in refused},
    }
