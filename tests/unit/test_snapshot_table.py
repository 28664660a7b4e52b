"""The snapshots that are kept: those whose version can be opened, and whose files are all there, without opening each."""

from pathlib import Path

import pytest
from deltalake import DeltaTable

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.io import snapshot_table
from fleetpulse.io.home import Home
from fleetpulse.io.snapshot_table import files_of, is_whole, snapshots
from tests.homes import empty, take_snapshot


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return empty(tmp_path / "a home", Deployment())


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions that are opened by their number."""
    found: list[int] = []

    def noting(path: str, version: int | None = None) -> DeltaTable:
        found.extend([] if version is None else [version])
        return DeltaTable(path, version=version)

    monkeypatch.setattr(snapshot_table, "DeltaTable", noting)
    return found


def _kept(home: Home) -> list[int | None]:
    return [one.version for one in snapshots(home)]


def test_a_snapshot_is_kept_while_all_its_files_are_there_and_none_is_opened_to_see_it(home: Home, opened: list[int]) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    for batch in range(1, 6):
        take_snapshot(home, batch)
    DeltaTable(str(path)).optimize.compact()
    assert _kept(home) == [5, 4, 3, 2, 1]
    next(iter(files_of(path, 2))).unlink()
    opened.clear()
    assert _kept(home) == [5, 4, 3, 1]
    assert opened == []
    assert [version for version in range(1, 6) if is_whole(path, version)] == [1, 3, 4, 5]


def test_a_snapshot_to_which_the_log_no_longer_leads_is_not_kept(home: Home) -> None:
    log = home.table(DEVICE_SNAPSHOTS.name) / "_delta_log"
    for batch in range(1, 4):
        take_snapshot(home, batch)
    DeltaTable(str(log.parent)).create_checkpoint()
    take_snapshot(home, 4)
    for version in range(2):
        (log / f"{version:020d}.json").unlink()
    assert _kept(home) == [4, 3]


def test_what_another_wrote_beside_what_was_there_is_looked_at_as_a_whole(home: Home, opened: list[int]) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    take_snapshot(home, 1)
    take_snapshot(home, 2, mode="append")
    assert _kept(home) == [2, 1] and opened == [2]
    next(iter(files_of(path, 1))).unlink()
    assert _kept(home) == []
