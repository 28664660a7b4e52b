"""Stream `commands`: equal to a join of bronze in DuckDB, whatever the batches, restarts and repeated batches."""

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.commands import start_query
from fleetpulse.io.tables import tables
from tests.support.histories.command_sql import commands_sql, found
from tests.support.histories.histories import positioned, row, tick
from tests.support.homes.homes import empty, land

pytestmark = pytest.mark.spark
ANSWER_S = 60
STATUSES = ("accepted", "accepted", "rejected")


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
        expected = found(home, commands_sql(ANSWER_S * 1_000))
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
