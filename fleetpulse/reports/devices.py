"""The fleet at present: devices with their modes, counts of devices and rows.

Rule 1: a report computes no verdict. A mode is that of the newest transition, or of the registry if
the device has none since it was forgotten (see `time_travel`).
Rule 2: an entry of the registry that takes effect after the frontier is not in force.
Rule 3: a device is last seen at the newest presence time of its signals, see
`core.presence.presence_time`.
Rule 4: the clock is that of a device's newest signal, by ``received_at``.
Rule 5: site, class and gateway are those of the entry in force, if it is newer than the newest
transition.
"""

from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.judgements import AMENDMENTS
from fleetpulse.core.policy import DEFAULT_CLASS
from fleetpulse.core.presence.presence_time import clock_description, presence_sql, trust_sql
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import SIGNALS, Trust
from fleetpulse.core.tables import DEVICES, JUDGEMENTS, MESSAGES
from fleetpulse.core.times import END_OF_TIME_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, files_of, query, reading
from fleetpulse.reports.messages import span
from fleetpulse.reports.time_travel import Moment, fleet_in

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

COUNTED: Final = ("judgements", "quarantine", "devices")
COUNT: Final = "sum(coalesce(messages, 1))::BIGINT"  # SQL: number of judgements, or of quarantined messages
_BEFORE_ALL: Final = -(2**62)  # frontier if nothing has been judged: no entry is in force
_SIGNALS: Final = ", ".join(f"'{kind.value}'" for kind in sorted(SIGNALS))
_DEVICES: Final = f"""
    WITH fleet AS ({{fleet}}),
    lives AS (SELECT device_id, life, count(*) AS in_life FROM transitions GROUP BY device_id, life),
    entries AS (
        SELECT device_id, site, coalesce(nullif(device_class, ''), '{DEFAULT_CLASS}') AS device_class,
               nullif(gateway, '') AS gateway, effective_from
        FROM devices WHERE op = 'add' AND epoch_ms(effective_from) <= {{frontier_ms}}
        QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY effective_from DESC, received_at DESC) = 1),
    ahead AS (
        SELECT device_id, min(effective_from) FILTER (op = 'add' AND epoch_ms(effective_from) > {{frontier_ms}}) AS begins,
               arg_max(site, effective_from) FILTER (op = 'add') AS site,
               arg_max(device_class, effective_from) FILTER (op = 'add') AS device_class FROM devices GROUP BY device_id),
    heard AS (
        SELECT device_id, any_value(site) AS site, count(*) AS messages, max(received_at) AS last_received,
               max({presence_sql("{lead_ms}", "{backlog_ms}", "epoch_ms")}) AS last_heard
        FROM messages WHERE kind IN ({_SIGNALS}) GROUP BY device_id),
    {{clocks}},
    doubted AS (
        SELECT device_id, arg_max(reason, received_at) AS reason FROM judgements
        WHERE kind IN ('late', 'clock', 'unknown_device') OR (kind = 'refused' AND message_kind = 'registry') GROUP BY device_id)
    SELECT device_id, coalesce(fleet.mode, 'unjudged') AS mode, fleet.since, heard.last_heard AS last_seen, heard.last_received,
           coalesce(fleet.never_seen, false) AS never_seen,
           clocks.trust AS clock, CASE WHEN clocks.trust IN ('{Trust.LATE}', '{Trust.AHEAD}', '{Trust.BEHIND}')
                THEN clocks.offset_ms END AS clock_offset_ms,
           CASE WHEN entries.effective_from >= fleet.since THEN entries.site
                ELSE coalesce(fleet.site, ahead.site, heard.site) END AS site,
           CASE WHEN entries.effective_from >= fleet.since THEN entries.device_class
                ELSE coalesce(fleet.device_class, ahead.device_class) END AS device_class,
           CASE WHEN entries.effective_from >= fleet.since THEN coalesce(entries.gateway, fleet.gateway)
                ELSE fleet.gateway END AS gateway,
           coalesce(lives.in_life, 0) AS transitions, fleet.runtime_ms, coalesce(heard.messages, 0) AS messages,
           CASE WHEN fleet.mode IS NULL THEN coalesce(
                'registered from ' || strftime(ahead.begins, '%Y-%m-%dT%H:%M:%SZ'), doubted.reason, 'waiting for the frontier')
                WHEN fleet.never_seen THEN 'never seen' END AS reason
    FROM fleet FULL JOIN ahead USING (device_id) FULL JOIN heard USING (device_id) LEFT JOIN entries USING (device_id)
    LEFT JOIN doubted USING (device_id) LEFT JOIN clocks USING (device_id)
    LEFT JOIN lives ON lives.device_id = fleet.device_id AND lives.life = fleet.life
"""


def devices(home: Home, frontier_ms: int | None, mode: str | None = None, device_id: str | None = None) -> list[dict[str, Any]]:
    """Return every device that was registered or heard, with its mode.

    A device without a mode is ``unjudged``, with the reason. ``never_seen`` is true for an offline
    device that was never heard. ``clock`` describes a wrong clock, with ``clock_offset_ms``, see
    `core.presence.presence_time`.

    Args:
        home: home to read.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
        mode: mode to filter by; None: all.
        device_id: device to filter by; None: all.
    """
    fleet, values = fleet_in(_now(frontier_ms))
    deployment = home.deployment()
    limits = {"lead_ms": deployment.max_clock_lead_ms, "backlog_ms": deployment.max_backlog_ms}
    sql = _DEVICES.format(fleet=fleet, frontier_ms=_through(frontier_ms), clocks=_clocks(deployment), **limits)
    where = "WHERE mode = ?" if mode else ""
    found = query(
        home,
        f"SELECT * FROM ({sql}) {where} ORDER BY device_id",
        [*values, mode] if mode else values,
        tables=(JUDGEMENTS.name, DEVICES.name, MESSAGES.name),
        device_id=device_id,
    )
    return [{**row, "clock": row["clock"] and clock_description(Trust(row["clock"]), row["clock_offset_ms"])} for row in found]


def _clocks(deployment: Deployment, among: str = "") -> str:
    """Return SQL for the clock of each device: class and offset of its newest signal.

    Args:
        deployment: clock lead and backlog.
        among: SQL join that limits messages to the wanted devices; empty: all.
    """
    clock = "struct_pack(kind, clock, event_time, received_at, direct := gateway IS NULL OR gateway = device_id)"
    late = "direct AND coalesce(is_late, false)"
    return f"""newest AS (
        SELECT device_id, unnest(arg_max({clock}, (received_at, coalesce(position, 0))))
        FROM messages {among} WHERE kind IN ({_SIGNALS}) GROUP BY device_id),
    belated AS (
        SELECT DISTINCT device_id, message_kind AS kind, received_at, event_time, true AS is_late FROM judgements
        WHERE kind = 'late'),
    clocks AS (
        SELECT device_id, {trust_sql(str(deployment.max_clock_lead_ms), str(deployment.max_backlog_ms), late)} AS trust,
               epoch_ms(event_time) - epoch_ms(received_at) AS offset_ms
        FROM newest LEFT JOIN belated USING (device_id, kind, received_at, event_time))"""


def clocks(home: Home) -> dict[str, int]:
    """Return the number of devices with a wrong clock, by class of the newest signal.

    See `core.presence.presence_time`. Only devices with a message that was listed as late or with a
    clock fault are read.
    """
    deployment = home.deployment()
    listed = "SELECT 1 FROM judgements WHERE kind IN ('late', 'clock') LIMIT 1"
    if not query(home, listed, tables=(JUDGEMENTS.name,)):
        return {}
    among = "SEMI JOIN (SELECT device_id FROM judgements WHERE kind IN ('late', 'clock')) AS listed USING (device_id)"
    counted = f"SELECT trust, count(*) AS n FROM clocks WHERE trust != '{Trust.ON_TIME}' GROUP BY trust ORDER BY trust"
    sql = f"WITH {_clocks(deployment, among)} {counted}"
    return {row["trust"]: row["n"] for row in query(home, sql, tables=(JUDGEMENTS.name, MESSAGES.name))}


def _through(frontier_ms: int | None) -> int:
    return _BEFORE_ALL if frontier_ms is None else int(frontier_ms)


def _now(frontier_ms: int | None) -> Moment:
    return Moment(END_OF_TIME_MS, judged_to_ms=_through(frontier_ms))


def counts(home: Home, frontier_ms: int | None) -> dict[str, Any]:
    """Return the number of devices by mode, and of rows by kind of judgement.

    Args:
        home: home to read.
        frontier_ms: event time up to which the job has judged; None if it has judged nothing yet.
    """
    with reading(home, COUNTED) as tables:
        return counts_of(home, tables, frontier_ms)


def counts_of(home: Home, tables: "DuckDBPyConnection", frontier_ms: int | None) -> dict[str, Any]:
    """Like `counts`, but read tables (`COUNTED`) through an open connection.

    Rows of bronze are counted from its log.
    """
    fleet, values = fleet_in(_now(frontier_ms))
    counted = "count(*) AS n, count(*) FILTER (never_seen) AS never_seen"
    modes = fetch(tables, f"SELECT mode, {counted} FROM ({fleet}) GROUP BY mode ORDER BY n DESC, mode", values)
    kinds = fetch(tables, f"SELECT kind, {COUNT} AS n FROM judgements WHERE kind != 'summary' GROUP BY kind ORDER BY kind")
    amended = {row["kind"]: row["n"] for row in kinds if row["kind"] in AMENDMENTS}
    transitions = fetch(tables, "SELECT to_mode AS mode, count(*) AS n FROM transitions GROUP BY to_mode ORDER BY to_mode")
    refused = fetch(tables, f"SELECT reason, {COUNT} AS n FROM quarantine GROUP BY reason ORDER BY reason")
    received_span = span(home)
    return {
        "devices": {row["mode"]: row["n"] for row in modes},
        "never_seen": sum(row["never_seen"] for row in modes),
        "transitions": {row["mode"]: row["n"] for row in transitions},
        "judgements": {row["kind"]: row["n"] for row in kinds if row["kind"] not in AMENDMENTS},
        "amended": amended,
        "messages": sum(file.rows or 0 for file in files_of(home, MESSAGES, "received_at")),
        "newest_received_at_ms": received_span[1] if received_span else None,
        "quarantine": {row["reason"]: row["n"] for row in refused},
    }
