"""Bronze source: a batch is split among all cores, in equal shares of rows, each row once."""

from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.generations import Generation
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle import bronze_source
from fleetpulse.io.lifecycle.bronze_source import ROWS_A_TASK, BlockReader, Piece, shares
from fleetpulse.io.lifecycle.query import judgement_stream
from fleetpulse.io.spark.session import SparkResources, settings
from fleetpulse.io.tables import tables
from tests.support.histories.histories import row
from tests.support.histories.streams import DEPLOYMENT, land

pytestmark = pytest.mark.unit


def _files(*rows: int) -> list[Piece]:
    return [Piece(f"{number}.parquet", None, count) for number, count in enumerate(rows)]


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 32])
def test_each_core_gets_a_task_with_an_equal_share_of_the_rows(cores: int) -> None:
    files = _files(*[ROWS_A_TASK // 4] * 128)
    found = shares(files, cores)
    assert [piece for share in found for piece in share] == files, "each file once, in the order of the versions"
    assert len(found) == cores
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_task_has_enough_rows_to_be_worth_its_start() -> None:
    assert [len(shares(_files(*[100] * 16), cores)) for cores in (1, 2, 32)] == [1, 2, 2]
    assert len(shares(_files(*[ROWS_A_TASK] * 5), 32)) == 5
    assert len(shares(_files(*[0] * 5), 32)) == 5, "files of unknown size count as large enough"


def test_large_file_is_split_into_its_row_groups(tmp_path: Path) -> None:
    rows, name = 4 * ROWS_A_TASK, str(tmp_path / "piece.parquet")
    pq.write_table(pa.table({"device": pa.array(range(rows))}), name, row_group_size=ROWS_A_TASK)
    groups = [Piece(name, number, ROWS_A_TASK) for number in range(4)]
    assert shares([Piece(name, None, rows)], 2) == [tuple(groups[:2]), tuple(groups[2:])]
    assert shares([Piece(name, None, rows)], 32) == [(group,) for group in groups]
    assert shares([Piece(name, None, rows)], 1) == [(Piece(name, None, rows),)], "one task reads the whole file at once"
    small = Piece("small.parquet", None, 10)
    assert shares([small, Piece(name, None, rows), small], 2) == [(small, *groups[:2]), (*groups[2:], small)]
    pq.write_table(pa.table({"device": pa.array(range(rows))}), name, row_group_size=rows)
    assert shares([Piece(name, None, rows)], 32) == [(Piece(name, None, rows),)], "one row group is read by one task"


def test_bronze_is_read_by_all_cores_of_the_session(tmp_path: Path) -> None:
    cores = settings(tmp_path, SparkResources(cores=6))["spark.default.parallelism"]
    session = MagicMock()  # of pyspark: a real one starts a JVM
    session.sparkContext.defaultParallelism = int(cores)
    session.conf.get.return_value = "spark://10.0.0.5:7077"
    judgement_stream(session, tmp_path / "messages", Deployment(), Generation.first(8))
    options = session.readStream.format.return_value.options.call_args.kwargs
    assert BlockReader({name: str(value) for name, value in options.items()}).parallelism == 6


@pytest.mark.parametrize(("max_rows", "versions"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (100, 3)])
def test_a_batch_has_the_versions_that_reach_its_limit_of_rows_and_at_least_one(
    tmp_path: Path, max_rows: int, versions: int
) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    for version in (1, 2, 3):
        land(home, [row(2 * version + of, f"d{of}/heartbeat", ts_s=version) for of in (0, 1)], version)
    options = {"path": str(home.table(MESSAGES.name)), "key_groups": "1", "max_rows": str(max_rows), "through": "4"}
    assert BlockReader(options).latestOffset({"version": 1}) == {"version": 1 + versions}


def test_the_limit_of_rows_is_that_of_the_stream(tmp_path: Path) -> None:
    session = MagicMock()  # of pyspark: a real one starts a JVM
    session.sparkContext.defaultParallelism = 1
    judgement_stream(session, tmp_path / "messages", Deployment(), Generation.first(8), max_rows=7)
    options = session.readStream.format.return_value.options.call_args.kwargs
    assert BlockReader({name: str(value) for name, value in options.items()}).max_rows == 7


def test_tasks_read_each_row_of_a_large_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bronze_source, "ROWS_A_TASK", 1)
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    land(home, [row(number, f"d{number}/heartbeat", ts_s=number) for number in range(1, 6)], 1)
    [file] = home.table(MESSAGES.name).glob("**/*.parquet")
    pq.write_table(pq.read_table(file), file, row_group_size=2)
    reader = BlockReader({"path": str(home.table(MESSAGES.name)), "key_groups": "1", "parallelism": "3"})
    tasks = reader.partitions({"version": 0}, reader.latestOffset({"version": 0}))
    blocks = [block for task in tasks for batch in reader.read(task) for block in batch.to_pylist()]
    assert [from_wire(block["signals"])["device_id"].to_pylist() for block in blocks] == [["d1", "d2"], ["d3", "d4"], ["d5"]]
