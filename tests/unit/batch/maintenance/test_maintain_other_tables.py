"""Maintenance of judgements, snapshots, generations, logs and temporary files, within reader pins."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from batch.maintenance import retention
from batch.maintenance.maintain import maintain
from batch.maintenance.plan import FULL
from fleetpulse.core.streams.tables import COMMANDS, SESSIONS, VITAL_ALARMS, VITALS
from fleetpulse.core.tables import AUDIT, DEVICE_SNAPSHOTS, GATEWAYS, JUDGEMENTS, QUARANTINE
from fleetpulse.io.checkpoints.generations import begin_generation, checkpoint_of, load_generations, save_generations
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.maintenance import compaction, disk_cleanup, vacuum
from fleetpulse.io.maintenance.readers import reader_pins
from fleetpulse.io.spark import scratch
from fleetpulse.io.tables import tables
from fleetpulse.reports.history.replay_origin import CAME_LATE
from streaming.landing.gateways import known_gateways
from tests.support.histories.histories import START
from tests.support.homes.maintained import DAY_MS, DAY_S, KEEP, NOW_S, date, four_days, judged_up_to, run_maintain

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return four_days(tmp_path / "home")


def test_retention_keeps_the_newest_summary_of_each_key_group(home: Home) -> None:
    rows = [
        {"kind": "summary", "key_group": group, "event_time_ms": START, "judged_at_ms": START + day * DAY_MS, "counts": "{}"}
        for group, days in ((0, (0, 10, 50)), (1, (5, 8)))
        for day in days
    ] + [
        {"kind": "transition", "device_id": "a", "judged_at_ms": START},
        {"kind": "late", "device_id": "a", "judged_at_ms": START},
    ]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "job", 1)
    run_maintain(home)
    remaining = tables.query(
        home, "SELECT kind, key_group, epoch_ms(judged_at) - ? AS at FROM judgements ORDER BY 1, 2, 3", [START]
    )
    assert [(one["kind"], one["key_group"], one["at"] // DAY_MS) for one in remaining] == [
        ("late", None, 0),
        ("summary", 0, 50),
        ("summary", 1, 8),
        ("transition", None, 0),
    ]


def test_audit_records_are_kept_for_their_own_time(home: Home) -> None:
    days = (0, 100, 150)
    rows = [{"recorded_at_ms": START + day * DAY_MS, "id": str(day), "phase": "finished", "action": "amend"} for day in days]
    tables.append(home, AUDIT, tables.to_table(AUDIT, rows), "test", 1)

    def kept(audit_ms: int | None) -> list[str]:
        run_maintain(home, replace(KEEP, audit_ms=audit_ms))
        return [one["id"] for one in tables.query(home, "SELECT id FROM audit ORDER BY recorded_at", tables=[AUDIT.name])]

    assert kept(None) == ["0", "100", "150"]
    assert kept(90 * DAY_MS) == ["100", "150"]


def test_a_dry_run_foresees_the_checkpoints_due_to_its_own_commits(home: Home) -> None:
    for number in range(vacuum.MIN_VERSIONS - 1):  # the last commit before a checkpoint is due
        row = {"recorded_at_ms": START + number * 100 * DAY_MS, "id": str(number), "phase": "finished", "action": "amend"}
        tables.append(home, AUDIT, tables.to_table(AUDIT, [row]), "test", number)
    keep = replace(KEEP, audit_ms=90 * DAY_MS)
    planned, done = (
        [step.table for step in run_maintain(home, keep, dry_run=is_dry) if step.did == "checkpoint"] for is_dry in (True, False)
    )
    assert planned == done
    assert AUDIT.name in done


def test_windows_and_alarms_are_kept_for_the_time_of_vitals(home: Home) -> None:
    for table, instant in ((VITALS, "window_end"), (VITAL_ALARMS, "raised_at")):
        tables.create(home, table)
        rows = [{f"{instant}_ms": START + day * DAY_MS, "device_id": str(day)} for day in (0, 100, 150)]
        tables.append(home, table, tables.to_table(table, rows), "test", 1)
    run_maintain(home, replace(KEEP, vitals_ms=90 * DAY_MS))
    for table in (VITALS, VITAL_ALARMS):
        remaining = tables.query(home, f"SELECT device_id FROM {table.name} ORDER BY ALL", tables=[table.name])
        assert [one["device_id"] for one in remaining] == ["100", "150"]


def test_newest_old_row_of_each_gateway_is_kept(home: Home) -> None:
    arrival = {"origin": "mqtt", "bridge": "b", "segment": 1}
    days = [("g", "a", 0), ("h", "a", 0.1), ("g", "b", 0.5), ("g", "c", 0.5), ("i", "a", 3), ("g", "d", 2.9)]
    for number, (name, session, day) in enumerate(days):
        row = {"received_at_ms": START + int(day * DAY_MS), "device_id": name, "event": "session", "session": session}
        tables.append(home, GATEWAYS, tables.to_table(GATEWAYS, [{**row, **arrival, "place": number}]), "test", number)
    before = known_gateways(home, {}), known_gateways(home, {"b": 4})
    steps = run_maintain(home, replace(KEEP, messages_ms=DAY_MS))
    assert [(one.did, one.rows) for one in steps if one.table == GATEWAYS.name][:1] == [("remove", 2)]
    left = tables.query(home, "SELECT device_id, session FROM gateways ORDER BY place", tables=[GATEWAYS.name])
    assert [tuple(one.values()) for one in left] == [("h", "a"), ("g", "c"), ("i", "a"), ("g", "d")]
    after = known_gateways(home, {}), known_gateways(home, {"b": 4})
    assert [{*one} for one in after] == [{*one} for one in before], "landing restores the same gateways"
    assert not [one for one in run_maintain(home, replace(KEEP, messages_ms=DAY_MS)) if one.did == "remove"]


def test_late_messages_are_kept_until_amend_has_processed_them(home: Home) -> None:
    message = {"device_id": "a", "message_kind": "heartbeat"}
    rows = [
        {**message, "kind": kind, "judged_at_ms": START + day * DAY_MS, "received_at_ms": START + day * DAY_MS}
        for kind in ("late", "duplicate", "refused")
        for day in (0, 1, 2, 9)
    ]
    rows.append({**rows[1], "kind": "refused", "message_kind": "registry", "received_at_ms": START + DAY_MS + 1})

    def remaining_days() -> dict[str, list[int]]:
        sql = (
            "SELECT kind, list(epoch_ms(received_at) - ? ORDER BY received_at) AS at FROM judgements GROUP BY kind ORDER BY kind"
        )
        return {one["kind"]: [at // DAY_MS for at in one["at"]] for one in tables.query(home, sql, [START])}

    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "job", 1)
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "amend", START + DAY_MS)
    keep = replace(KEEP, late_ms=5 * DAY_MS)
    steps = [step for step in maintain(home, keep, dry_run=False, now_s=NOW_S) if step.table == JUDGEMENTS.name]
    assert [(step.did, step.rows) for step in steps][:2] == [("hold", 2), ("remove", 8)]
    assert "fleet amend" in steps[0].note
    assert remaining_days() == {"duplicate": [9], "late": [2, 9], "refused": [1, 9]}
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "amend", START + 9 * DAY_MS)
    run_maintain(home, keep)
    assert remaining_days() == {"duplicate": [9], "late": [9], "refused": [9]}


def test_row_for_several_late_messages_is_kept_until_amend_has_processed_the_last(home: Home) -> None:
    columns = {"kind": "late", "device_id": "a", "message_kind": "heartbeat", "judged_at_ms": START + DAY_MS}
    several = {**columns, "received_at_ms": START, "messages": 3, "received_until_ms": START + 2 * DAY_MS}
    newest = {**columns, "judged_at_ms": START + 9 * DAY_MS, "received_at_ms": START + 9 * DAY_MS}
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [several, newest]), "job", 1)
    keep, count = replace(KEEP, late_ms=5 * DAY_MS), "SELECT count(*) AS n FROM judgements"
    for amended_ms, remaining in ((START + DAY_MS, 2), (START + 2 * DAY_MS, 1)):
        tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "amend", amended_ms)
        run_maintain(home, keep)
        assert tables.query(home, count)[0]["n"] == remaining
    assert oldest_kept_ms(home, CAME_LATE) == START // 60_000 * 60_000 + 60_000, "behind the last message of the minute"


def _append_summaries(home: Home, *summaries: tuple[int, int, int]) -> None:
    """Append summaries, each given as generation, key group and day."""
    summary = {"kind": "summary", "event_time_ms": START, "counts": "{}"}
    rows = [{**summary, "generation": one[0], "key_group": one[1], "judged_at_ms": START + one[2] * DAY_MS} for one in summaries]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "job", 1 + tables.landed(home, JUDGEMENTS, "job"))


def _remaining_summaries(home: Home) -> list[tuple[int, int, int]]:
    sql = "SELECT generation AS g, key_group AS k, epoch_ms(judged_at) - ? AS at FROM judgements ORDER BY 1, 2, 3"
    return [(one["g"], one["k"], one["at"] // DAY_MS) for one in tables.query(home, sql, [START])]


def _switch_generation(home: Home, made_by: str) -> None:
    """Switch to a new generation."""
    source = {"generation": home.generation().number}
    generation = begin_generation(home.lifecycle, home.generation(), key_groups=2, form=4, made_by=made_by, made_from=source)
    save_generations(home.lifecycle, load_generations(home.lifecycle).switched(generation.number, {}))
    judged_up_to(home, 40, generation=checkpoint_of(home.lifecycle, generation.number).name)


def test_summaries_of_a_retired_generation_are_removed_once_replaced(home: Home) -> None:
    summaries = [(1, 0, 0), (1, 1, 1), (1, 7, 1)]
    _append_summaries(home, *summaries)
    _switch_generation(home, "test")
    run_maintain(home, replace(KEEP, summaries_ms=-2 * DAY_MS))  # all are old; the current generation has no summary yet
    assert _remaining_summaries(home) == summaries
    _append_summaries(home, (2, 0, 30), (2, 0, 31), (2, 1, 90))
    run_maintain(home)
    assert _remaining_summaries(home) == [(2, 0, 31), (2, 1, 90)]


def test_newest_summary_of_a_key_group_survives_a_copy_of_its_generation(home: Home) -> None:
    _append_summaries(home, (1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 2, 3))
    _switch_generation(home, "repartition")
    _append_summaries(home, (2, 1, 30), (2, 1, 61))  # the counts of key groups 0 and 2 are unchanged
    run_maintain(home)
    assert _remaining_summaries(home) == [(1, 0, 0), (1, 2, 3), (2, 1, 61)]
    _switch_generation(home, "rescale")
    run_maintain(home, replace(KEEP, summaries_ms=-2 * DAY_MS))  # the current generation has no summary yet
    assert _remaining_summaries(home) == [(1, 0, 0), (1, 2, 3), (2, 1, 61)]
    _append_summaries(home, (3, 0, 99))
    run_maintain(home)
    assert _remaining_summaries(home) == [(3, 0, 99)]


def _retire_generations(home: Home, *days_ago: int) -> None:
    """Switch to new generations in turn, each the given number of days before now."""
    for days in days_ago:
        source, at_ms = {"generation": home.generation().number}, int(NOW_S * 1000) - days * DAY_MS
        generation = begin_generation(home.lifecycle, home.generation(), key_groups=2, form=4, made_by="test", made_from=source)
        judged_up_to(home, 40, generation=checkpoint_of(home.lifecycle, generation.number).name)
        record = load_generations(home.lifecycle).switched(generation.number, {"batch": 0, "retired_at_ms": at_ms})
        save_generations(home.lifecycle, record)


def _checkpoints(home: Home) -> list[str]:
    return sorted(path.name for path in home.lifecycle.glob("gen-*"))


def test_old_retired_generations_are_pruned_except_the_newest(home: Home) -> None:
    _retire_generations(home, 90, 45, 40)
    keep = replace(KEEP, generations_ms=42 * DAY_MS)
    with home.state_held("the lifecycle job"):  # the job may run meanwhile
        planned, done = run_maintain(home, keep, dry_run=True), run_maintain(home, keep)
    pruned = [(step.did, step.files, "generation " + step.note.split()[2]) for step in done if step.table == "checkpoints"]
    assert pruned == [("delete", 2, "generation 1,"), ("delete", 2, "generation 2,")]
    assert [step for step in planned if step.table == "checkpoints"] == [step for step in done if step.table == "checkpoints"]
    assert _checkpoints(home) == ["gen-0003", "gen-0004"]
    assert {pin.reader for pin in reader_pins(home)} == {"generation 3, kept for rollback", "generation 4"}
    run_maintain(home, replace(KEEP, generations_ms=DAY_MS))
    assert _checkpoints(home) == ["gen-0003", "gen-0004"]  # the generation for rollback is kept at any age


def test_generations_are_not_pruned_if_recent_or_kept_forever(home: Home) -> None:
    _retire_generations(home, 20, 10)
    for keep in (replace(KEEP, generations_ms=30 * DAY_MS), replace(KEEP, generations_ms=None)):
        run_maintain(home, keep)
        assert _checkpoints(home) == ["gen-0001", "gen-0002", "gen-0003"]


def test_pruning_is_held_during_a_state_change_and_resumes_after_a_kill(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    _retire_generations(home, 90, 45)
    with monkeypatch.context() as locks:
        # The state change holds only its first lock so far.
        locks.setattr("fleetpulse.io.home.exclusive.MAINTAIN_LOCK", "another.lock")
        with exclusive_state_change(home, "fleet state rescale", lambda line: None):
            locks.undo()
            held = list(maintain(home, replace(KEEP, generations_ms=DAY_MS), dry_run=False, now_s=NOW_S))
    assert [step.did for step in held if step.table == "checkpoints"] == ["hold"]
    assert "fleet state rescale" in next(step.note for step in held if step.table == "checkpoints")
    assert len(_checkpoints(home)) == 3
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda path, **options: None)
        run_maintain(home, replace(KEEP, generations_ms=DAY_MS))
    run_maintain(home, replace(KEEP, generations_ms=DAY_MS))
    assert _checkpoints(home) == ["gen-0002", "gen-0003"]


def test_generation_without_a_recorded_retirement_is_dated_by_its_successor(home: Home) -> None:
    _switch_generation(home, "test")
    _switch_generation(home, "test")
    record = load_generations(home.lifecycle)
    made_at_ms = [record.known[number].made_at_ms for number in (2, 3)]
    assert [record.retired_at_ms(number) for number in (1, 2, 3)] == [*made_at_ms, None]


def test_amendments_are_kept_as_long_as_transitions(home: Home) -> None:
    kinds = ("transition", "retract", "add", "late")
    rows = [{"kind": kind, "device_id": "a", "judged_at_ms": START + day * DAY_MS} for kind in kinds for day in (0, 9)]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "job", 1)
    run_maintain(home, replace(KEEP, late_ms=DAY_MS))
    remaining = tables.query(home, "SELECT kind, count(*) AS n FROM judgements GROUP BY kind ORDER BY kind")
    assert {one["kind"]: one["n"] for one in remaining} == {"add": 2, "late": 1, "retract": 2, "transition": 2}


def test_log_cleanup_of_judgements_keeps_versions_that_a_batch_may_commit(home: Home) -> None:
    (home.checkpoint / "metadata").write_text('{"id": "query"}')
    row = tables.to_table(JUDGEMENTS, [{"kind": "transition", "device_id": "a", "judged_at_ms": START}])
    path = home.table(JUDGEMENTS.name)

    def log_versions_after(*writers: str) -> list[int]:
        for writer in writers:
            tables.append(home, JUDGEMENTS, row, writer, DeltaTable(str(path)).version() + 1)
        run_maintain(home)
        return sorted(int(one.stem) for one in (path / "_delta_log").glob("*.json") if one.stem.isdecimal())

    created = DeltaTable(str(path)).version()
    compacted = created + 16  # the commit in which maintenance compacts these files; a checkpoint follows
    assert log_versions_after("query", *["amend"] * 14) == [*range(compacted + 1)], (
        "a batch that started after the query's commit may be unfinished"
    )
    assert log_versions_after("query") == [compacted, compacted + 1]
    for metadata in ('{"id": "one that has not committed yet"}', "cut off"):
        (home.checkpoint / "metadata").write_text(metadata)
        before = log_versions_after()
        assert log_versions_after(*["amend"] * 12)[: len(before)] == before


def test_retention_keeps_one_readable_snapshot_a_day(home: Home) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    shutil.rmtree(path)
    for number in range(6):
        write_deltalake(str(path), pa.table({"number": [number]}), mode="overwrite")
    date(path, {version: START + version // 2 * DAY_MS + version * 1000 for version in range(6)})  # two on each of three days
    [step] = [step for step in run_maintain(home, replace(KEEP, device_snapshots_ms=DAY_MS + 5_000)) if step.table == path.name]
    assert (step.did, step.files) == ("delete", 3)
    kept = {version: DeltaTable(str(path), version=version).to_pyarrow_table()["number"].to_pylist() for version in (3, 4, 5)}
    assert kept == {3: [3], 4: [4], 5: [5]}
    with pytest.raises(FileNotFoundError):
        DeltaTable(str(path), version=2).to_pyarrow_table()


def test_old_airflow_logs_approvals_and_backtests_are_removed_with_their_folders(home: Home) -> None:
    airflow = home.path / "airflow"
    backtests = airflow / "fleet" / "backtests"
    old, young = airflow / "logs" / "dag_id=a" / "run_id=1" / "1.log", airflow / "logs" / "dag_id=a" / "run_id=2" / "1.log"
    files = {old: 40, young: 10, backtests / "1" / "report.html": 40, backtests / "2" / "report.html": 10}
    unused, valid = (airflow / "fleet" / "approvals" / f"{name}.json" for name in ("unused", "valid"))
    files |= {unused: 8, valid: 6, backtests / "2" / "policy.toml": 40, airflow / "passwords.json": 400}
    for path, days in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a line")
        for one in (path, path.parent):
            os.utime(one, (NOW_S - days * DAY_S, NOW_S - days * DAY_S))
    (airflow / "logs" / "latest").symlink_to(old.parent)

    def steps(*, dry_run: bool, days: int = 0) -> list[tuple[str, int, str]]:
        done = maintain(home, KEEP, dry_run=dry_run, now_s=NOW_S + days * DAY_S)
        return [(one.table, one.files, one.note) for one in done if one.note == "of Airflow"]

    removed = [("logs", 1, "of Airflow"), ("approvals", 1, "of Airflow"), ("backtests", 1, "of Airflow")]
    assert steps(dry_run=True) == removed and all(path.exists() for path in files)
    assert steps(dry_run=False) == removed and steps(dry_run=False) == []
    assert {path for path in files if path.exists()} == set(files) - {old, unused, backtests / "1" / "report.html"}
    assert [path.name for path in backtests.iterdir()] == ["2"]
    os.utime(old.parent, (NOW_S - 2 * DAY_S, NOW_S - 2 * DAY_S))
    assert steps(dry_run=False) == [] and not old.parent.exists() and young.exists()


def test_old_logs_are_removed_except_of_running_processes_and_long_ones_rotated(home: Home) -> None:
    for name, days in (("landing", 40), ("bridge", 40), ("lifecycle", 1)):
        path = home.logs / f"{name}.log"
        path.write_text("a line")
        os.utime(path, (NOW_S - days * DAY_S, NOW_S - days * DAY_S))
    (home.run("bridge")).write_text("{}")
    with (home.logs / "simulator.log").open("ab") as log:
        log.truncate(disk_cleanup.LONG_BYTES + 1)
        list(maintain(home, KEEP, dry_run=False, now_s=NOW_S))
        log.write(b"goes on")
    names = {path.name for path in home.logs.iterdir()}
    assert names == {"bridge.log", "lifecycle.log", "simulator.log", "simulator.log.1"}
    assert (home.logs / "simulator.log").read_bytes() == b"goes on"


def test_leftovers_of_a_killed_spark_are_removed_by_maintenance_or_next_start(home: Home) -> None:
    spark_folder = home.path / "spark"
    kept = [spark_folder / "spark-warehouse", spark_folder / "batch-1"]
    leftovers = [
        spark_folder / "local" / "blockmgr-1",
        spark_folder / "tmp" / "artifacts-1",
        spark_folder / "blocks-1",
        spark_folder / "batch-1" / "local" / "spark-1",
        spark_folder / "batch-1" / "blocks-2",
    ]
    for folder in (*kept, *leftovers):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shuffle").write_bytes(bytes(10))
    for folder in (*leftovers, spark_folder / "local", spark_folder / "tmp"):
        os.utime(folder, (NOW_S - 2 * DAY_S, NOW_S - 2 * DAY_S))
    young = spark_folder / "blocks-3"
    young.mkdir()
    os.utime(young, (NOW_S - DAY_S / 2, NOW_S - DAY_S / 2))
    assert disk_cleanup.spark_remains(home, NOW_S) == sorted(leftovers)
    removed = [
        (one.table, one.files, one.size_bytes) for one in maintain(home, KEEP, dry_run=False, now_s=NOW_S) if one.table == "spark"
    ]
    assert removed == [("spark", 5, 50)] and not any(folder.exists() for folder in leftovers)
    assert scratch.leftovers(spark_folder) == [young, spark_folder / "local", spark_folder / "tmp"], (
        "a session that starts in this folder owns it, so leftovers of any age are removed"
    )
    scratch.remove_folders(scratch.leftovers(spark_folder))
    assert {path.name for path in spark_folder.iterdir()} == {path.name for path in kept}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), DeltaError("Generic error: (os error 28)")])
def test_full_disk_stops_steps_that_write_but_not_those_that_delete(
    home: Home, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    def half_copied(_: Path, fresh: Path) -> None:
        fresh.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = [{"received_at_ms": START + day * DAY_MS, "reason": "not_json", "topic": "a"} for day in (0, 200)]
    tables.append(home, QUARANTINE, tables.to_table(QUARANTINE, rows), "landing", 1)
    log = home.logs / "simulator.log"
    log.write_text("a line")
    os.utime(log, (NOW_S - 40 * DAY_S, NOW_S - 40 * DAY_S))
    with monkeypatch.context() as disk:
        for module, name in ((compaction, "replace_durably"), (retention, "raise_floor"), (vacuum, "write_log_checkpoint")):
            disk.setattr(module, name, full)
        disk.setattr(disk_cleanup.shutil, "copyfile", half_copied)
        disk.setattr(disk_cleanup, "LONG_BYTES", 3)
        (home.logs / "bridge.log").write_text("long")
        done = list(maintain(home, KEEP, dry_run=False, now_s=NOW_S))
    assert [one.table for one in done if one.note == FULL] == ["messages", "quarantine", "logs"]
    assert not [*home.table("messages").rglob("*.tmp"), *home.logs.glob("*.new")], "partial files are removed"
    assert not log.exists() and tables.query(home, "SELECT count(*) AS n FROM quarantine", tables=["quarantine"]) == [{"n": 2}]
    did = {(one.table, one.did) for one in maintain(home, KEEP, dry_run=False, now_s=NOW_S)}
    assert {("messages", "join"), ("messages", "checkpoint"), ("quarantine", "remove")} <= did, "the next run does these steps"


@pytest.mark.parametrize("most_open", [1_000, 0])
def test_old_sessions_are_removed_once_they_have_ended(home: Home, monkeypatch: pytest.MonkeyPatch, most_open: int) -> None:
    monkeypatch.setattr(retention, "_MOST_OPEN", most_open)

    def row(device: str, started_day: int, ended_day: int | None = None) -> dict[str, object]:
        last_day = started_day if ended_day is None else ended_day
        return {
            "device_id": device, "site": "s", "started_at_ms": START + started_day * DAY_MS, "position": 0, "started_by": "birth",
            "last_seen_ms": START + last_day * DAY_MS, "messages": 1,
            "ended_at_ms": None if ended_day is None else START + ended_day * DAY_MS, "ended_by": ended_day and "will",
        }  # fmt: skip

    rows = [row("ended", 0), row("ended", 0, 1), row("open", 2), row("late end", 0), row("late end", 0, 50), row("new", 50)]
    tables.create(home, SESSIONS)
    tables.append(home, SESSIONS, tables.to_table(SESSIONS, rows), "job", 1)
    run_maintain(home, replace(KEEP, sessions_ms=30 * DAY_MS))
    found = tables.query(
        home, "SELECT device_id, ended_at IS NULL AS is_start FROM sessions ORDER BY ALL", tables=[SESSIONS.name]
    )
    kept = [("late end", False), *([("late end", True)] if not most_open else []), ("new", True), ("open", True)]
    if not most_open:  # with many open sessions, all old starts are kept
        kept.insert(0, ("ended", True))
    assert [(one["device_id"], one["is_start"]) for one in found] == kept


def test_old_vitals_and_commands_are_removed(home: Home) -> None:
    days = (0, 50)
    for table in (VITALS, COMMANDS):
        tables.create(home, table)
    vitals = [{"device_id": "d", "metric": "battery", "window_end_ms": START + day * DAY_MS} for day in days]
    commands = [{"command_id": str(day), "status": "pending", "sent_at_ms": START + day * DAY_MS} for day in days]
    commands += [{"command_id": f"u{day}", "status": "unmatched", "answered_at_ms": START + day * DAY_MS} for day in days]
    tables.append(home, VITALS, tables.to_table(VITALS, vitals), "job", 1)
    tables.append(home, COMMANDS, tables.to_table(COMMANDS, commands), "job", 1)
    run_maintain(home, replace(KEEP, vitals_ms=30 * DAY_MS, commands_ms=30 * DAY_MS))
    count = "SELECT count(*) AS n FROM vitals"
    assert tables.query(home, count, tables=[VITALS.name])[0]["n"] == 1
    found = tables.query(home, "SELECT command_id FROM commands ORDER BY 1", tables=[COMMANDS.name])
    assert [one["command_id"] for one in found] == ["50", "u50"]
