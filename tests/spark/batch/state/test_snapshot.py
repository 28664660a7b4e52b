"""Repeated snapshots: an intact snapshot is not written again, and a damaged one is replaced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from batch.state import snapshot
from batch.state.operations import StateOperation, bootstrap
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.state_reader import read_snapshot
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import SnapshotInfo, files_of, find_snapshot, snapshots, write_snapshot
from tests.support.histories.streams import DEPLOYMENT, copy_of, history, judge, land
from tests.support.refusals import refused

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
ROWS = history(5)


@pytest.fixture(scope="module")
def judged(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home that has judged half a history, with a snapshot of that state."""
    home = Home(tmp_path_factory.mktemp("judged") / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    land(home, ROWS[: len(ROWS) // 2], 1)
    judge(spark, home)
    assert _take(spark, home)[0].version == 1
    return home


@pytest.fixture
def home(judged: Home, tmp_path: Path) -> Home:
    return copy_of(judged, tmp_path / "home")


def _take(
    spark: SparkSession, home: Home, batch: int | None = None, gate: snapshot.Gate | None = None, *, dry: bool = False
) -> tuple[SnapshotInfo, list[str]]:
    lines: list[str] = []
    return snapshot.take(spark, home, batch, lines.append, gate, dry=dry), lines


def _versions(home: Home) -> list[int | None]:
    return [one.version for one in snapshots(home)]


@pytest.mark.parametrize("dry", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_a_snapshot_of_an_unchanged_state_is_reported_and_not_written_again(spark: SparkSession, home: Home, dry: bool) -> None:
    found, lines = _take(spark, home, dry=dry)
    assert found == find_snapshot(home) and _versions(home) == [1]
    assert lines[-1] == (
        f"snapshot version 1 is already that of generation 1 after batch {found.batch}, {found.devices:,} devices; nothing to do"
    )


@pytest.mark.extended
def test_only_the_newest_snapshot_is_reused(spark: SparkSession, home: Home) -> None:
    before = committed_batches(home.checkpoint)[-1]
    land(home, ROWS[len(ROWS) // 2 :], 2)
    judge(spark, home)
    planned, _ = _take(spark, home, dry=True)
    assert planned.version is None and _versions(home) == [1], "a dry run writes nothing"
    assert _take(spark, home)[0].version == 2
    assert _take(spark, home, before)[0].version == 3, "the newest version must be the snapshot requested last"
    assert _take(spark, home, before)[0].version == 3


@pytest.mark.extended
def test_a_gate_also_checks_an_existing_snapshot(spark: SparkSession, home: Home) -> None:
    checked: list[SnapshotInfo] = []

    @contextmanager
    def accepts(rows: DataFrame, info: SnapshotInfo) -> Iterator[DataFrame]:
        checked.append(info)
        yield rows

    @contextmanager
    def refuses(rows: DataFrame, info: SnapshotInfo) -> Iterator[DataFrame]:
        raise FleetError("no snapshot is published", code="gate-of-the-test")
        yield rows

    assert _take(spark, home, gate=accepts)[0].version == 1 and len(checked) == 1
    with refused("gate-of-the-test"):
        _take(spark, home, gate=refuses)
    land(home, ROWS[len(ROWS) // 2 :], 2)
    judge(spark, home)
    with refused("gate-of-the-test"):
        _take(spark, home, gate=refuses)
    assert _versions(home) == [1]
    assert _take(spark, home, gate=accepts)[0].version == 2, "a refused snapshot can be taken later"


def _change_rows(spark: SparkSession, home: Home, path: Path) -> None:
    taken = find_snapshot(home)
    rows = read_snapshot(spark, home, 1).each
    write_snapshot(home, rows.selectExpr(*(f"{one} + 1 AS {one}" if one == "runtime_ms" else one for one in rows.columns)), taken)


def _corrupt_pages(spark: SparkSession, home: Home, path: Path) -> None:
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    path.write_bytes(content)


def _flip_bit(spark: SparkSession, home: Home, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _delete_file(spark: SparkSession, home: Home, path: Path) -> None:
    path.unlink()


_DAMAGES = [_flip_bit, *(pytest.param(one, marks=pytest.mark.extended) for one in (_change_rows, _corrupt_pages, _delete_file))]


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_snapshot_is_replaced_by_one_that_bootstrap_accepts(
    spark: SparkSession, home: Home, damage: Callable[[SparkSession, Home, Path], None]
) -> None:
    [path] = [one for one in files_of(home.table(DEVICE_SNAPSHOTS.name), 1) if "part=device" in str(one)][:1]
    damage(spark, home, path)
    newest = tables.version(home.table(DEVICE_SNAPSHOTS.name))
    found, lines = _take(spark, home)
    assert found.version == newest + 1 and f"snapshot version {newest + 1} is written" in lines
    assert damage is _delete_file or any(f"snapshot version {newest} is damaged: it " in line for line in lines)
    assert bootstrap(StateOperation(spark, home, lines.append), find_snapshot(home)) is not None
