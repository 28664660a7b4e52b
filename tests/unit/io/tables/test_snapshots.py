"""The snapshots that are kept: those whose version can be opened, and whose files are all there, without opening each."""

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
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.state_reader import reporting_corruption_of_snapshot
from fleetpulse.io.maintenance.readers import reader_pins
from fleetpulse.io.maintenance.vacuum import DAY_MS, kept_versions
from fleetpulse.io.tables import snapshots as snapshot_table
from fleetpulse.io.tables.snapshots import NOTE_FORM, files_of, find_snapshot, is_whole, shown_snapshot, snapshots
from tests.support.homes.homes import take_snapshot
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(), name="a home")]


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


def test_what_the_table_shows_is_the_newest_snapshot_while_it_is_whole(home: Home) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    assert shown_snapshot(home) is None
    for batch in (1, 2):
        take_snapshot(home, batch)
    DeltaTable(str(path)).optimize.compact()
    shown = shown_snapshot(home)
    assert shown is not None and (shown.version, shown.batch) == (2, 2)
    next(iter(files_of(path, 2))).unlink()
    assert shown_snapshot(home) is None, "an older one is kept, and the table does not show it"


def test_what_fails_over_a_snapshot_with_a_damaged_file_is_said_of_the_snapshot(home: Home) -> None:
    take_snapshot(home)
    take_snapshot(home, 2)
    files = files_of(home.table(DEVICE_SNAPSHOTS.name), 2)
    files[-1].write_bytes(files[-1].read_bytes()[:-40])
    said = rf"(?s)snapshot version 2 cannot be read: file {files[-1].name}: .*; name another with --version; .*state snapshots"
    with refused("snapshot-unreadable", match=said), reporting_corruption_of_snapshot(home, 2):
        raise PySparkException("Job aborted due to stage failure")
    with refused("snapshot-unreadable", match=said), reporting_corruption_of_snapshot(home, 2):
        raise FleetError("no condition on a device") from PySparkException("Job aborted due to stage failure")
    files[-1].unlink()
    with (
        refused("snapshot-unreadable", match=f"file {files[-1].name}"),
        reporting_corruption_of_snapshot(home, 2),
    ):
        raise PySparkException("Job aborted due to stage failure")


def test_what_fails_over_a_whole_snapshot_is_not_said_of_it(home: Home) -> None:
    take_snapshot(home)
    with pytest.raises(PySparkException, match="Job aborted"), reporting_corruption_of_snapshot(home, 1):
        raise PySparkException("Job aborted due to stage failure")
    with pytest.raises(FleetError, match="no device"), reporting_corruption_of_snapshot(home, 1):
        raise FleetError("no device fits")


def test_a_file_that_spark_names_is_the_snapshots_fault_though_it_can_be_read(home: Home) -> None:
    take_snapshot(home)
    name = files_of(home.table(DEVICE_SNAPSHOTS.name), 1)[0].name
    with (
        refused("snapshot-unreadable", match=rf"snapshot version 1 cannot be read: Checksum error: {name}"),
        reporting_corruption_of_snapshot(home, 1),
    ):
        raise PySparkException(f"Checksum error: {name}")


def test_a_snapshot_of_a_newer_version_is_listed_and_refused_by_its_name(home: Home) -> None:
    take_snapshot(home)
    take_snapshot(home, 2, form=NOTE_FORM + 1, devices={"online": 3}, unmet={"e": 1}, deep=True)
    assert [(one.version, one.is_known, one.form) for one in snapshots(home)] == [(2, False, NOTE_FORM + 1), (1, True, 1)]
    assert find_snapshot(home, 1).version == 1
    for version in (None, 2):
        with refused("snapshot-version-unsupported"):
            find_snapshot(home, version)


def test_entries_that_a_form_does_not_have_are_passed_over_and_those_that_it_wants_are_not(home: Home) -> None:
    take_snapshot(home, 1, more={"deep": True})
    take_snapshot(home, 2, devices=None)
    assert [(one.batch, one.is_known) for one in snapshots(home)] == [(2, False), (1, True)]
    with refused("snapshot-version-unsupported"):
        find_snapshot(home)


def test_a_snapshot_of_a_newer_version_needs_its_bronze_and_all_where_it_does_not_say_which(home: Home) -> None:
    take_snapshot(home, 1, form=NOTE_FORM + 1, bronze=7, more=1)
    assert ("snapshot 1", 7) in [(one.who, one.version) for one in reader_pins(home)]
    take_snapshot(home, 2, form=NOTE_FORM + 1, bronze="of several tables")
    assert ("snapshot 2", 0) in [(one.who, one.version) for one in reader_pins(home)]


def test_a_snapshot_of_a_newer_version_is_not_thinned_out(home: Home) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    take_snapshot(home, 1, form=NOTE_FORM + 1)
    take_snapshot(home, 2)
    take_snapshot(home, 3)
    for version in (0, 1, 2):
        commit = path / "_delta_log" / f"{version:020d}.json"
        commit.write_text(re.sub(r'"timestamp":\d+', f'"timestamp":{version * DAY_MS}', commit.read_text()))
    assert kept_versions(path, 2 * DAY_MS, 2**60) == [1, 3]


def test_a_snapshot_of_a_newer_version_stands_in_no_verbs_way(home: Home) -> None:
    take_snapshot(home)
    take_snapshot(home, 2, form=NOTE_FORM + 1, more=1)
    listed = CliRunner().invoke(app, ["state", "snapshots", "--home", str(home.path)])
    assert listed.exit_code == 0 and "form 2: of a newer version" in " ".join(listed.output.split())
    told = CliRunner().invoke(app, ["state", "snapshots", "--json", "--home", str(home.path)])
    assert [json.loads(line)["form"] for line in told.output.splitlines()] == [2, 1]
    refused = CliRunner().invoke(app, ["state", "bootstrap", "--dry-run", "--home", str(home.path)])
    assert isinstance(refused.exception, FleetError) and "--version" in str(refused.exception)
    assert CliRunner().invoke(app, ["maintain", "--dry-run", "--home", str(home.path)]).exit_code == 0


def test_what_another_wrote_beside_what_was_there_is_looked_at_as_a_whole(home: Home, opened: list[int]) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    take_snapshot(home, 1)
    take_snapshot(home, 2, mode="append")
    assert _kept(home) == [2, 1] and opened == [2]
    next(iter(files_of(path, 1))).unlink()
    assert _kept(home) == []
