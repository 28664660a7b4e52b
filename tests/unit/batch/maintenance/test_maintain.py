"""Maintenance of bronze: bounded size, without the removal of rows and versions that readers need."""

import json
import os
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from batch.maintenance.maintain import maintain
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES, QUARANTINE
from fleetpulse.io.checkpoints.generations import begin_generation, checkpoint_of, load_generations, save_generations
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.exclusive import exclusive_maintenance, exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms, require_kept
from fleetpulse.io.lifecycle.bronze_source import BlockReader
from fleetpulse.io.maintenance import readers
from fleetpulse.io.maintenance.readers import ReaderPin
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, tick
from tests.support.histories.histories import signal as heartbeat
from tests.support.homes.maintained import (
    DAY_MS,
    DAY_S,
    DAYS,
    EACH,
    KEEP,
    NOW_S,
    four_days,
    judged_up_to,
    land_live,
    read_on,
    run_maintain,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return four_days(tmp_path / "home")


def _files(home: Home) -> set[str]:
    return {str(path.relative_to(home.path)) for path in home.path.rglob("*") if path.is_file() and path.name != "maintain.lock"}


def test_compaction_preserves_rows_and_order_for_readers_by_version(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {version: read_on(home, version) for version in (0, 20, 30)}
    pins = [ReaderPin("a snapshot", 20), ReaderPin("another", 30)]
    monkeypatch.setattr(readers, "PIN_SOURCES", (*readers.PIN_SOURCES, lambda _: pins))
    steps, again = run_maintain(home), run_maintain(home)
    assert [step.files for step in steps if step.table == MESSAGES.name and step.did == "join"] == [12, 7, 5, 5, 7, 12]
    assert {version: read_on(home, version) for version in before} == before
    assert [step for step in again if step.did in ("join", "remove")] == []
    assert len(tables.files_of(home, MESSAGES, "received_at")) == 6


def test_versions_that_a_checkpoint_may_read_are_unchanged(home: Home) -> None:
    judged_up_to(home, 18, 40)  # the job can be rolled back to the first of them
    generation = begin_generation(home.lifecycle, home.generation(), key_groups=8, form=4, made_by="test", made_from={})
    judged_up_to(home, 25, generation=checkpoint_of(home.lifecycle, generation.number).name)
    versions = {version: DeltaLog(home.table(MESSAGES.name)).appended(version) for version in range(18, DAYS * EACH + 1)}
    run_maintain(home)
    log = DeltaLog(home.table(MESSAGES.name))
    assert {version: log.appended(version) for version in versions} == versions
    assert all(Path(path).exists() for files in versions.values() for path, _ in files)
    with refused("table-version-missing"):
        log.span(5)


def test_versions_for_rollback_to_a_retired_generation_are_kept(home: Home) -> None:
    before = read_on(home, 18)
    judged_up_to(home, 18, 20)
    generation = begin_generation(home.lifecycle, home.generation(), key_groups=8, form=4, made_by="test", made_from={})
    judged_up_to(home, 40, generation=checkpoint_of(home.lifecycle, generation.number).name)
    save_generations(home.lifecycle, load_generations(home.lifecycle).switched(generation.number, {}))
    run_maintain(home, replace(KEEP, messages_ms=DAY_MS))
    assert read_on(home, 18) == before
    assert read_on(home, 20) == before[2 * 3 :]
    with refused("table-version-missing"):
        DeltaLog(home.table(MESSAGES.name)).span(19)


def test_without_a_readable_checkpoint_no_bronze_is_removed(home: Home) -> None:
    shutil.rmtree(home.checkpoint)
    assert [step for step in run_maintain(home) if step.did in ("join", "remove") and step.table == MESSAGES.name] == []
    (home.checkpoint / "commits").mkdir(parents=True)
    (home.checkpoint / "offsets").mkdir()
    (home.checkpoint / "commits" / "0").write_text("v1\n{}")
    (home.checkpoint / "offsets" / "0").write_text("v1\n{}\ndamaged")
    with refused("offsets-damaged"):
        run_maintain(home)


def test_retention_keeps_internal_rows_and_the_first_and_sets_the_floor(home: Home) -> None:
    reader = {"path": str(home.table(MESSAGES.name)), "key_groups": "1"}
    started = BlockReader(reader)._started()
    recent = read_on(home, 1 + 2 * EACH)
    keep = replace(KEEP, messages_ms=DAY_MS)
    planned, done = run_maintain(home, keep, dry_run=True), run_maintain(home, keep)
    [removed] = [step for step in done if step.did == "remove"]
    assert (removed.files, removed.rows) == (2 * EACH, 2 * EACH * 3 - 1)
    assert [step for step in planned if step.did in ("remove", "join")] == [
        step for step in done if step.did in ("remove", "join")
    ]
    kinds = tables.query(home, "SELECT kind FROM messages WHERE epoch_ms(received_at) < ?", [START + 2 * DAY_MS], ["messages"])
    assert sorted(one["kind"] for one in kinds) == ["heartbeat", "policy"]
    assert BlockReader(reader)._started() == started
    assert read_on(home, 1 + 2 * EACH) == recent
    with refused("table-version-missing"):
        DeltaLog(home.table(MESSAGES.name)).span(0)
    kept_ms = oldest_kept_ms(home, MESSAGES.name)
    assert kept_ms == (START + 2 * DAY_MS) // DAY_MS * DAY_MS
    require_kept(home, MESSAGES.name, kept_ms, "a replay")
    with refused("rows-not-retained"):
        require_kept(home, MESSAGES.name, kept_ms - 1, "a replay")
    assert oldest_kept_ms(home, JUDGEMENTS.name) is None
    assert run_maintain(home, keep) == []
    again = run_maintain(home, replace(KEEP, messages_ms=0))  # the remaining old rows are filtered again
    assert [step.rows for step in again if step.did == "remove"] == [EACH * 3]
    assert BlockReader(reader)._started() == started


def test_row_in_the_future_does_not_make_other_rows_old(home: Home) -> None:
    ahead_s = (NOW_S - START / 1000) + 3650 * DAY_S
    land_live(home, [tick(ahead_s)], DAYS * EACH + 1)
    late_message = {"judged_at_ms": START, "kind": "late", "device_id": "a"}
    later = [late_message, {**late_message, "judged_at_ms": START + int(ahead_s * 1000)}]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, later), "job", 1)
    keep = replace(KEEP, messages_ms=int(NOW_S * 1000) - START + DAY_MS, late_ms=int(NOW_S * 1000) - START + DAY_MS)
    before = read_on(home, 0)
    steps = list(maintain(home, keep, dry_run=False, now_s=NOW_S))
    assert not [step for step in steps if step.did == "remove"]
    assert [step.table for step in steps if "in the future, so ages are relative to now" in step.note] == [MESSAGES.name]
    assert read_on(home, 0) == before
    assert oldest_kept_ms(home, MESSAGES.name) is None
    removed = [step for step in run_maintain(home, replace(KEEP, late_ms=DAY_MS)) if step.did == "remove"]
    assert {step.table for step in removed} == {MESSAGES.name, JUDGEMENTS.name}
    assert all("in the future" in step.note for step in removed)


def test_snapshot_pins_bronze_while_its_files_exist(home: Home) -> None:
    taken = {"generation": 1, "batch": 3, "bronze": EACH + 1, "newest_ms": START, "frontier_ms": START, "devices": 2}
    rows = [{"part": "device", "key_group": 1, "device_id": "a", "device_hash": 1}]
    for metadata in ({**taken, "bronze": 7}, taken):
        properties = CommitProperties(custom_metadata={"userMetadata": json.dumps({**metadata, "key_groups": 8})})
        table = tables.to_table(DEVICE_SNAPSHOTS, rows)
        write_deltalake(str(home.table(DEVICE_SNAPSHOTS.name)), table, mode="overwrite", commit_properties=properties)
    assert [(one.reader, one.version) for one in readers.reader_pins(home)][:2] == [("snapshot 1", 7), ("snapshot 2", EACH + 1)]
    for name in DeltaTable(str(home.table(DEVICE_SNAPSHOTS.name)), version=1).file_uris():
        Path(name).unlink()
    run_maintain(home, replace(KEEP, messages_ms=DAY_MS))
    with refused("table-version-missing"):
        read_on(home, 7)
    assert len(read_on(home, EACH + 1)) == 3 * EACH * 3


def test_a_dry_run_changes_nothing(home: Home) -> None:
    before = _files(home)
    assert run_maintain(home, dry_run=True)
    assert _files(home) == before


def test_maintenance_waits_for_a_state_change_or_other_maintenance(home: Home) -> None:
    lines: list[str] = []
    with ExitStack() as other:
        other.enter_context(exclusive_state_change(home, "fleet state snapshot", lines.append))

        def report(line: str) -> None:
            lines.append(line)
            other.close()  # the other process ends while maintenance waits for it

        assert list(maintain(home, KEEP, dry_run=True, now_s=NOW_S, report=report))
    [line] = lines
    assert line.startswith("waiting for fleet state snapshot (process ")
    refusal = refused("work-still-running")
    with exclusive_maintenance(home, lines.append), refusal, exclusive_maintenance(home, lines.append, patience_s=0.0):
        pass


def test_progress_of_each_writer_survives_log_cleanup(home: Home) -> None:
    for number in range(1, 40):
        row = {"received_at_ms": START + number, "topic": "t", "reason": "json", "detail": "d", "bridge": "b", "segment": 1}
        tables.append(home, QUARANTINE, tables.to_table(QUARANTINE, [{**row, "origin": "mqtt"}]), f"w{number % 3}", number)
    run_maintain(home)
    log = home.table(MESSAGES.name) / "_delta_log"
    assert len(list(log.glob("*.json"))) <= 5
    assert tables.landed(home, MESSAGES, "test") == DAYS * EACH
    assert [tables.landed(home, QUARANTINE, f"w{number}") for number in range(3)] == [39, 37, 38]
    land_live(home, [tick(DAYS * DAY_S)], DAYS * EACH + 1)
    assert tables.landed(home, MESSAGES, "test") == DAYS * EACH + 1
    assert tables.query(home, "SELECT count(*) AS n FROM quarantine", tables=["quarantine"]) == [{"n": 39}]


def test_temporary_file_of_a_pending_commit_is_kept(home: Home) -> None:
    log = home.table(MESSAGES.name) / "_delta_log"
    pending, abandoned = (log / f".{9:020d}.json.{letter * 32}.tmp" for letter in "ab")
    for path in (pending, abandoned):
        path.write_text("{}")
    an_hour_ago = time.time() - 3_600
    os.utime(abandoned, (an_hour_ago, an_hour_ago))
    list(maintain(home, KEEP, dry_run=False))
    assert pending.exists() and not abandoned.exists()


def test_landing_during_maintenance_loses_and_duplicates_no_row(home: Home) -> None:
    last = DAYS * EACH + 60

    def land() -> None:
        for number in range(DAYS * EACH + 1, last + 1):
            land_live(home, [heartbeat(DAYS * DAY_S + number, "a")], number)

    writer = threading.Thread(target=land)
    writer.start()
    rounds = 0
    while writer.is_alive():
        judged_up_to(home, DeltaLog(home.table(MESSAGES.name)).latest() - 2)
        list(maintain(home, replace(KEEP, replaced_ms=1_000), dry_run=False))
        rounds += 1
    writer.join()
    assert rounds > 1
    found = tables.query(home, "SELECT segment, count(*) AS n FROM messages GROUP BY 1 ORDER BY 1", tables=["messages"])
    assert [one["segment"] for one in found] == list(range(1, last + 1))
    assert {one["n"] for one in found[DAYS * EACH :]} == {1}
    assert tables.landed(home, MESSAGES, "test") == last


def test_compaction_works_on_a_log_without_its_oldest_entries(home: Home) -> None:
    expected, log = read_on(home, 0), home.table(MESSAGES.name) / "_delta_log"
    table = DeltaTable(str(home.table(MESSAGES.name)))
    table.create_checkpoint()
    for version in range(20):
        (log / f"{version:020d}.json").unlink()
    run_maintain(home)
    assert read_on(home, 0) == expected


def test_log_cleanup_of_delta_keeps_the_versions_of_bronze(home: Home) -> None:
    log = home.table(MESSAGES.name) / "_delta_log"
    for path in log.glob("*.json"):
        os.utime(path, (1, 1))
    table = DeltaTable(str(home.table(MESSAGES.name)))
    table.create_checkpoint()
    for number in range(DAYS * EACH + 1, DAYS * EACH + 102):  # these include a checkpoint with log cleanup
        land_live(home, [tick(DAYS * DAY_S + number)], number)
    assert len(list(log.glob("*.checkpoint.parquet"))) > 1
    assert (log / f"{0:020d}.json").exists()
