"""Commands and their answers by SQL over bronze, independent of the stream: one full join of all rows."""

import json
from collections import Counter
from typing import Any

from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.commands import CLOCK_LEAD_MS
from fleetpulse.io.tables import tables


def commands_sql(answer_ms: int) -> str:
    """Return the query of the rows of the table ``commands`` that follow from ``messages`` when every timeout has passed.

    Args:
        answer_ms: time after which a command has timed out, milliseconds.
    """
    return f"""
    WITH sent AS (
        SELECT received_at AS sent_at, device_id, site, body->>'$.id' AS command_id, body->>'$.name' AS name,
            CAST(body->'$.payload' AS VARCHAR) AS payload, CAST(body->>'$.timeout_ms' AS BIGINT) AS timeout_ms
        FROM messages WHERE kind = 'control' AND body->>'$.op' = 'command'),
    answers AS (
        SELECT received_at AS answered_at, device_id AS answered_by, site AS answer_site, position, body->>'$.id' AS answered,
            body->>'$.status' AS answer, body->>'$.reason' AS reason, CAST(body->'$.reported' AS VARCHAR) AS reported
        FROM messages WHERE kind = 'ack' AND body IS NOT NULL),
    joined AS (
        SELECT * FROM sent FULL JOIN answers ON device_id = answered_by AND command_id = answered
            AND answered_at >= sent_at - INTERVAL {CLOCK_LEAD_MS} MILLISECONDS
            AND answered_at <= sent_at + INTERVAL {answer_ms} MILLISECONDS
            AND epoch_ms(answered_at) - epoch_ms(sent_at) <= coalesce(timeout_ms, {answer_ms}))
    SELECT coalesce(device_id, answered_by) AS device_id, sent_at, answered_at, coalesce(command_id, answered) AS command_id,
        CASE WHEN sent_at IS NULL THEN 'unmatched' WHEN answered_at IS NULL THEN 'timed_out'
             WHEN answer = 'accepted' THEN 'acknowledged' ELSE 'rejected' END AS status,
        name, payload, epoch_ms(answered_at) - epoch_ms(sent_at) AS latency_ms, reason, reported, position AS answer_position,
        coalesce(site, answer_site) AS site, timeout_ms
    FROM joined
    UNION ALL BY NAME
    SELECT sent_at, device_id, site, command_id, name, payload, timeout_ms, 'pending' AS status FROM sent
"""


def found(home: Home, sql: str) -> Counter[str]:
    """Return rows by content; JSON is compared as values, since Spark writes numbers and texts in its own way."""
    rows: list[dict[str, Any]] = tables.query(home, sql, tables=["messages", "commands"])
    for one in rows:
        for name in ("payload", "reported"):
            one[name] = json.dumps(json.loads(one[name] or "null"), sort_keys=True)
    return Counter(json.dumps(one, sort_keys=True, default=str) for one in rows)
