"""Sessions by SQL over bronze, independent of the definition: a recursive query walks each device's rows in order.

It covers histories in which one bridge serves all sites.
"""

from typing import Any, Final

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, reading

SQL: Final = """
WITH RECURSIVE rows AS (
    SELECT * FROM messages WHERE epoch_ms(received_at) <= $until
), gaps AS (
    SELECT (body->>'from')::BIGINT AS opened, coalesce(lead(greatest((body->>'until')::BIGINT, epoch_ms(received_at)))
        OVER (ORDER BY received_at), 1::BIGINT << 60) AS closed, body->>'op' AS op, epoch_ms(received_at) AS at_ms
    FROM rows WHERE kind = 'gap' QUALIFY op = 'open'
), heard AS (
    SELECT device_id, site, kind, epoch_ms(received_at) AS at_ms, coalesce(position, 0) AS position, session, boot, seq, code,
        firmware, gateway, CASE WHEN seq IS NULL AND clock <> 'received' THEN digest ELSE 0 END AS digest,
        at_ms - coalesce((SELECT sum(least(closed, heard.at_ms) - opened) FROM gaps WHERE gaps.at_ms <= heard.at_ms
            AND opened < heard.at_ms), 0) AS covered_ms,
        row_number() OVER (PARTITION BY device_id ORDER BY received_at, position, site,
            array_position(['heartbeat', 'telemetry', 'error', 'birth', 'death', 'ack'], kind), coalesce(seq, -1),
            coalesce(session, ''), coalesce(boot, '')) AS n
    FROM (SELECT *, epoch_ms(received_at) AS at_ms FROM rows) AS heard
    WHERE kind IN ('heartbeat', 'telemetry', 'error', 'birth', 'death', 'ack')
), newest AS (
    SELECT max(epoch_ms(received_at)) AS at_ms, at_ms - coalesce((SELECT sum(least(closed, last.at_ms) - opened) FROM gaps,
        (SELECT max(epoch_ms(received_at)) AS at_ms FROM rows) AS last WHERE opened < last.at_ms), 0) AS covered_ms
    FROM rows
), walk AS (
    SELECT DISTINCT device_id, 0::BIGINT AS n, false AS is_open, false AS has_begun, NULL::VARCHAR AS reason,
        NULL::BIGINT AS end_ms,
        NULL::BIGINT AS started_ms, NULL::BIGINT AS position, NULL::VARCHAR AS started_by, NULL::VARCHAR AS site,
        NULL::VARCHAR AS gateway, NULL::VARCHAR AS session, NULL::VARCHAR AS boot, NULL::VARCHAR AS firmware, NULL::BIGINT AS seq,
        NULL::BIGINT AS digest, NULL::BIGINT AS last_ms, NULL::BIGINT AS last_covered_ms, NULL::BIGINT AS messages
    FROM heard
    UNION ALL
    SELECT device_id, n, has_begun OR (is_open AND reason IS NULL), has_begun, reason,
        CASE reason WHEN 'silence' THEN last_ms ELSE at_ms END,
        CASE WHEN has_begun THEN at_ms ELSE started_ms END, CASE WHEN has_begun THEN row_position ELSE position END,
        CASE WHEN NOT has_begun THEN started_by WHEN kind = 'birth' THEN 'birth' ELSE 'signal' END,
        CASE WHEN kind = 'death' THEN site ELSE row_site END,
        CASE WHEN has_begun THEN row_gateway WHEN kind = 'death' THEN gateway ELSE coalesce(gateway, row_gateway) END,
        CASE WHEN has_begun THEN row_session WHEN kind = 'death' THEN session ELSE coalesce(session, row_session) END,
        CASE WHEN has_begun THEN row_boot WHEN kind = 'death' THEN boot ELSE coalesce(boot, row_boot) END,
        CASE WHEN has_begun THEN row_firmware WHEN kind = 'death' THEN firmware ELSE coalesce(firmware, row_firmware) END,
        CASE WHEN has_begun THEN row_seq ELSE seq END, CASE WHEN has_begun THEN row_digest ELSE digest END,
        CASE WHEN kind = 'death' THEN last_ms ELSE at_ms END,
        CASE WHEN kind = 'death' THEN last_covered_ms ELSE row_covered_ms END,
        CASE WHEN has_begun THEN 1 WHEN kind = 'death' THEN messages ELSE messages + 1 END
    FROM (
        SELECT *, kind <> 'death' AND (NOT is_open OR reason IS NOT NULL) AS has_begun FROM (
            SELECT walk.* EXCLUDE (n, has_begun, reason, end_ms), heard.n, heard.kind, heard.at_ms,
                heard.position AS row_position,
                heard.site AS row_site, heard.gateway AS row_gateway, heard.session AS row_session, heard.boot AS row_boot,
                heard.firmware AS row_firmware, heard.seq AS row_seq, heard.digest AS row_digest,
                heard.covered_ms AS row_covered_ms,
                CASE WHEN NOT walk.is_open THEN NULL
                    WHEN heard.covered_ms - walk.last_covered_ms > $silence THEN 'silence'
                    WHEN heard.kind = 'death' AND CASE WHEN heard.session <> walk.session THEN false
                        WHEN heard.session = walk.session THEN true ELSE coalesce(heard.boot = walk.boot, true) END
                    THEN CASE WHEN heard.code IN ('disconnect', 'logout') THEN 'disconnect' ELSE 'will' END
                    WHEN heard.kind = 'birth' AND NOT coalesce(heard.boot = walk.boot AND heard.seq < walk.seq AND NOT (
                            (walk.seq BETWEEN 240 AND 255 OR walk.seq BETWEEN 65520 AND 65535
                                OR walk.seq BETWEEN 4294967280 AND 4294967295) AND heard.seq < 16), false)
                        AND coalesce(heard.session <> walk.session, walk.started_by = 'signal'
                            OR heard.boot IS DISTINCT FROM walk.boot OR heard.seq IS DISTINCT FROM walk.seq
                            OR (heard.seq IS NULL AND (walk.digest = 0 OR heard.digest <> walk.digest)))
                    THEN 'birth' END AS reason
            FROM walk JOIN heard ON heard.device_id = walk.device_id AND heard.n = walk.n + 1)
    )
), steps AS (
    SELECT *, max(n) OVER (PARTITION BY device_id) AS last_n FROM walk
), rows_ AS (
    SELECT began.*, NULL::BIGINT AS ended_ms, NULL AS ended_by FROM steps AS began WHERE has_begun
    UNION ALL BY NAME
    SELECT before.*, ended.end_ms AS ended_ms, ended.reason AS ended_by
    FROM steps AS ended JOIN steps AS before ON before.device_id = ended.device_id AND before.n = ended.n - 1
    WHERE ended.reason IS NOT NULL
    UNION ALL BY NAME
    SELECT steps.*, last_ms AS ended_ms, 'silence' AS ended_by FROM steps, newest
    WHERE n = last_n AND is_open AND covered_ms - last_covered_ms > $silence + 60000
)
SELECT device_id, site, gateway, session, boot, firmware, make_timestamptz(started_ms * 1000) AS started_at, position, started_by,
    make_timestamptz(last_ms * 1000) AS last_seen, messages, make_timestamptz(ended_ms * 1000) AS ended_at, ended_by,
    ended_ms - started_ms AS duration_ms
FROM rows_
"""


def sessions_by_sql(home: Home, silence_ms: int, until_ms: int = 1 << 60) -> list[dict[str, Any]]:
    """Return the rows of the table ``sessions`` that follow from bronze.

    Args:
        home: home with bronze.
        silence_ms: limit of silence, milliseconds.
        until_ms: newest ``received_at`` of the rows to read, epoch milliseconds.
    """
    with reading(home, [MESSAGES.name]) as tables:
        return fetch(tables, SQL.replace("$silence", str(int(silence_ms))).replace("$until", str(int(until_ms))))
