"""Lifecycle query: its judgements equal the definition across batches, restarts, gaps and policies."""

import time
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.columnar.codec.arrow import batch_to_rows, from_bytes
from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.core.judgements import COMPARED
from fleetpulse.core.rows import for_everyone
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.bronze_source import BlockReader
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.spark.jars import spark_home
from fleetpulse.io.tables import tables
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.histories.histories import START, positioned, row, signal, tick
from tests.support.histories.streams import DEPLOYMENT, history, land
from tests.support.refusals import refused

pytestmark = pytest.mark.spark
PATIENCE_S = 300


def _await(query: StreamingQuery, home: Home, received_at_ms: int) -> None:
    limit = time.monotonic() + PATIENCE_S
    while True:
        reached = judged_up_to(home.checkpoint)
        if reached is not None and reached[1] >= received_at_ms:
            return
        assert query.isActive, query.exception()
        assert time.monotonic() < limit, "the stream does not reach the end of its input"
        time.sleep(0.1)


def test_python_workers_import_the_installed_pyspark(spark: SparkSession) -> None:
    def imported(_: int) -> str:
        import pyspark

        return str(Path(pyspark.__file__).parent)

    assert spark.sparkContext.parallelize([0], 1).map(imported).collect() == [str(spark_home())]


def test_the_stream_equals_the_definition_across_batches_and_restarts(spark: SparkSession, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    rows, random = history(7), Random(7)
    edges = [0, *sorted(random.sample(range(1, len(rows)), 7)), len(rows)]
    dropped = 0
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        land(home, rows[begin:end], number)
        if number % 3 == 0 or end == len(rows):  # so that the stream is stopped and started between batches
            query = start(spark, home)
            try:
                _await(query, home, rows[end - 1].received_at_ms)
                query.processAllAvailable()
                operators = [one for progress in query.recentProgress for one in progress["stateOperators"]]
                dropped += sum(one["numRowsDroppedByWatermark"] for one in operators)
            finally:
                query.stop()
    want = defined(rows, DEPLOYMENT)
    modes = {one[COMPARED.index("to_mode")] for one in want}
    assert modes >= {
        "online",
        "offline",
        "degraded",
        "flagged",
        "decommissioned",
        "maintenance",
    }
    assert {one[COMPARED.index("trigger")] for one in want} >= {"gateway_death", "gateway_return"}
    assert emitted(home) == want
    assert dropped == 0
    ids = tables.query(home, "SELECT device_id, life, transition_no FROM transitions")
    assert len({tuple(one.values()) for one in ids}) == len(ids)
    assert tables.stored_types(home, JUDGEMENTS) == {column.name: column.type for column in JUDGEMENTS.columns}


def test_a_missing_version_is_an_error_and_rewrites_are_skipped(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    for number in (1, 2, 3):
        land(home, [row(number, "d/heartbeat", ts_s=number)], number)
    path = home.table(MESSAGES.name)
    from deltalake import DeltaTable

    DeltaTable(str(path)).optimize.compact()
    reader = BlockReader({"path": str(path), "key_groups": "4"})
    end = reader.latestOffset({"version": 0})
    partitions = reader.partitions({"version": 0}, end)
    assert sum(len(one.pieces) for one in partitions) == 3
    blocks = [batch for one in partitions for batch in reader.read(one)]
    assert sum(batch.num_rows for batch in blocks) >= 1
    (path / "_delta_log" / f"{2:020d}.json").unlink()
    with refused("table-version-missing", match="version 2 of messages"):
        reader.partitions({"version": 0}, end)


def test_files_of_signals_alone_and_files_with_other_rows_are_read_together(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    for number, one in enumerate((tick(1), row(2, "d/heartbeat", ts_s=2), tick(3)), 1):
        land(home, [one], number)
    reader = BlockReader({"path": str(home.table(MESSAGES.name)), "key_groups": "1", "parallelism": "1"})
    [files] = reader.partitions({"version": 0}, reader.latestOffset({"version": 0}))
    [block] = [batch.to_pylist() for batch in reader.read(files)]
    assert from_bytes(block[0]["signals"]).num_rows == 1
    assert [one.received_at_ms for one in batch_to_rows(from_bytes(block[0]["others"]))] == [START + 1000, START + 3000]


def test_death_and_return_of_a_gateway_reach_all_key_groups_and_are_rows_of_one(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    others = [row(2, "d/death", gateway="gate"), row(3, "d/death"), row(4, "e/heartbeat", gateway="e", ts_s=4)]
    rows = positioned([row(1, "gate/death", gateway="gate", boot="p"), *others, signal(2, "gate", received_s=5)])
    land(home, rows, 1)
    reader = BlockReader({"path": str(home.table(MESSAGES.name)), "key_groups": "16", "parallelism": "1"})
    [files] = reader.partitions({"version": 0}, reader.latestOffset({"version": 0}))
    [blocks] = [batch.to_pylist() for batch in reader.read(files)]
    assert len(blocks) == 16
    events = [for_everyone(rows[0]), for_everyone(rows[-1])]
    assert [batch_to_rows(from_bytes(block["others"])) for block in blocks] == [events] * 16
    assert [one.at_ms for one in events if one] == [START + 1_000, START + 5_000]
    signals = [one.as_py() for block in blocks if block["signals"] for one in from_wire(block["signals"])["device_id"]]
    assert sorted(signals) == ["d", "d", "e", "gate", "gate"]
