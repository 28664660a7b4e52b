"""A snapshot that is there already is not written again; one that is not what it says is, whatever its note says."""

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

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
ROWS = history(5)


@pytest.fixture(scope="module")
def judged(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home that has judged half a history, with a snapshot of that."""
    home = Home(tmp_path_factory.mktemp("judged") / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    land(home, ROWS[: len(ROWS) // 2], 1)
    judge(spark, home)
    assert _taken(spark, home)[0].version == 1
    return home


@pytest.fixture
def home(judged: Home, tmp_path: Path) -> Home:
    return copy_of(judged, tmp_path / "home")


def _taken(
    spark: SparkSession, home: Home, batch: int | None = None, gate: snapshot.Gate | None = None, *, dry: bool = False
) -> tuple[SnapshotInfo, list[str]]:
    said: list[str] = []
    return snapshot.take(spark, home, batch, said.append, gate, dry=dry), said


def _versions(home: Home) -> list[int | None]:
    return [one.version for one in snapshots(home)]


@pytest.mark.parametrize("dry", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_what_the_newest_snapshot_holds_is_said_and_not_written_again(spark: SparkSession, home: Home, dry: bool) -> None:
    found, said = _taken(spark, home, dry=dry)
    assert found == find_snapshot(home) and _versions(home) == [1]
    assert said[-1] == (
        f"snapshot version 1 is already that of generation 1 after batch {found.batch}, {found.devices:,} devices; nothing to do"
    )


@pytest.mark.extended
def test_the_newest_snapshot_counts_and_no_older_one(spark: SparkSession, home: Home) -> None:
    before = committed_batches(home.checkpoint)[-1]
    land(home, ROWS[len(ROWS) // 2 :], 2)
    judge(spark, home)
    planned, _ = _taken(spark, home, dry=True)
    assert planned.version is None and _versions(home) == [1], "a dry run writes nothing"
    assert _taken(spark, home)[0].version == 2
    assert _taken(spark, home, before)[0].version == 3, "who begins with the newest is to begin with what was asked for last"
    assert _taken(spark, home, before)[0].version == 3


@pytest.mark.extended
def test_a_gate_looks_at_what_is_there_already(spark: SparkSession, home: Home) -> None:
    looked: list[SnapshotInfo] = []

    @contextmanager
    def opens(rows: DataFrame, what: SnapshotInfo) -> Iterator[DataFrame]:
        looked.append(what)
        yield rows

    @contextmanager
    def stays_shut(rows: DataFrame, what: SnapshotInfo) -> Iterator[DataFrame]:
        raise FleetError("no snapshot is published")
        yield rows

    assert _taken(spark, home, gate=opens)[0].version == 1 and len(looked) == 1
    with pytest.raises(FleetError, match="no snapshot is published"):
        _taken(spark, home, gate=stays_shut)
    land(home, ROWS[len(ROWS) // 2 :], 2)
    judge(spark, home)
    with pytest.raises(FleetError, match="no snapshot is published"):
        _taken(spark, home, gate=stays_shut)
    assert _versions(home) == [1]
    assert _taken(spark, home, gate=opens)[0].version == 2, "what was refused can be made"


def _other_rows(spark: SparkSession, home: Home, path: Path) -> None:
    taken = find_snapshot(home)
    rows = read_snapshot(spark, home, 1).each
    write_snapshot(home, rows.selectExpr(*(f"{one} + 1 AS {one}" if one == "runtime_ms" else one for one in rows.columns)), taken)


def _torn(spark: SparkSession, home: Home, path: Path) -> None:
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    path.write_bytes(content)


def _flipped(spark: SparkSession, home: Home, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _gone(spark: SparkSession, home: Home, path: Path) -> None:
    path.unlink()


_DAMAGES = [_flipped, *(pytest.param(one, marks=pytest.mark.extended) for one in (_other_rows, _torn, _gone))]


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_snapshot_that_is_damaged_is_taken_anew_and_can_be_begun_with(
    spark: SparkSession, home: Home, damage: Callable[[SparkSession, Home, Path], None]
) -> None:
    [path] = [one for one in files_of(home.table(DEVICE_SNAPSHOTS.name), 1) if "part=device" in str(one)][:1]
    damage(spark, home, path)
    newest = tables.version(home.table(DEVICE_SNAPSHOTS.name))
    found, said = _taken(spark, home)
    assert found.version == newest + 1 and f"snapshot version {newest + 1} is written" in said
    assert damage is _gone or any(f"snapshot version {newest} is damaged: it " in words for words in said)
    assert bootstrap(StateOperation(spark, home, said.append), find_snapshot(home)) is not None
