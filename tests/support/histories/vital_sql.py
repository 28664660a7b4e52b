"""Windows of metrics by SQL over bronze, independent of the stream ``vitals``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fleetpulse.core.presence.presence_time import presence_sql
from fleetpulse.core.streams.tables import VITALS
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

KEYS = ("device_id", "metric", "start_ms", "end_ms", "site", "late", "closed_ms")


def windows_by_sql(
    home: Home, policies: Sequence[tuple[int, Mapping[str, tuple[int, int]]]], closed_ms: int
) -> list[dict[str, Any]]:
    """Return the windows that are closed, by SQL over all rows of bronze.

    Args:
        home: home of bronze.
        policies: instant from which each policy is in force, and width and slide of its metrics, milliseconds; in order.
        closed_ms: instant at or before which a window is closed.
    """
    deployment = home.deployment()
    lateness = deployment.allowed_lateness_ms
    presence = presence_sql(str(deployment.max_clock_lead_ms), str(deployment.max_backlog_ms), "epoch_ms")
    numbered = [*enumerate(policies)]
    listed = ", ".join(
        f"('{metric}', {width}, {slide}, {nth})" for nth, (_, vitals) in numbered for metric, (width, slide) in vitals.items()
    )
    in_force = " ".join(f"WHEN heard_ms >= {from_ms} THEN {nth}" for nth, (from_ms, _) in reversed(numbered))
    sql = f"""
    WITH timed AS (SELECT *, {presence} AS heard FROM messages WHERE kind IN ('heartbeat', 'telemetry', 'error', 'birth')),
    judged AS (SELECT *, epoch_ms(heard) AS heard_ms, epoch_ms(heard) <= epoch_ms(received_at) - {lateness} AS late FROM timed),
    distinct_rows AS (
        SELECT * FROM judged QUALIFY row_number() OVER (
            PARTITION BY device_id, site, kind, heard, boot, seq, digest, late, CASE WHEN late THEN received_at END
            ORDER BY received_at DESC) = 1),
    policy AS (
        SELECT * FROM (VALUES {listed}) AS one(metric, width, slide, nth)),
    valued AS (
        SELECT device_id, site, metric, width, slide, late, heard, heard_ms,
            epoch_ms(received_at) AS received_ms, coalesce(seq, -1) AS seq,
            json_extract(metrics, '$.' || metric) AS found, json_extract_string(metrics, '$.' || metric)::VARCHAR AS text
        FROM distinct_rows JOIN policy ON nth = CASE {in_force} END),
    numbers AS (
        SELECT *, text::DOUBLE + 0.0 AS value FROM valued
        WHERE json_type(found) IN ('DOUBLE', 'BIGINT', 'UBIGINT') AND abs(text::DOUBLE) <= pow(2, 53)),
    placed AS (
        SELECT *, (heard_ms // slide - nth) * slide AS start_ms FROM numbers, LATERAL unnest(range(width // slide)) AS each(nth)),
    keyed AS (
        SELECT *, start_ms + width AS end_ms,
            CASE WHEN late THEN (received_ms // slide + 1) * slide ELSE start_ms + width END AS closed_ms FROM placed)
    SELECT device_id, metric, start_ms, end_ms, site, late, closed_ms, count(*) AS count, min(value) AS min, max(value) AS max,
        array_agg(value) AS values, arg_max(value, (heard, seq, value)) AS last, epoch_ms(max(heard)) AS last_at_ms
    FROM keyed WHERE closed_ms <= {closed_ms} GROUP BY ALL
    """
    return tables.query(home, sql, tables=[MESSAGES.name])


def windows_of(home: Home) -> list[dict[str, Any]]:
    """Return the rows of the table with the columns of `windows_by_sql`, and ``mean`` for its ``values``."""
    names = ", ".join(
        f"epoch_ms({column.name}) AS {column.name.removeprefix('window_').removesuffix('_at') + '_ms'}"
        if column.type == "timestamp" and column.name != "last_at"
        else "epoch_ms(last_at) AS last_at_ms"
        if column.type == "timestamp"
        else column.name
        for column in VITALS.columns
    )
    return tables.query(home, f"SELECT {names} FROM vitals ORDER BY ALL", tables=[VITALS.name])


def require_equal_windows(found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> None:
    """Check that rows of `windows_of` equal those of `windows_by_sql`; means are equal up to rounding."""
    by_key = {tuple(one[key] for key in KEYS): one for one in wanted}
    assert len(found) == len(wanted)
    for one in found:
        want = by_key[tuple(one[key] for key in KEYS)]
        assert {**one, "mean": None} == {**{name: want[name] for name in one if name != "mean"}, "mean": None}
        assert math.isclose(one["mean"], math.fsum(want["values"]) / want["count"], rel_tol=1e-14, abs_tol=1e-12)
