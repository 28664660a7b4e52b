"""Stream `commands`: equal to a join of bronze in DuckDB, whatever the batches, restarts and repeated batches."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.commands import CLOCK_LEAD_MS, start_query
from fleetpulse.io.tables import tables
from tests.support.histories.histories import positioned, row, tick
from tests.support.homes.homes import empty, land

pytestmark = pytest.mark.spark
ANSWER_S = 60
STATUSES = ("accepted", "accepted", "rejected")
LEAD_S = CLOCK_LEAD_MS // 1_000
JOINED = f"""
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
            AND answered_at BETWEEN sent_at - INTERVAL {LEAD_S} SECONDS AND sent_at + INTERVAL {ANSWER_S} SECONDS
            AND epoch_ms(answered_at) - epoch_ms(sent_at) <= coalesce(timeout_ms, {ANSWER_S} * 1000))
    SELECT coalesce(device_id, answered_by) AS device_id, sent_at, answered_at, coalesce(command_id, answered) AS command_id,
        CASE WHEN sent_at IS NULL THEN 'unmatched' WHEN answered_at IS NULL THEN 'timed_out'
             WHEN answer = 'accepted' THEN 'acknowledged' ELSE 'rejected' END AS status,
        name, payload, epoch_ms(answered_at) - epoch_ms(sent_at) AS latency_ms, reason, reported, position AS answer_position,
        coalesce(site, answer_site) AS site, timeout_ms
    FROM joined
    UNION ALL BY NAME
    SELECT sent_at, device_id, site, command_id, name, payload, timeout_ms, 'pending' AS status FROM sent
"""


def history(seed: int) -> list[Row]:
    """Return commands and answers at all distances from each other, among other rows, on a grid of five seconds."""
    chance = random.Random(seed)
    rows = [tick(0), row(1, "fleet/s/a/heartbeat"), row(2, "a/control", op="release"), row(3, "fleet/s/a/ack", status="accepted")]
    for number in range(60):
        at_s, device, command = chance.randrange(1, 60) * 5, chance.choice("abc"), f"c{chance.randrange(8)}"
        more = chance.choice([{}, {"payload": {"x": 1.5, "y": {"z": ["\u00e9", None]}}}])
        more |= [{}, {}, {"timeout_ms": 5_000}, {"timeout_ms": 7_200_000}][number % 4]
        rows.append(row(at_s, f"{device}/control", op="command", id=command, name="set", **more))
        for lag_s in chance.sample([-15, -10, 0, 5, 30, ANSWER_S, ANSWER_S + 5], chance.randrange(3)):
            extra = chance.choice([{}, {"reason": "why"}, {"reported": {"x": number}}])
            answer = row(at_s + lag_s, f"fleet/s/{device}/ack", id=command, status=chance.choice(STATUSES), **extra)
            rows += [answer] * chance.choice([1, 1, 2])
    return positioned([one for one in rows if one.received_at_ms >= rows[0].received_at_ms])


def run(spark: SparkSession, home: Home) -> None:
    query = start_query(spark, home, StreamOptions(every_ms=0, answer_ms=ANSWER_S * 1_000), 0)
    assert query.awaitTermination(300)


def found(home: Home, sql: str) -> Counter[str]:
    """Return rows by content; JSON is compared as values, since Spark writes numbers and texts in its own way."""
    rows: list[dict[str, Any]] = tables.query(home, sql, tables=["messages", "commands"])
    for one in rows:
        for name in ("payload", "reported"):
            one[name] = json.dumps(json.loads(one[name] or "null"), sort_keys=True)
    return Counter(json.dumps(one, sort_keys=True, default=str) for one in rows)


def ticks(from_s: int) -> list[Row]:
    return [tick(from_s), tick(from_s + 1)]


@pytest.mark.timeout(900)  # several starts of a query, also on a slow machine
def test_the_stream_equals_a_join_of_bronze_for_any_batches(spark: SparkSession, tmp_path: Path) -> None:
    rows = history(1)
    cuts = sorted(random.Random(2).sample(range(1, len(rows)), 3))
    for number, ends in enumerate([[len(rows)], [*cuts, len(rows)]]):
        home, begin = empty(tmp_path / f"home-{number}", Deployment()), 0
        for segment, end in enumerate(ends):
            land(home, rows[begin:end], segment)
            run(spark, home)  # each run is a restart of the query
            begin = end
        land(home, ticks(1_000), 100)
        run(spark, home)
        expected = found(home, JOINED)
        assert found(home, "SELECT * FROM commands") == expected
        statuses = tables.query(home, "SELECT status, count(*) AS n FROM commands GROUP BY status", tables=["commands"])
        assert min(one["n"] for one in statuses) > 2 and len(statuses) == 5
    _repeat_last_batch(spark, home)


def _repeat_last_batch(spark: SparkSession, home: Home) -> None:
    """Run the last batch with rows again: the job was killed before its checkpoint had the batch."""
    land(home, positioned([row(1_100, "a/control", op="command", id="again", name="set"), tick(1_101)]), 101)
    run(spark, home)
    before = found(home, "SELECT * FROM commands")
    checkpoint = home.stream_checkpoint(StreamName.COMMANDS)
    with_rows, without_rows = committed_batches(checkpoint)[-2:]  # the second one moves the watermark only
    for folder, batch in (("commits", with_rows), ("commits", without_rows), ("offsets", without_rows)):
        for name in (f"{batch}", f".{batch}.crc"):
            (checkpoint / folder / name).unlink(missing_ok=True)
    run(spark, home)
    assert committed_batches(checkpoint)[-2:] == [with_rows, without_rows]
    assert found(home, "SELECT * FROM commands") == before, "a repeated batch adds no row"
