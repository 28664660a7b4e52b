"""Audited actions: the records of the table ``audit``, one row for each action."""

from typing import Any, Final

from fleetpulse.core.tables import AUDIT
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query

UNFINISHED: Final = "unfinished"  # no record of the end: the action still runs, or was killed
_ACTIONS: Final = f"""
    SELECT min(recorded_at) AS began_at, max(recorded_at) AS last_at, id,
        any_value(os_user) AS os_user, any_value(asked_by) AS asked_by,
        any_value(host) AS host, any_value(address) AS address, any_value(action) AS action,
        any_value(arguments) AS arguments, coalesce(any_value(result), '{UNFINISHED}') AS result,
        any_value(duration_ms) AS duration_ms
    FROM {AUDIT.name} GROUP BY id
"""


def audited_actions(
    home: Home,
    last: int | None = None,
    *,
    since_ms: int | None = None,
    actor: str | None = None,
    action: str | None = None,
) -> list[dict[str, Any]]:
    """Return the audited actions of a home, oldest first.

    Args:
        home: home of the table.
        last: number of newest actions; None returns all of them.
        since_ms: least instant of an action's last record (its end or its beginning), epoch milliseconds.
        actor: user of the operating system, or user named by the requester.
        action: name of an action, or its first words.
    """
    conditions: list[str] = []
    values: list[Any] = []
    for condition, found in (
        ("epoch_ms(last_at) >= ?", since_ms),
        ("(os_user = ? OR asked_by = ? OR starts_with(asked_by, ? || ', '))", actor),
        ("(action = ? OR starts_with(action, ? || ' '))", action),
    ):
        if found is not None:
            conditions.append(condition)
            values += [found] * condition.count("?")
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    limit = "" if last is None else f"LIMIT {last}"
    sql = f"SELECT * EXCLUDE (last_at) FROM ({_ACTIONS}) {where} ORDER BY began_at DESC, id {limit}"
    return query(home, sql, values, tables=[AUDIT.name])[::-1]
