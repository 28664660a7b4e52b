"""Reports on transitions, unjudged messages, single devices and the lifecycle job.

Rule 1: a report computes no verdict. Deadlines of a device come from the definition
(`core.replay`).
Rule 2: if retention has removed rows of a device's life, its transitions are authoritative, not a
replay of the remaining rows.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.amendments import retracted_offline
from fleetpulse.core.device import Device
from fleetpulse.core.errors import FleetError
from fleetpulse.core.monitoring.health import THRESHOLDS
from fleetpulse.core.presence.identities import topic_of
from fleetpulse.core.presence.presence_time import clock_description
from fleetpulse.core.replay import Outcome, outcome
from fleetpulse.core.rows import SIGNALS, Row
from fleetpulse.core.tables import MESSAGES, STREAM_HEALTH, literals
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.tables.tables import fetch, query, reading
from fleetpulse.reports.device_judgements import judgements_of, reading_device
from fleetpulse.reports.frontiers import frontier_ms
from fleetpulse.reports.messages import ROW, as_row, rows_through
from fleetpulse.reports.present.devices import devices
from fleetpulse.reports.upcoming import LEADS_TO, due_of

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

_SIGNALS: Final = literals(SIGNALS)
_TRANSITION: Final = """
    device_id, life, transition_no, from_mode, to_mode, "trigger", event_time, site, device_class, gateway, last_seen,
    runtime_ms, last_errors, reason, policy_version, received_at, judged_at, kind, amendment_no
"""


def transitions(
    home: Home, device_id: str | None = None, last: int | None = None, *, everything: bool = False
) -> list[dict[str, Any]]:
    """Return transitions, in order of event time.

    Args:
        home: home to read.
        device_id: device to filter by; None: all.
        last: maximum number of transitions, the newest; None: all.
        everything: whether to return transitions, retractions and additions as emitted, instead of
            the amended transitions.
    """
    with reading(home) as tables:
        return transitions_of(tables, device_id, last, everything=everything)


def transitions_of(
    tables: "DuckDBPyConnection", device_id: str | None = None, last: int | None = None, *, everything: bool = False
) -> list[dict[str, Any]]:
    """Like `transitions`, but read judgements through an open connection."""
    where, parameters = ("WHERE device_id = ?", [device_id]) if device_id else ("", [])
    limit = f"LIMIT {int(last)}" if last is not None else ""
    order = "event_time {0}, device_id {0}, life {0}, coalesce(amendment_no, transition_no) {0}"
    source = "(SELECT * FROM judgements WHERE kind IN ('transition', 'retract', 'add'))" if everything else "transitions"
    inner = f"SELECT {_TRANSITION} FROM {source} {where} ORDER BY {order.format('DESC')} {limit}"
    return fetch(tables, f"SELECT * FROM ({inner}) ORDER BY {order.format('ASC')}", parameters)


def newest_judged_at(home: Home) -> datetime | None:
    """Return the newest ``judged_at`` of a transition; None if there is none."""
    return query(home, "SELECT max(judged_at) AS newest FROM transitions")[0]["newest"]


def transitions_since(home: Home, since: datetime | None) -> list[dict[str, Any]]:
    """Return the transitions with ``judged_at`` from an instant on, oldest first.

    None returns all.
    """
    where = "" if since is None else f"WHERE epoch_us(judged_at) >= {round(since.timestamp() * 1_000_000)}"
    return query(
        home,
        f"SELECT {_TRANSITION} FROM transitions {where} ORDER BY judged_at, event_time, device_id, transition_no, amendment_no",
    )


def unjudged(home: Home, kind: str | None = None, last: int | None = None) -> list[dict[str, Any]]:
    """Return judgements of messages that were not judged, in order of ``received_at``.

    Args:
        home: home to read.
        kind: kind of judgement to filter by; None: all.
        last: maximum number, the newest; None: all.

    Returns:
        Rows; ``messages`` is the number of messages of a row for several messages, else None.
    """
    limit = f"LIMIT {int(last)}" if last is not None else ""
    where, parameters = ("kind = ?", [kind]) if kind else ("kind NOT IN ('transition', 'summary', 'retract', 'add')", [])
    inner = f"""SELECT kind, device_id, message_kind, seq, event_time, received_at, late_by_ms, reason, site, gateway, judged_at,
                messages, event_time_until FROM judgements WHERE {where} ORDER BY received_at DESC, device_id DESC {limit}"""
    return query(home, f"SELECT * FROM ({inner}) ORDER BY received_at, device_id, event_time", parameters)


def quarantine(home: Home, last: int | None = None) -> list[dict[str, Any]]:
    """Return messages that could not be decoded, oldest first, with the kept payload as text.

    A payload with fewer bytes than ``payload_bytes`` was cut; it cannot be decoded again.
    """
    limit = f"LIMIT {int(last)}" if last is not None else ""
    columns = "received_at, topic, reason, detail, payload, payload_bytes, payload_digest, messages"
    inner = f"SELECT {columns} FROM quarantine ORDER BY received_at DESC {limit}"
    rows = query(home, f"SELECT * FROM ({inner}) ORDER BY received_at, topic", tables=["quarantine"])
    return [{**row, "payload": (row["payload"] or b"").decode(errors="backslashreplace")} for row in rows]


def site_of(home: Home, device_id: str) -> str | None:
    """Return the site of a device's newest registration or signal; None without any."""
    for name, condition in (("devices", "op = 'add'"), ("messages", f"kind IN ({_SIGNALS})")):
        sql = f"SELECT site FROM {name} WHERE device_id = ? AND {condition} ORDER BY received_at DESC LIMIT 1"
        if found := query(home, sql, [device_id], tables=[name]):
            return found[0]["site"]
    return None


def is_known(home: Home, device_id: str) -> bool:
    """Whether a device was ever registered or heard."""
    sql = "SELECT 1 FROM {0} WHERE device_id = ? LIMIT 1"
    return any(query(home, sql.format(name), [device_id], tables=[name]) for name in ("devices", "messages"))


def require_known(home: Home, device_id: str) -> None:
    """Refuse an unknown device: a typing error must not give an empty result.

    Raises:
        FleetError: the device was never registered or heard.
    """
    if not is_known(home, device_id):
        listed = f"list the devices with: ./fleet devices --home {home.path}"
        raise FleetError(f'no device "{device_id}" was registered or heard in "{home.path}"; {listed}', code="device-unknown")


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Present status of a device.

    Attributes:
        summary: facts about the device, by name.
        transitions: transitions of the device, oldest first.
        retracted_offline: retracted spans of offline, with ``since_ms`` and ``until_ms``, see
            `core.amendments.retracted_offline`.
    """

    summary: dict[str, Any]
    transitions: list[dict[str, Any]]
    retracted_offline: list[dict[str, Any]]


def device_status(home: Home, device_id: str, judged_ms: int | None) -> DeviceStatus | None:
    """Return the present status of a device; None if it was never registered or heard.

    Args:
        home: home to read.
        device_id: id of the device.
        judged_ms: ``received_at`` up to which the job has judged; None before the first batch is
            complete.
    """
    listed = devices(home, frontier_ms(home, judged_ms), device_id=device_id)
    if not listed:
        return None
    with reading_device(home, device_id) as tables:
        changes = transitions_of(tables, device_id)
        spans = retracted_offline(judgements_of(tables, [device_id])[device_id])
    kept_ms = oldest_kept_ms(home, MESSAGES.name)
    if judged_ms is None:  # the first batch is running: deadlines are not known yet
        facts: dict[str, Any] = {"judged_up_to_ms": frontier_ms(home, None)}
    else:
        judged = outcome(rows_through(home, [device_id], judged_ms), home.deployment())
        life_ms = round(changes[-1]["life"].timestamp() * 1000) if listed[0]["transitions"] else None
        if kept_ms is None or life_ms is None or kept_ms <= life_ms:
            facts = {**_reached(judged, device_id), **_known(judged, device_id), **_due(judged, device_id)}
        else:
            facts = {**_reached(judged, device_id), "life_ms": life_ms}
            if _has_valid_deadlines(judged.devices.get(device_id), changes[-1]["to_mode"], kept_ms):
                facts |= _due(judged, device_id)
    retracted = [{"since_ms": since_ms, "until_ms": until_ms} for since_ms, until_ms in spans]
    return DeviceStatus({**listed[0], **facts}, changes, retracted)


def require_status(home: Home, device_id: str, judged_ms: int | None) -> DeviceStatus:
    """Return the present status of a device, see `device_status`.

    Raises:
        FleetError: the device was never registered or heard, or has not been judged yet.
    """
    status = device_status(home, device_id, judged_ms)
    if status is None:
        require_known(home, device_id)
        raise FleetError(
            f'device "{device_id}" has not been judged yet; check the progress with: ./fleet status --home {home.path}',
            code="device-not-judged",
        )
    return status


def recent(home: Home, last: int, before_ms: int) -> list[dict[str, Any]]:
    """Return the newest landed messages, decoded or quarantined, oldest first.

    Rows that the bridge itself writes are excluded.

    Returns:
        Rows with ``received_at_ms``, ``topic``, ``payload`` (as text; of a decoded message rebuilt
        from its fields), ``row`` (None if quarantined), ``reason`` and ``detail``.
    """
    decoded = f"SELECT {ROW} FROM messages WHERE origin != 'bridge' AND epoch_ms(received_at) < ?"
    refused = """SELECT epoch_ms(received_at) AS received_at_ms, topic, payload, reason, detail FROM quarantine
                 WHERE epoch_ms(received_at) < ?"""
    order = f"ORDER BY received_at_ms DESC LIMIT {int(last)}"
    with reading(home, ("messages", "quarantine")) as tables:
        rows_ = [as_row(found) for found in fetch(tables, f"{decoded} {order}", [before_ms])]
        quarantined = fetch(tables, f"{refused} {order}", [before_ms])
    nothing: dict[str, Any] = {"row": None, "reason": None, "detail": None}
    listed = [
        {
            **nothing,
            "received_at_ms": row.received_at_ms,
            "topic": topic_of(row.device_id, row.kind.value, row.site),
            "payload": _payload(row),
            "row": row,
        }
        for row in rows_
    ]
    listed += [
        {**nothing, **one, "payload": (one["payload"] or b"")[:200].decode(errors="backslashreplace")} for one in quarantined
    ]
    return sorted(listed, key=lambda one: one["received_at_ms"])[-last:]


def _payload(row: Row) -> str:
    if row.body:
        return row.body[:200]
    content = {"ts": row.event_time_ms, "seq": row.seq, "boot": row.boot, "code": row.code}
    return json.dumps({name: value for name, value in content.items() if value is not None})


def judgements_about(home: Home, messages: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the judgements about messages: transitions, or reasons for no judgement.

    A row with ``messages`` counts several messages of its minute, which need not include any of
    these.
    """
    rows = list(messages)
    instants = [row.event_time_ms for row in rows if row.event_time_ms is not None]
    if not instants:
        return []
    return query(
        home,
        """SELECT kind, device_id, message_kind, epoch_ms(event_time) AS event_time_ms, seq, from_mode, to_mode, "trigger",
           reason, late_by_ms, messages, epoch_ms(received_at) AS received_at_ms,
           epoch_ms(coalesce(event_time_until, event_time)) AS event_time_until_ms
           FROM judgements WHERE message_kind IS NOT NULL AND kind NOT IN ('retract', 'add')
           AND event_time_until_ms >= ? AND epoch_ms(event_time) <= ? AND list_contains(?, device_id)
           ORDER BY life, transition_no""",
        [min(instants), max(instants), sorted({row.device_id for row in rows})],
    )


def _reached(judged: Outcome, device_id: str) -> dict[str, Any]:
    device = judged.devices.get(device_id)
    reached = judged.frontier_ms if device is None or judged.shards is None else judged.shards.of(device.current_site).frontier_ms
    return {"judged_up_to_ms": reached, "waiting": sum(row.device_id == device_id for row in judged.pending)}


def _known(judged: Outcome, device_id: str) -> dict[str, Any]:
    device = judged.devices.get(device_id)
    names = ("site", "device_class", "gateway", "firmware", "life_ms", "reboots", "runtime_ms", "timeout_ms", "death_grace_ms")
    names += ("degraded_until_ms", "flagged_until_ms", "held_until_ms")
    if device is None:
        return {}
    dead = {"gateway_dead_since_ms": device.outage_ms}
    clock = {"clock": clock_description(device.clock, device.clock_offset_ms), "clock_offset_ms": device.clock_offset_ms}
    if device.confirmed_ms is not None:
        names = tuple(name for name in names if name != "flagged_until_ms")  # it has no end
    review = {"held_for_review_at_ms": device.review_ms, "confirmed_at_ms": device.confirmed_ms}
    review |= {"events_in_session": device.velocity_count or None}
    return {**{name: getattr(device, name) for name in names}, **review, **dead, **clock, "speaks_from": device.speaks_from}


def _has_valid_deadlines(device: Device | None, mode: str, kept_ms: int) -> bool:
    """Whether deadlines from the retained rows are valid for a device.

    They are valid if the replayed device is in its current mode and was heard within these rows.
    Deadlines count from the last signal and the newest errors. Life and runtime are not valid even
    then.
    """
    return device is not None and device.mode == mode and (device.last_seen_ms or 0) >= kept_ms


def _due(judged: Outcome, device_id: str) -> dict[str, Any]:
    due = due_of(judged, device_id)
    return {} if due is None else {f"due_{LEADS_TO.get(due[1], due[1]).value}_at_ms": due[0]}


def newest_batches(home: Home, last: int) -> list[dict[str, Any]]:
    """Return the `stream_health` rows of the newest batches, newest first, with instants in epoch ms."""
    names = ", ".join(
        f"epoch_ms({column.name}) AS {column.name}" if column.type == "timestamp" else column.name
        for column in STREAM_HEALTH.columns
    )
    sql = f"SELECT {names} FROM stream_health ORDER BY generation DESC, batch_id DESC LIMIT {int(last)}"
    return query(home, sql, tables=[STREAM_HEALTH.name])


def health(home: Home, batches: int = 100) -> dict[str, Any] | None:
    """Return the health of the lifecycle job; None before its first batch.

    Args:
        home: home to read.
        batches: number of newest batches over which the worst value of each metric is computed.

    Returns:
        ``newest``, the row of the newest batch; ``rated``, one row for each threshold; and
        ``batches``, the number of batches read.
    """
    found = newest_batches(home, batches)
    if not found:
        return None
    rated: list[dict[str, Any]] = []
    for threshold in THRESHOLDS:
        values = [row[threshold.column] for row in found if row[threshold.column] is not None]
        newest = values[0] if values else None  # newest known value: a batch that writes nothing has no metrics of writes
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
