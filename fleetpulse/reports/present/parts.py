"""Facts of every device at present, as SQL over the tables: the definition of the present fleet.

Rule 1: a report computes no verdict. A mode is that of the newest transition, or of the registry if
the device has none since it was forgotten (see `time_travel`).
Rule 2: an entry of the registry that takes effect after the frontier is not in force.
Rule 3: a device is last heard at the newest presence time of its signals, see
`core.presence.presence_time`.
Rule 4: the clock is that of a device's newest signal, by ``received_at``.
Rule 5: site, class and gateway are those of the entry in force, if it is newer than the newest
transition.
Rule 6: all facts have a total order, so that no tie depends on the order in which rows are read.

`judged_sql` has the facts of transitions and registry, `heard_sql` those of signals. `listed_sql`
shows both.
"""

from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.policy import DEFAULT_CLASS
from fleetpulse.core.presence.presence_time import presence_sql, trust_sql
from fleetpulse.core.rows import SIGNALS, Trust
from fleetpulse.core.tables import literals
from fleetpulse.core.times import END_OF_TIME_MS
from fleetpulse.reports.history.time_travel import Moment, fleet_in, only

UNJUDGED: Final = "unjudged"  # shown in place of a mode
_BEFORE_ALL: Final = -(2**62)  # frontier if nothing has been judged: no entry is in force
SIGNAL_KINDS: Final = literals(SIGNALS)
_OFFSET: Final = literals((Trust.LATE, Trust.AHEAD, Trust.BEHIND))
# SQL: judgement about a message that may show a wrong clock, or explain why a device is not judged
DOUBT: Final = f"""(kind IN ('{JudgementKind.LATE}', '{JudgementKind.CLOCK}', '{JudgementKind.UNKNOWN_DEVICE}')
    OR (kind = '{JudgementKind.REFUSED}' AND message_kind = 'registry'))"""
SAME_SIGNAL: Final = """belated.device_id = signals.device_id AND belated.kind = signal_kind
        AND belated.received_at = last_received AND belated.event_time IS NOT DISTINCT FROM signal_event_time"""

JUDGED: Final = (  # columns of `judged_sql`
    "device_id", "mode", "since", "trigger", "site", "device_class", "gateway", "last_seen", "never_seen", "runtime_ms", "life",
    "transition_no", "amendment_no", "judged_at", "transitions", "entry_from", "entry_site", "entry_class", "entry_gateway",
    "begins", "planned_site", "planned_class", "is_known",
)  # fmt: skip
HEARD: Final = (  # columns of `heard_sql`
    "device_id", "messages", "last_received", "last_heard", "signal_kind", "signal_clock", "signal_event_time",
    "signal_position",
    "signal_bridge", "signal_direct", "signal_site", "signal_late", "doubt", "doubt_received_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Frontier and settings on which the present facts depend.

    Attributes:
        frontier_ms: event time up to which the job has judged, epoch milliseconds.
        lead_ms: longest clock lead.
        backlog_ms: greatest backlog.
    """

    frontier_ms: int
    lead_ms: int
    backlog_ms: int


def through(frontier_ms: int | None) -> int:
    """Return a frontier, or an instant before all others if nothing has been judged yet."""
    return _BEFORE_ALL if frontier_ms is None else int(frontier_ms)


def now(frontier_ms: int) -> Moment:
    """Return the moment of the present: all verdicts count, and entries in force at the frontier."""
    return Moment(END_OF_TIME_MS, judged_to_ms=frontier_ms)


def judged_sql(limits: Limits, among: str = "") -> tuple[str, list[Any]]:
    """Return SQL and parameters for the facts of transitions and registry, in the columns `JUDGED`.

    Devices that were registered only for a later time have no mode. The SQL reads ``judgements``,
    its views, and ``devices``.

    Args:
        limits: frontier.
        among: table with the ids of the wanted devices; empty: all devices.
    """
    fleet, values = fleet_in(now(limits.frontier_ms), among)
    is_ahead = f"op = 'add' AND epoch_ms(effective_from) > {limits.frontier_ms}"
    newest_entry = "(effective_from, received_at)"
    sql = f"""
    WITH fleet AS ({fleet}),
    lives AS (SELECT device_id, life, count(*) AS transitions FROM transitions {only(among)} GROUP BY device_id, life),
    entries AS (
        SELECT device_id, site AS entry_site, coalesce(nullif(device_class, ''), '{DEFAULT_CLASS}') AS entry_class,
               nullif(gateway, '') AS entry_gateway, effective_from AS entry_from
        FROM devices {only(among)} WHERE op = 'add' AND epoch_ms(effective_from) <= {limits.frontier_ms}
        QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY effective_from DESC, received_at DESC) = 1),
    planned AS (
        SELECT device_id, min(effective_from) FILTER ({is_ahead}) AS begins,
               arg_max(site, {newest_entry}) FILTER (op = 'add') AS planned_site,
               arg_max(device_class, {newest_entry}) FILTER (op = 'add') AS planned_class
        FROM devices {only(among)} GROUP BY device_id)
    SELECT {", ".join(f'"{name}"' for name in JUDGED[:1])}, {", ".join(f'fleet."{name}"' for name in JUDGED[1:8])},
           coalesce(fleet.never_seen, false) AS never_seen, {", ".join(f"fleet.{name}" for name in JUDGED[9:14])},
           coalesce(lives.transitions, 0) AS transitions, {", ".join(JUDGED[15:-1])}, true AS is_known
    FROM fleet FULL JOIN planned USING (device_id) LEFT JOIN entries USING (device_id)
    LEFT JOIN lives ON lives.device_id = fleet.device_id AND lives.life = fleet.life
    """
    return sql, values


def heard_sql(limits: Limits, messages: str = "messages", judgements: str = "judgements") -> str:
    """Return SQL for the facts of signals, in the columns `HEARD`.

    Devices with doubts and no signal have a row as well.

    Args:
        limits: clock lead and backlog.
        messages: table of messages, or a query in parentheses.
        judgements: table of judgements, or a query in parentheses.
    """
    place = "(received_at, coalesce(position, 0), bridge)"
    newest = f"""max_by(struct_pack(signal_kind := kind, signal_clock := clock, signal_event_time := event_time,
        signal_position := coalesce(position, 0), signal_bridge := bridge, signal_site := site,
        signal_direct := gateway IS NULL OR gateway = device_id), {place})"""
    return f"""
    WITH counted AS (
        SELECT device_id, count(*) AS messages, max(received_at) AS last_received,
               {newest} AS newest,
               max({presence_sql(str(limits.lead_ms), str(limits.backlog_ms), "epoch_ms")}) AS last_heard
        FROM {messages} WHERE kind IN ({SIGNAL_KINDS}) GROUP BY device_id),
    signals AS (SELECT device_id, messages, last_received, last_heard, unnest(newest) FROM counted),
    belated AS ({belated_sql(judgements)}),
    doubted AS (
        SELECT device_id, max_by(reason, (received_at, reason)) AS doubt, max(received_at) AS doubt_received_at
        FROM {judgements} WHERE {DOUBT} AND received_at IS NOT NULL GROUP BY device_id)
    SELECT device_id, coalesce(messages, 0) AS messages, last_received, last_heard, signal_kind, signal_clock,
           signal_event_time, signal_position, signal_bridge, signal_direct, signal_site,
           coalesce(signal_late, false) AS signal_late, doubt, doubt_received_at
    FROM (SELECT signals.*, belated.is_late AS signal_late FROM signals LEFT JOIN belated ON {SAME_SIGNAL}) AS signals
    FULL JOIN doubted USING (device_id)
    """


def belated_sql(judgements: str) -> str:
    """Return SQL for the signals that were listed as late, each once.

    Args:
        judgements: table of judgements, or a query in parentheses.
    """
    return f"""SELECT DISTINCT device_id, message_kind AS kind, received_at, event_time, true AS is_late FROM {judgements}
        WHERE kind = '{JudgementKind.LATE}'"""


def trust_of(limits: Limits) -> str:
    """Return a SQL expression of the class of the newest signal's event time, over `HEARD`."""
    late, columns = "signal_direct AND signal_late", ("signal_clock", "signal_event_time", "last_received")
    trust = trust_sql(str(limits.lead_ms), str(limits.backlog_ms), late, *columns)
    return f"CASE WHEN signal_kind IS NOT NULL THEN {trust} END"


def listed_sql(limits: Limits, present: str, more: str = "") -> str:
    """Return SQL that shows devices: mode, times, clock, location, and the reason if there is no mode.

    Args:
        limits: clock lead and backlog.
        present: table with the columns `JUDGED` and `HEARD`, or a query in parentheses. Devices with
            doubts only are left out.
        more: further columns of ``present`` to show, as SQL.
    """
    is_newer = "entry_from >= since"
    return f"""
    SELECT device_id, coalesce(mode, '{UNJUDGED}') AS mode, since, last_heard AS last_seen, last_received, never_seen,
           trust AS clock, CASE WHEN trust IN ({_OFFSET})
                THEN epoch_ms(signal_event_time) - epoch_ms(last_received) END AS clock_offset_ms,
           CASE WHEN {is_newer} THEN entry_site ELSE coalesce(site, planned_site, signal_site) END AS site,
           CASE WHEN {is_newer} THEN entry_class ELSE coalesce(device_class, planned_class) END AS device_class,
           CASE WHEN {is_newer} THEN coalesce(entry_gateway, gateway) ELSE gateway END AS gateway,
           transitions, runtime_ms, messages,
           CASE WHEN mode IS NULL THEN coalesce(
                'registered from ' || strftime(begins, '%Y-%m-%dT%H:%M:%SZ'), doubt, 'waiting for the frontier')
                WHEN never_seen THEN 'never seen' END AS reason{f", {more}" if more else ""}
    FROM (SELECT *, {trust_of(limits)} AS trust FROM {present}
          WHERE is_known OR signal_kind IS NOT NULL)
    """
