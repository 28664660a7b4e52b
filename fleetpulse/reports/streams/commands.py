"""Commands to devices, each with its state and its first answer.

Rule 1: the stream `commands` appends rows; a report derives the state of a command from all of its rows. The first
answer counts.
Rule 2: of the rows that are read, those with one device and one id are one command: the first one gives its time, name
and payload. It is timed out if no row of it can be answered any more.
Rule 3: a command with a timeout of its own is timed out as soon as the table has a later instant, of any device: batches
of the stream are committed as a whole, in the order of receipt. `RESOLVED` has a parameter for the instant of rows that are
not read. It must come from an earlier version of the table than the rows, or be None.
"""

import json
from typing import Any, Final

from fleetpulse.core.streams.commands import CommandStatus
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query
from fleetpulse.reports.streams.newest import newest_ms

INSTANTS: Final = ("sent_at", "answered_at")  # that place a result in time; the first one that is not null counts
RESOLVED: Final = f"""
    WITH answers AS (
        SELECT device_id, command_id, count(DISTINCT (answered_at, coalesce(answer_position, 0))) AS answers,
            arg_min({{'status': status, 'answered_at': answered_at, 'reason': reason, 'reported': reported}},
                    (answered_at, coalesce(answer_position, 0))) AS first
        FROM commands WHERE sent_at IS NOT NULL AND answered_at IS NOT NULL GROUP BY ALL),
    sendings AS (
        SELECT device_id, command_id, sent_at, any_value(name) AS name, any_value(payload) AS payload, any_value(site) AS site,
            bool_or(status = '{CommandStatus.TIMED_OUT}') OR coalesce(epoch_ms(sent_at) + any_value(timeout_ms) < (
                SELECT greatest(max(epoch_ms(sent_at)), max(epoch_ms(answered_at)), ?::BIGINT) FROM commands), false) AS is_over
        FROM commands WHERE sent_at IS NOT NULL GROUP BY device_id, command_id, sent_at),
    sent AS (
        SELECT device_id, command_id, min(sent_at) AS sent_at, bool_and(is_over) AS is_over,
            arg_min({{'name': name, 'payload': payload, 'site': site}}, sent_at) AS of
        FROM sendings GROUP BY ALL)
    SELECT sent_at, device_id, command_id, of.name AS name, of.payload AS payload,
        coalesce(first.status, CASE WHEN is_over THEN '{CommandStatus.TIMED_OUT}' ELSE '{CommandStatus.PENDING}' END) AS status,
        first.answered_at AS answered_at, epoch_ms(first.answered_at) - epoch_ms(sent_at) AS latency_ms, first.reason AS reason,
        first.reported AS reported, coalesce(answers, 0) AS answers, of.site AS site
    FROM sent LEFT JOIN answers USING (device_id, command_id)
    UNION ALL BY NAME
    SELECT sent_at, device_id, command_id, status, answered_at, reason, reported, 1 AS answers, site
    FROM commands WHERE status = '{CommandStatus.UNMATCHED}'
"""


def commands(
    home: Home, device_id: str | None = None, status: CommandStatus | None = None, last: int | None = None
) -> list[dict[str, Any]]:
    """Return commands with their states, and unmatched answers, oldest first.

    Args:
        home: home to read.
        device_id: device to filter by; None: all.
        status: state to filter by; None: all.
        last: maximum number, the newest; None: all.

    Returns:
        Rows; ``payload`` and ``reported`` are objects or None, and ``answers`` is the number of answers.
    """
    order = "coalesce(sent_at, answered_at) {0}, device_id {0}, command_id {0}, answered_at {0}"
    where, values = ("WHERE status = ?", [status.value]) if status else ("", [])
    newest = None if device_id is None else newest_ms(home, COMMANDS, INSTANTS)
    limit = f"LIMIT {int(last)}" if last is not None else ""
    inner = f"SELECT * FROM ({RESOLVED}) {where} ORDER BY {order.format('DESC')} {limit}"
    found = query(
        home,
        f"SELECT * FROM ({inner}) ORDER BY {order.format('ASC')}",
        [newest, *values],
        tables=[COMMANDS.name],
        device_id=device_id,
    )
    return [{**row, **{name: _object(row[name]) for name in ("payload", "reported")}} for row in found]


def reported(home: Home, device_id: str) -> list[dict[str, Any]]:
    """Return the states that a device reported with its answers, in the order of receipt."""
    sql = "SELECT reported FROM commands WHERE device_id = ? AND reported IS NOT NULL ORDER BY answered_at, answer_position"
    found = query(home, sql, [device_id], tables=[COMMANDS.name], device_id=device_id)
    return [json.loads(row["reported"]) for row in found]


def _object(text: str | None) -> dict[str, Any] | None:
    return None if text is None else json.loads(text)
