"""Fold of new rows into kept facts of the devices.

The result equals the definition (`parts`) over all rows, at a cost that depends on the new rows.

Rule 1: a device whose history changed is read anew by the definition, from all its rows: it was
amended, forgotten or started a second life, a transition is not newer than the kept one, or the
registry has an entry that is new, was refused, or takes effect after the kept frontier.
Rule 2: of all other devices the newest row wins, and counts are added.
Rule 3: signals are only added. Facts of rows that retention has removed since remain.

The SQL reads these tables of a connection: ``kept`` (columns `KEPT`), the new rows
``new_judgements``, ``new_devices`` and ``new_messages``, and all rows: ``judgements``, its views, and
``devices``.
"""

from typing import TYPE_CHECKING, Final

from fleetpulse.core.judgements import CHANGES, JudgementKind
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.tables import literals
from fleetpulse.reports.history.time_travel import only
from fleetpulse.reports.present.parts import HEARD, JUDGED, SAME_SIGNAL, Limits, belated_sql, heard_sql, judged_sql

if TYPE_CHECKING:
    from fleetpulse.io.tables.tables import DuckDBPyConnection

KEPT: Final = (*JUDGED, *HEARD[1:])  # columns of the kept facts
REREAD: Final = "reread"  # table with the ids of the devices that are read anew
_ANEW: Final = "read_anew"  # table with their facts
_CHANGED: Final = "changed"  # table with the new transitions of the other devices, one row a device
_CHANGES: Final = literals(CHANGES)
_ORDER: Final = "(event_time, transition_no)"
_OF_TRANSITION: Final = (  # columns of a transition, by name in `JUDGED`
    ("mode", "to_mode"), ("since", "event_time"), ("trigger", '"trigger"'), ("site", "site"), ("device_class", "device_class"),
    ("gateway", "gateway"), ("last_seen", "last_seen"),
    ("never_seen", f"to_mode = '{Mode.OFFLINE}' AND last_seen IS NULL"), ("runtime_ms", "runtime_ms"), ("life", "life"),
    ("transition_no", "transition_no"), ("amendment_no", "amendment_no"), ("judged_at", "judged_at"),
)  # fmt: skip


def named(kept_frontier_ms: int, limits: Limits) -> str:
    """Return SQL for the ids of all devices whose kept facts `prepare` and `judged` may read.

    Args:
        kept_frontier_ms: frontier of the kept facts, epoch milliseconds.
        limits: frontier of the present.
    """
    return f"""SELECT device_id FROM new_judgements
        WHERE kind IN ({_CHANGES}) OR (kind = '{JudgementKind.REFUSED}' AND message_kind = 'registry')
        UNION SELECT device_id FROM new_devices
        UNION SELECT device_id FROM devices WHERE epoch_ms(effective_from) > {min(kept_frontier_ms, limits.frontier_ms)}"""


def prepare(connection: "DuckDBPyConnection", kept_frontier_ms: int, limits: Limits, among: str = "") -> int:
    """Create the tables that `judged` reads: the devices to read anew, and the new transitions of others.

    Args:
        connection: connection with ``kept``, the new rows and ``devices``.
        kept_frontier_ms: frontier of the kept facts, epoch milliseconds.
        limits: frontier of the present.
        among: table with the ids of the wanted devices; empty: all devices.

    Returns:
        Number of devices to read anew; unless it is 0, call `read_anew`.
    """
    newest = ", ".join(f"{name} := {column}" for name, column in _OF_TRANSITION)
    connection.execute(f"""CREATE OR REPLACE TEMP TABLE {_CHANGED} AS
        SELECT device_id, unnest(newest), transitions, oldest, oldest_no, is_amended, lives FROM (
        SELECT device_id, max_by(struct_pack({newest}), {_ORDER}) AS newest, count(*) AS transitions,
               min({_ORDER}) AS oldest, min(transition_no) AS oldest_no,
               bool_or(kind != '{JudgementKind.TRANSITION}') AS is_amended,
               count(DISTINCT life) AS lives
        FROM new_judgements {only(among)} WHERE kind IN ({_CHANGES}) GROUP BY device_id)""")
    kept = ", ".join(f"kept.{name} AS kept_{name}" for name in ("since", "life", "transition_no", "amendment_no"))
    newer = "oldest > (kept_since, coalesce(kept_amendment_no, kept_transition_no, 0))"
    connection.execute(f"""CREATE OR REPLACE TEMP TABLE {REREAD} AS
        SELECT device_id FROM (SELECT changed.*, {kept} FROM {_CHANGED} AS changed LEFT JOIN kept USING (device_id))
        WHERE is_amended OR lives > 1 OR mode = '{Mode.FORGOTTEN}' OR NOT (kept_since IS NULL OR {newer})
              OR NOT (kept_life IS NULL OR kept_life = life OR oldest_no = 1)
        UNION SELECT device_id FROM new_judgements {only(among)}
            WHERE kind = '{JudgementKind.REFUSED}' AND message_kind = 'registry'
        UNION SELECT device_id FROM new_devices {only(among)}
        UNION SELECT device_id FROM devices {only(among)}
            WHERE epoch_ms(effective_from) > {min(kept_frontier_ms, limits.frontier_ms)}""")
    connection.execute(f"DELETE FROM {_CHANGED} WHERE device_id IN (FROM {REREAD})")
    nothing = ", ".join(f'"{name}"' for name in JUDGED)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE {_ANEW} AS SELECT {nothing} FROM kept LIMIT 0")
    [(count,)] = connection.execute(f"SELECT count(*) FROM {REREAD}").fetchall()
    return count


def read_anew(connection: "DuckDBPyConnection", limits: Limits) -> None:
    """Read devices anew by the definition; ``judgements``, its views and ``devices`` must be open."""
    sql, values = judged_sql(limits, REREAD)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE {_ANEW} AS {sql}", values)


def judged(among: str = "") -> str:
    """Return SQL for the facts of transitions and registry, in the columns `JUDGED`.

    `prepare` must have run.

    Args:
        among: table with the ids of the wanted devices; empty: all devices.
    """
    of_registry = JUDGED[JUDGED.index("entry_from") : -1]
    of_transition = ", ".join(f'changed."{name}"' for name, _ in _OF_TRANSITION)
    names = ", ".join(f'"{name}"' for name in JUDGED)
    return f"""
    SELECT {names} FROM kept {only(among)} WHERE is_known
        AND device_id NOT IN (SELECT device_id FROM {_CHANGED} UNION ALL FROM {REREAD})
    UNION ALL BY NAME
    SELECT changed.device_id, {of_transition},
           changed.transitions + CASE WHEN kept.life = changed.life THEN kept.transitions ELSE 0 END AS transitions,
           {", ".join(f"kept.{name}" for name in of_registry)}, true AS is_known
    FROM (FROM {_CHANGED} {only(among)}) AS changed LEFT JOIN (FROM kept {only(among)}) AS kept USING (device_id)
    UNION ALL BY NAME SELECT {names} FROM {_ANEW} {only(among)}
    """


def new_devices() -> str:
    """Return SQL for the ids of the devices with new facts of transitions and registry; `prepare` must have run."""
    return f"SELECT device_id FROM {_CHANGED} UNION SELECT device_id FROM {_ANEW}"


def heard(limits: Limits, among: str = "", messages: str = "new_messages") -> str:
    """Return SQL for the facts of signals, in the columns `HEARD`.

    Args:
        limits: clock lead and backlog.
        among: table with the ids of the wanted devices; empty: all devices.
        messages: table of the new messages, or a query in parentheses.
    """
    new = heard_sql(limits, f"(FROM {messages} {only(among)})", f"(FROM new_judgements {only(among)})")
    of_signal = HEARD[HEARD.index("signal_kind") : HEARD.index("signal_late")]
    is_kept = "new.last_received IS NULL"
    facts = ", ".join(f"CASE WHEN {is_kept} THEN kept.{name} ELSE new.{name} END AS {name}" for name in of_signal)
    is_newer = "new.doubt_received_at IS NOT NULL AND (kept.doubt_received_at IS NULL OR "
    is_newer += "(new.doubt_received_at, new.doubt) >= (kept.doubt_received_at, kept.doubt))"
    return f"""
    WITH new AS ({new}), belated AS ({belated_sql(f"(FROM new_judgements {only(among)})")}),
    before AS (
        SELECT signals.* REPLACE (signal_late OR belated.is_late IS NOT NULL AS signal_late)
        FROM (SELECT {", ".join(HEARD)} FROM kept {only(among)}) AS signals LEFT JOIN belated ON {SAME_SIGNAL})
    SELECT device_id, coalesce(kept.messages, 0) + coalesce(new.messages, 0) AS messages,
           greatest(kept.last_received, new.last_received) AS last_received,
           greatest(kept.last_heard, new.last_heard) AS last_heard, {facts},
           coalesce(CASE WHEN {is_kept} THEN kept.signal_late ELSE new.signal_late END, false) AS signal_late,
           CASE WHEN {is_newer} THEN new.doubt ELSE kept.doubt END AS doubt,
           CASE WHEN {is_newer} THEN new.doubt_received_at ELSE kept.doubt_received_at END AS doubt_received_at
    FROM before AS kept FULL JOIN new USING (device_id)
    """


def joined(judged_facts: str, heard_facts: str) -> str:
    """Return SQL that joins the facts of transitions with those of signals, in the columns `KEPT`.

    Args:
        judged_facts: SQL with the columns `JUDGED`.
        heard_facts: SQL with the columns `HEARD`.
    """
    facts = {**{name: f'judged."{name}"' for name in JUDGED[1:]}, **{name: f"heard.{name}" for name in HEARD[1:]}}
    facts["is_known"] = "coalesce(judged.is_known, false)"
    facts |= {name: f"coalesce({facts[name]}, {none})" for name, none in (("transitions", "0"), ("messages", "0"))}
    facts |= {name: f"coalesce({facts[name]}, false)" for name in ("never_seen", "signal_late")}
    columns = ", ".join(f'{expression} AS "{name}"' for name, expression in facts.items())
    return f"SELECT device_id, {columns} FROM ({judged_facts}) AS judged FULL JOIN ({heard_facts}) AS heard USING (device_id)"
