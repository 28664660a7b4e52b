"""Kept snapshots: those whose version can be opened and whose files exist."""

import json
import re

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.state_reader import reporting_corruption_of_snapshot
from fleetpulse.io.maintenance.readers import reader_pins
from fleetpulse.io.maintenance.vacuum import kept_versions
from fleetpulse.io.tables import snapshots as snapshot_table
from fleetpulse.io.tables.snapshots import NOTE_FORM, files_of, find_snapshot, is_whole, shown_snapshot, snapshots
from tests.support.homes.homes import take_snapshot
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(), name="a home")]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the versions that are opened."""
    found: list[int] = []

    def open_and_record(path: str, version: int | None = None) -> DeltaTable:
        found.extend([] if version is None else [version])
        return DeltaTable(path, version=version)

    monkeypatch.setattr(snapshot_table, "DeltaTable", open_and_record)
    return found


def _kept(home: Home) -> list[int | None]:
    return [one.version for one in snapshots(home)]


def test_snapshot_is_kept_while_its_files_exist_and_no_version_is_opened(home: Home, opened: list[int]) -> None:
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


def test_snapshot_is_not_kept_if_the_log_cannot_open_its_version(home: Home) -> None:
    log = home.table(DEVICE_SNAPSHOTS.name) / "_delta_log"
    for batch in range(1, 4):
        take_snapshot(home, batch)
    DeltaTable(str(log.parent)).create_checkpoint()
    take_snapshot(home, 4)
    for version in range(2):
        (log / f"{version:020d}.json").unlink()
    assert _kept(home) == [4, 3]


def test_shown_snapshot_is_the_newest_one_while_its_files_exist(home: Home) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    assert shown_snapshot(home) is None
    for batch in (1, 2):
        take_snapshot(home, batch)
    DeltaTable(str(path)).optimize.compact()
    shown = shown_snapshot(home)
    assert shown is not None and (shown.version, shown.batch) == (2, 2)
    next(iter(files_of(path, 2))).unlink()
    assert shown_snapshot(home) is None, "an older snapshot is kept, but the table does not show it"


def test_errors_while_a_damaged_snapshot_is_read_name_the_snapshot(home: Home) -> None:
    take_snapshot(home)
    take_snapshot(home, 2)
    files = files_of(home.table(DEVICE_SNAPSHOTS.name), 2)
    files[-1].write_bytes(files[-1].read_bytes()[:-40])
    error = rf"(?s)snapshot version 2 cannot be read: file {files[-1].name}: .*; name another with --version; .*state snapshots"
    with refused("snapshot-unreadable", match=error), reporting_corruption_of_snapshot(home, 2):
        raise PySparkException("Job aborted due to stage failure")
    with refused("snapshot-unreadable", match=error), reporting_corruption_of_snapshot(home, 2):
        raise FleetError("no condition on a device") from PySparkException("Job aborted due to stage failure")
    files[-1].unlink()
    with (
        refused("snapshot-unreadable", match=f"file {files[-1].name}"),
        reporting_corruption_of_snapshot(home, 2),
    ):
        raise PySparkException("Job aborted due to stage failure")


def test_errors_while_an_intact_snapshot_is_read_are_unchanged(home: Home) -> None:
    take_snapshot(home)
    with pytest.raises(PySparkException, match="Job aborted"), reporting_corruption_of_snapshot(home, 1):
        raise PySparkException("Job aborted due to stage failure")
    with refused("filter-fits-none"), reporting_corruption_of_snapshot(home, 1):
        raise FleetError("no device fits", code="filter-fits-none")


def test_snapshot_file_named_in_a_spark_error_counts_as_damaged(home: Home) -> None:
    take_snapshot(home)
    name = files_of(home.table(DEVICE_SNAPSHOTS.name), 1)[0].name
    with (
        refused("snapshot-unreadable", match=rf"snapshot version 1 cannot be read: Checksum error: {name}"),
        reporting_corruption_of_snapshot(home, 1),
    ):
        raise PySparkException(f"Checksum error: {name}")


def test_snapshot_of_a_newer_format_is_listed_but_cannot_be_selected(home: Home) -> None:
    take_snapshot(home)
    take_snapshot(home, 2, form=NOTE_FORM + 1, devices={"online": 3}, unmet={"e": 1}, deep=True)
    assert [(one.version, one.is_known, one.form) for one in snapshots(home)] == [(2, False, NOTE_FORM + 1), (1, True, 1)]
    assert find_snapshot(home, 1).version == 1
    for version in (None, 2):
        with refused("snapshot-version-unsupported"):
            find_snapshot(home, version)


def test_snapshot_metadata_may_have_unknown_entries_but_no_missing_ones(home: Home) -> None:
    take_snapshot(home, 1, more={"deep": True})
    take_snapshot(home, 2, devices=None)
    assert [(one.batch, one.is_known) for one in snapshots(home)] == [(2, False), (1, True)]
    with refused("snapshot-version-unsupported"):
        find_snapshot(home)


def test_snapshot_of_a_newer_format_pins_its_bronze_version_or_all_versions(home: Home) -> None:
    take_snapshot(home, 1, form=NOTE_FORM + 1, bronze=7, more=1)
    assert ("snapshot 1", 7) in [(one.reader, one.version) for one in reader_pins(home)]
    take_snapshot(home, 2, form=NOTE_FORM + 1, bronze="of several tables")
    assert ("snapshot 2", 0) in [(one.reader, one.version) for one in reader_pins(home)]


def test_snapshot_of_a_newer_format_is_kept_regardless_of_its_age(home: Home) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    take_snapshot(home, 1, form=NOTE_FORM + 1)
    take_snapshot(home, 2)
    take_snapshot(home, 3)
    for version in (0, 1, 2):
        commit = path / "_delta_log" / f"{version:020d}.json"
        commit.write_text(re.sub(r'"timestamp":\d+', f'"timestamp":{version * DAY_MS}', commit.read_text()))
    assert kept_versions(path, 2 * DAY_MS, 2**60) == [1, 3]


def test_snapshot_of_a_newer_format_does_not_break_other_commands(home: Home) -> None:
    take_snapshot(home)
    take_snapshot(home, 2, form=NOTE_FORM + 1, more=1)
    listed = CliRunner().invoke(app, ["state", "snapshots", "--home", str(home.path)])
    assert listed.exit_code == 0 and "form 2: of a newer version" in " ".join(listed.output.split())
    as_json = CliRunner().invoke(app, ["state", "snapshots", "--json", "--home", str(home.path)])
    assert [json.loads(line)["form"] for line in as_json.output.splitlines()] == [2, 1]
    bootstrap = CliRunner().invoke(app, ["state", "bootstrap", "--dry-run", "--home", str(home.path)])
    assert isinstance(bootstrap.exception, FleetError) and "--version" in str(bootstrap.exception)
    assert CliRunner().invoke(app, ["maintain", "--dry-run", "--home", str(home.path)]).exit_code == 0


def test_snapshot_that_another_program_appended_is_checked_by_opening_it(home: Home, opened: list[int]) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    take_snapshot(home, 1)
    take_snapshot(home, 2, mode="append")
    assert _kept(home) == [2, 1] and opened == [2]
    next(iter(files_of(path, 1))).unlink()
    assert _kept(home) == []
