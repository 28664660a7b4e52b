"""Maintenance of what is not bronze: judgements, snapshots, logs."""

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
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, QUARANTINE
from fleetpulse.io.checkpoints.generations import begin_generation, checkpoint_of, load_generations, save_generations
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance import compaction, disk_cleanup, vacuum
from fleetpulse.io.maintenance.readers import reader_pins
from fleetpulse.io.spark import scratch
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START
from tests.support.homes.maintained import DAY_MS, DAY_S, KEEP, NOW_S, date, four_days, judged_up_to, run_maintain

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return four_days(tmp_path / "home")


def test_old_rows_of_other_tables_go_and_each_key_groups_newest_summary_stays(home: Home) -> None:
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
    left = tables.query(home, "SELECT kind, key_group, epoch_ms(judged_at) - ? AS at FROM judgements ORDER BY 1, 2, 3", [START])
    assert [(one["kind"], one["key_group"], one["at"] // DAY_MS) for one in left] == [
        ("late", None, 0),
        ("summary", 0, 50),
        ("summary", 1, 8),
        ("transition", None, 0),
    ]


def test_what_came_late_stays_until_amend_is_done_with_it(home: Home) -> None:
    said = {"device_id": "a", "message_kind": "heartbeat"}
    rows = [
        {**said, "kind": kind, "judged_at_ms": START + day * DAY_MS, "received_at_ms": START + day * DAY_MS}
        for kind in ("late", "duplicate", "refused")
        for day in (0, 1, 2, 9)
    ]
    rows.append({**rows[1], "kind": "refused", "message_kind": "registry", "received_at_ms": START + DAY_MS + 1})

    def left() -> dict[str, list[int]]:
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
    assert left() == {"duplicate": [9], "late": [2, 9], "refused": [1, 9]}
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "amend", START + 9 * DAY_MS)
    run_maintain(home, keep)
    assert left() == {"duplicate": [9], "late": [9], "refused": [9]}


def _summaries_said(home: Home, *told: tuple[int, int, int]) -> None:
    """Say summaries: of a generation, of a key group, on a day."""
    said = {"kind": "summary", "event_time_ms": START, "counts": "{}"}
    rows = [{**said, "generation": one[0], "key_group": one[1], "judged_at_ms": START + one[2] * DAY_MS} for one in told]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "job", 1 + tables.landed(home, JUDGEMENTS, "job"))


def _summaries_left(home: Home) -> list[tuple[int, int, int]]:
    sql = "SELECT generation AS g, key_group AS k, epoch_ms(judged_at) - ? AS at FROM judgements ORDER BY 1, 2, 3"
    return [(one["g"], one["k"], one["at"] // DAY_MS) for one in tables.query(home, sql, [START])]


def _switched(home: Home, made_by: str) -> None:
    """Let a new generation take over."""
    source = {"generation": home.generation().number}
    made = begin_generation(home.lifecycle, home.generation(), key_groups=2, form=4, made_by=made_by, made_from=source)
    save_generations(home.lifecycle, load_generations(home.lifecycle).switched(made.number, {}))
    judged_up_to(home, 40, generation=checkpoint_of(home.lifecycle, made.number).name)


def test_a_retired_generation_keeps_no_summary_from_going_and_the_current_ones_newest_stay(home: Home) -> None:
    told = [(1, 0, 0), (1, 1, 1), (1, 7, 1)]
    _summaries_said(home, *told)
    _switched(home, "test")
    run_maintain(home, replace(KEEP, summaries_ms=-2 * DAY_MS))  # all are old; the current generation has said nothing yet
    assert _summaries_left(home) == told
    _summaries_said(home, (2, 0, 30), (2, 0, 31), (2, 1, 90))
    run_maintain(home)
    assert _summaries_left(home) == [(2, 0, 31), (2, 1, 90)]


def test_what_a_group_said_last_stays_in_a_copy_of_the_generation_that_said_it(home: Home) -> None:
    _summaries_said(home, (1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 2, 3))
    _switched(home, "repartition")
    _summaries_said(home, (2, 1, 30), (2, 1, 61))  # the counts of the groups 0 and 2 are what they were
    run_maintain(home)
    assert _summaries_left(home) == [(1, 0, 0), (1, 2, 3), (2, 1, 61)]
    _switched(home, "rescale")
    run_maintain(home, replace(KEEP, summaries_ms=-2 * DAY_MS))  # the current one has said nothing: what the copy counts by
    assert _summaries_left(home) == [(1, 0, 0), (1, 2, 3), (2, 1, 61)]
    _summaries_said(home, (3, 0, 99))
    run_maintain(home)
    assert _summaries_left(home) == [(3, 0, 99)]


def _retired(home: Home, *days_ago: int) -> None:
    """Let a generation after the other take over, so many days before now."""
    for ago in days_ago:
        source, at_ms = {"generation": home.generation().number}, int(NOW_S * 1000) - ago * DAY_MS
        made = begin_generation(home.lifecycle, home.generation(), key_groups=2, form=4, made_by="test", made_from=source)
        judged_up_to(home, 40, generation=checkpoint_of(home.lifecycle, made.number).name)
        switched = load_generations(home.lifecycle).switched(made.number, {"batch": 0, "retired_at_ms": at_ms})
        save_generations(home.lifecycle, switched)


def _checkpoints(home: Home) -> list[str]:
    return sorted(path.name for path in home.lifecycle.glob("gen-*"))


def test_old_generations_that_no_longer_run_are_pruned_but_for_the_newest_and_hold_nothing_back_then(home: Home) -> None:
    _retired(home, 90, 45, 40)
    kept = replace(KEEP, generations_ms=42 * DAY_MS)
    with home.state_held("the lifecycle job"):  # it runs, and need not stop for that
        dry, done = run_maintain(home, kept, dry_run=True), run_maintain(home, kept)
    told = [(step.did, step.files, "generation " + step.note.split()[2]) for step in done if step.table == "checkpoints"]
    assert told == [("delete", 2, "generation 1,"), ("delete", 2, "generation 2,")]
    assert [step for step in dry if step.table == "checkpoints"] == [step for step in done if step.table == "checkpoints"]
    assert _checkpoints(home) == ["gen-0003", "gen-0004"]
    assert {need.who for need in reader_pins(home)} == {"generation 3, kept for rollback", "generation 4"}
    run_maintain(home, replace(KEEP, generations_ms=DAY_MS))
    assert _checkpoints(home) == ["gen-0003", "gen-0004"]  # the way back stays, however old


def test_generations_that_are_young_or_kept_for_ever_are_not_pruned(home: Home) -> None:
    _retired(home, 20, 10)
    for kept in (replace(KEEP, generations_ms=30 * DAY_MS), replace(KEEP, generations_ms=None)):
        run_maintain(home, kept)
        assert _checkpoints(home) == ["gen-0001", "gen-0002", "gen-0003"]


def test_while_somebody_makes_a_generation_none_is_pruned_and_the_next_maintenance_takes_what_a_killed_one_left(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    _retired(home, 90, 45)
    with monkeypatch.context() as alone:
        alone.setattr("fleetpulse.io.home.exclusive.MAINTAIN_LOCK", "another.lock")  # as one who takes his first lock just now
        with exclusive_state_change(home, "fleet state rescale", lambda words: None):
            alone.undo()
            held = list(maintain(home, replace(KEEP, generations_ms=DAY_MS), dry_run=False, now_s=NOW_S))
    assert [step.did for step in held if step.table == "checkpoints"] == ["hold"]
    assert "fleet state rescale" in next(step.note for step in held if step.table == "checkpoints")
    assert len(_checkpoints(home)) == 3
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda path, **how: None)
        run_maintain(home, replace(KEEP, generations_ms=DAY_MS))
    run_maintain(home, replace(KEEP, generations_ms=DAY_MS))
    assert _checkpoints(home) == ["gen-0002", "gen-0003"]


def test_a_generation_that_was_retired_before_that_was_written_down_is_as_old_as_its_successor(home: Home) -> None:
    _switched(home, "test")
    _switched(home, "test")
    record = load_generations(home.lifecycle)
    made = [record.known[number].made_at_ms for number in (2, 3)]
    assert [record.retired_at_ms(number) for number in (1, 2, 3)] == [*made, None]


def test_what_amendments_say_stays_as_long_as_transitions_do(home: Home) -> None:
    said = ("transition", "retract", "add", "late")
    rows = [{"kind": kind, "device_id": "a", "judged_at_ms": START + day * DAY_MS} for kind in said for day in (0, 9)]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "job", 1)
    run_maintain(home, replace(KEEP, late_ms=DAY_MS))
    left = tables.query(home, "SELECT kind, count(*) AS n FROM judgements GROUP BY kind ORDER BY kind")
    assert {one["kind"]: one["n"] for one in left} == {"add": 2, "late": 1, "retract": 2, "transition": 2}


def test_a_number_that_a_batch_may_commit_under_is_not_cleared_from_the_log_of_judgements(home: Home) -> None:
    (home.checkpoint / "metadata").write_text('{"id": "query"}')
    row = tables.to_table(JUDGEMENTS, [{"kind": "transition", "device_id": "a", "judged_at_ms": START}])
    path = home.table(JUDGEMENTS.name)

    def said(*writers: str) -> list[int]:
        for writer in writers:
            tables.append(home, JUDGEMENTS, row, writer, DeltaTable(str(path)).version() + 1)
        run_maintain(home)
        return sorted(int(one.stem) for one in (path / "_delta_log").glob("*.json") if one.stem.isdecimal())

    made = DeltaTable(str(path)).version()
    joined = made + 16  # the commit in which maintenance joins these files; a checkpoint follows
    assert said("query", *["amend"] * 14) == [*range(joined + 1)], "a batch that began behind the query's commit may not be done"
    assert said("query") == [joined, joined + 1]
    for metadata in ('{"id": "one that has not committed yet"}', "cut off"):
        (home.checkpoint / "metadata").write_text(metadata)
        before = said()
        assert said(*["amend"] * 12)[: len(before)] == before


def test_snapshots_stay_one_a_day_and_each_that_stays_can_be_read(home: Home) -> None:
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


def test_old_logs_of_airflow_and_old_backtests_go_with_their_folders(home: Home) -> None:
    airflow = home.path / "airflow"
    backtests = airflow / "fleet" / "backtests"
    old, young = airflow / "logs" / "dag_id=a" / "run_id=1" / "1.log", airflow / "logs" / "dag_id=a" / "run_id=2" / "1.log"
    files = {old: 40, young: 10, backtests / "1" / "report.html": 40, backtests / "2" / "report.html": 10}
    files |= {backtests / "2" / "policy.toml": 40, airflow / "passwords.json": 400}
    for path, days in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a line")
        for one in (path, path.parent):
            os.utime(one, (NOW_S - days * DAY_S, NOW_S - days * DAY_S))
    (airflow / "logs" / "latest").symlink_to(old.parent)

    def steps(*, dry_run: bool, days: int = 0) -> list[tuple[str, int, str]]:
        done = maintain(home, KEEP, dry_run=dry_run, now_s=NOW_S + days * DAY_S)
        return [(one.table, one.files, one.note) for one in done if one.note == "of Airflow"]

    told = [("logs", 1, "of Airflow"), ("backtests", 1, "of Airflow")]
    assert steps(dry_run=True) == told and all(path.exists() for path in files)
    assert steps(dry_run=False) == told and steps(dry_run=False) == []
    assert {path for path in files if path.exists()} == set(files) - {old, backtests / "1" / "report.html"}
    assert [path.name for path in backtests.iterdir()] == ["2"]
    os.utime(old.parent, (NOW_S - 2 * DAY_S, NOW_S - 2 * DAY_S))
    assert steps(dry_run=False) == [] and not old.parent.exists() and young.exists()


def test_old_and_long_logs_go_and_those_of_running_processes_stay(home: Home) -> None:
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


def test_what_a_killed_spark_left_goes_by_maintenance_or_by_the_next_of_its_place(home: Home) -> None:
    place = home.path / "spark"
    kept = [place / "spark-warehouse", place / "batch-1"]
    left = [
        place / "local" / "blockmgr-1",
        place / "tmp" / "artifacts-1",
        place / "blocks-1",
        place / "batch-1" / "local" / "spark-1",
        place / "batch-1" / "blocks-2",
    ]
    for folder in (*kept, *left):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shuffle").write_bytes(bytes(10))
    for folder in (*left, place / "local", place / "tmp"):
        os.utime(folder, (NOW_S - 2 * DAY_S, NOW_S - 2 * DAY_S))
    young = place / "blocks-3"
    young.mkdir()
    os.utime(young, (NOW_S - DAY_S / 2, NOW_S - DAY_S / 2))
    assert disk_cleanup.spark_remains(home, NOW_S) == sorted(left)
    told = [
        (one.table, one.files, one.size_bytes) for one in maintain(home, KEEP, dry_run=False, now_s=NOW_S) if one.table == "spark"
    ]
    assert told == [("spark", 5, 50)] and not any(folder.exists() for folder in left)
    assert scratch.leftovers(place) == [young, place / "local", place / "tmp"], (
        "whoever starts there is alone there, however young they are"
    )
    scratch.remove_folders(scratch.leftovers(place))
    assert {path.name for path in place.iterdir()} == {path.name for path in kept}


@pytest.mark.parametrize("words", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), DeltaError("Generic error: (os error 28)")])
def test_a_full_disk_stops_what_writes_and_nothing_that_deletes(
    home: Home, monkeypatch: pytest.MonkeyPatch, words: Exception
) -> None:
    def full(*_: object) -> None:
        raise words

    def half_copied(_: Path, fresh: Path) -> None:
        fresh.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = [{"received_at_ms": START + day * DAY_MS, "reason": "not_json", "topic": "a"} for day in (0, 200)]
    tables.append(home, QUARANTINE, tables.to_table(QUARANTINE, rows), "landing", 1)
    log = home.logs / "simulator.log"
    log.write_text("a line")
    os.utime(log, (NOW_S - 40 * DAY_S, NOW_S - 40 * DAY_S))
    with monkeypatch.context() as disk:
        for module, name in ((compaction, "put_in_place"), (retention, "promise"), (vacuum, "write_log_checkpoint")):
            disk.setattr(module, name, full)
        disk.setattr(disk_cleanup.shutil, "copyfile", half_copied)
        disk.setattr(disk_cleanup, "LONG_BYTES", 3)
        (home.logs / "bridge.log").write_text("long")
        done = list(maintain(home, KEEP, dry_run=False, now_s=NOW_S))
    assert [one.table for one in done if one.note == FULL] == ["messages", "quarantine", "logs"]
    assert not [*home.table("messages").rglob("*.tmp"), *home.logs.glob("*.new")], "what was half written gives its room back"
    assert not log.exists() and tables.query(home, "SELECT count(*) AS n FROM quarantine", tables=["quarantine"]) == [{"n": 2}]
    did = {(one.table, one.did) for one in maintain(home, KEEP, dry_run=False, now_s=NOW_S)}
    assert {("messages", "join"), ("messages", "checkpoint"), ("quarantine", "remove")} <= did, "the next one does it"
