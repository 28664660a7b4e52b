"""Maintenance keeps a home small and takes nothing that somebody still needs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from batch.maintain import Keep, Step, maintain, only_one
from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages import Row, hash64
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES, QUARANTINE, TABLES
from fleetpulse.io import delta, leftovers, needs
from fleetpulse.io.block_source import BlockReader, DeltaLog
from fleetpulse.io.generations import begin_generation, checkpoint_of, load_generations, save_generations
from fleetpulse.io.home import Home
from fleetpulse.io.kept import oldest_kept_ms, require_kept
from fleetpulse.io.needs import Need
from tests.histories import START, row, tick
from tests.histories import signal as heartbeat

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
DAY_S = 86_400
DAY_MS = 1000 * DAY_S
KEEP = Keep(90 * DAY_MS, 90 * DAY_MS, 7 * DAY_MS, 30 * DAY_MS, None, 90 * DAY_MS, 90 * DAY_MS, 30 * DAY_MS, 0)
DAYS, EACH = 4, 12
NOW_S = time.time() + 3600  # of files that were just written, as of an hour later
Read = list[tuple[int, str, str]]


def _land(home: Home, rows: Sequence[Row], number: int) -> None:
    arrival = {"origin": "mqtt", "bridge": "b", "segment": number}
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    delta.append(home, MESSAGES, delta.to_table(MESSAGES, table), "test", number)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home of four days with twelve versions each, and a policy among the rows of the first day."""
    made = Home(tmp_path / "home")
    made.prepare(Deployment())
    for table in TABLES:
        delta.create(made, table)
    number = 0
    for day in range(DAYS):
        for each in range(EACH):
            number += 1
            at_s = day * DAY_S + each * 60
            rows = [heartbeat(at_s, "a"), heartbeat(at_s + 1, "b"), tick(at_s + 2)]
            if number == 3:
                rows.append(row(at_s + 3, "fleet/_/_/policy", policy={"rules": {"timeout": "9m"}}, effective_from_s=at_s + 60))
            _land(made, rows, number)
    _judged(made, number + 1)
    return made


def _judged(home: Home, *ends: int, generation: str = "gen-0001") -> None:
    """Write a checkpoint as Spark does: a batch for each of the versions at which one ended."""
    for batch, end in enumerate(ends):
        for kind, lines in (("offsets", ["v1", '{"batchWatermarkMs":1}', f'{{"version": {end}}}']), ("commits", ["v1", "{}"])):
            path = home.checkpoint.parent / generation / kind / str(batch)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines))


def _run(home: Home, keep: Keep = KEEP, *, dry_run: bool = False) -> list[Step]:
    return [step for step in maintain(home, keep, dry_run=dry_run, now_s=NOW_S) if step.did != "hold"]


def _files(home: Home) -> set[str]:
    return {str(path.relative_to(home.path)) for path in home.path.rglob("*") if path.is_file() and path.name != "maintain.lock"}


def _read_on(home: Home, version: int) -> Read:
    """Read bronze on from a version as the job does, without its key groups."""
    log = DeltaLog(home.table(MESSAGES.name))
    found: Read = []
    while version <= log.latest():
        files, version = log.span(version)
        for path, rows in files:
            table = pq.ParquetFile(path).read(columns=["received_at", "device_id", "kind"])
            assert table.num_rows == rows
            found += [(one["received_at"].timestamp(), one["device_id"], one["kind"]) for one in table.to_pylist()]
    return found


def test_who_reads_on_by_version_reads_the_same_rows_in_order(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {version: _read_on(home, version) for version in (0, 20, 30)}
    needed = [Need("a snapshot", 20), Need("another", 30)]
    monkeypatch.setattr(needs, "SOURCES", (*needs.SOURCES, lambda _: needed))
    steps, again = _run(home), _run(home)
    assert [step.files for step in steps if step.table == MESSAGES.name and step.did == "join"] == [12, 7, 5, 5, 7, 12]
    assert {version: _read_on(home, version) for version in before} == before
    assert [step for step in again if step.did in ("join", "remove")] == []
    assert len(delta.files_of(home, MESSAGES, "received_at")) == 6


def test_versions_that_a_job_goes_on_with_are_left_as_they_are(home: Home) -> None:
    _judged(home, 18, 40)  # it can be taken back to the first of them
    made = begin_generation(home.lifecycle, home.generation(), key_groups=8, form=3, made_by="test", made_from={})
    _judged(home, 25, generation=checkpoint_of(home.lifecycle, made.number).name)
    versions = {version: DeltaLog(home.table(MESSAGES.name)).appended(version) for version in range(18, DAYS * EACH + 1)}
    _run(home)
    log = DeltaLog(home.table(MESSAGES.name))
    assert {version: log.appended(version) for version in versions} == versions
    assert all(Path(path).exists() for files in versions.values() for path, _ in files)
    with pytest.raises(FleetError, match="version 5 of messages is gone"):
        log.span(5)


def test_one_may_go_back_to_a_retired_generation(home: Home) -> None:
    before = _read_on(home, 18)
    _judged(home, 18, 20)
    made = begin_generation(home.lifecycle, home.generation(), key_groups=8, form=3, made_by="test", made_from={})
    _judged(home, 40, generation=checkpoint_of(home.lifecycle, made.number).name)
    save_generations(home.lifecycle, load_generations(home.lifecycle).switched(made.number, {}))
    _run(home, replace(KEEP, messages_ms=DAY_MS))
    assert _read_on(home, 18) == before
    assert _read_on(home, 20) == before[2 * 3 :]
    with pytest.raises(FleetError, match="is gone"):
        DeltaLog(home.table(MESSAGES.name)).span(19)


def test_without_a_job_all_of_bronze_is_needed(home: Home) -> None:
    shutil.rmtree(home.checkpoint)
    assert [step for step in _run(home) if step.did in ("join", "remove") and step.table == MESSAGES.name] == []
    (home.checkpoint / "commits").mkdir(parents=True)
    (home.checkpoint / "offsets").mkdir()
    (home.checkpoint / "commits" / "0").write_text("v1\n{}")
    (home.checkpoint / "offsets" / "0").write_text("v1\n{}\ndamaged")
    with pytest.raises(FleetError, match="not known what the job still needs"):
        _run(home)


def test_retention_leaves_our_own_rows_and_the_first_and_says_from_when_on_all_are_kept(home: Home) -> None:
    reader = {"path": str(home.table(MESSAGES.name)), "key_groups": "1"}
    started = BlockReader(reader)._started()
    recent = _read_on(home, 1 + 2 * EACH)
    keep = replace(KEEP, messages_ms=DAY_MS)
    dry, done = _run(home, keep, dry_run=True), _run(home, keep)
    [removed] = [step for step in done if step.did == "remove"]
    assert (removed.files, removed.rows) == (2 * EACH, 2 * EACH * 3 - 1)
    assert [step for step in dry if step.did in ("remove", "join")] == [step for step in done if step.did in ("remove", "join")]
    kinds = delta.query(home, "SELECT kind FROM messages WHERE epoch_ms(received_at) < ?", [START + 2 * DAY_MS], ["messages"])
    assert sorted(one["kind"] for one in kinds) == ["heartbeat", "policy"]
    assert BlockReader(reader)._started() == started
    assert _read_on(home, 1 + 2 * EACH) == recent
    with pytest.raises(FleetError, match="version 0 of messages is gone"):
        DeltaLog(home.table(MESSAGES.name)).span(0)
    kept_ms = oldest_kept_ms(home, MESSAGES.name)
    assert kept_ms == (START + 2 * DAY_MS) // DAY_MS * DAY_MS
    require_kept(home, MESSAGES.name, kept_ms, "a replay")
    with pytest.raises(FleetError, match=r"a replay needs messages from .* kept are those from .* keep_messages"):
        require_kept(home, MESSAGES.name, kept_ms - 1, "a replay")
    assert oldest_kept_ms(home, JUDGEMENTS.name) is None
    assert _run(home, keep) == []
    again = _run(home, replace(KEEP, messages_ms=0))  # the remainder goes through it once more
    assert [step.rows for step in again if step.did == "remove"] == [EACH * 3]
    assert BlockReader(reader)._started() == started


def test_a_clock_that_was_ahead_once_does_not_make_everything_old(home: Home) -> None:
    ahead_s = (NOW_S - START / 1000) + 3650 * DAY_S
    _land(home, [tick(ahead_s)], DAYS * EACH + 1)
    said = {"judged_at_ms": START, "kind": "late", "device_id": "a"}
    later = [said, {**said, "judged_at_ms": START + int(ahead_s * 1000)}]
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, later), "job", 1)
    keep = replace(KEEP, messages_ms=int(NOW_S * 1000) - START + DAY_MS, late_ms=int(NOW_S * 1000) - START + DAY_MS)
    before = _read_on(home, 0)
    steps = list(maintain(home, keep, dry_run=False, now_s=NOW_S))
    assert not [step for step in steps if step.did == "remove"]
    assert [step.table for step in steps if "which lies ahead, so ages count back from now" in step.note] == [MESSAGES.name]
    assert _read_on(home, 0) == before
    assert oldest_kept_ms(home, MESSAGES.name) is None
    removed = [step for step in _run(home, replace(KEEP, late_ms=DAY_MS)) if step.did == "remove"]
    assert {step.table for step in removed} == {MESSAGES.name, JUDGEMENTS.name}
    assert all("which lies ahead" in step.note for step in removed)


def test_a_snapshot_holds_back_retention_while_its_files_are_there(home: Home) -> None:
    taken = {"generation": 1, "batch": 3, "bronze": EACH + 1, "newest_ms": START, "frontier_ms": START, "devices": 2}
    rows = [{"part": "device", "key_group": 1, "device_id": "a", "device_hash": 1}]
    for told in ({**taken, "bronze": 7}, taken):
        about = CommitProperties(custom_metadata={"userMetadata": json.dumps({**told, "key_groups": 8})})
        table = delta.to_table(DEVICE_SNAPSHOTS, rows)
        write_deltalake(str(home.table(DEVICE_SNAPSHOTS.name)), table, mode="overwrite", commit_properties=about)
    assert [(one.who, one.version) for one in needs.needs(home)][:2] == [("snapshot 1", 7), ("snapshot 2", EACH + 1)]
    for name in DeltaTable(str(home.table(DEVICE_SNAPSHOTS.name)), version=1).file_uris():
        Path(name).unlink()
    _run(home, replace(KEEP, messages_ms=DAY_MS))
    with pytest.raises(FleetError, match="is gone"):
        _read_on(home, 7)
    assert len(_read_on(home, EACH + 1)) == 3 * EACH * 3


def test_a_dry_run_changes_nothing_and_two_at_once_are_refused(home: Home) -> None:
    before = _files(home)
    assert _run(home, dry_run=True)
    assert _files(home) == before
    with only_one(home), pytest.raises(FleetError, match="is being maintained by fleet maintain"):
        _run(home)


def test_how_far_each_writer_has_come_survives_the_clearing_of_the_log(home: Home) -> None:
    for number in range(1, 40):
        row = {"received_at_ms": START + number, "topic": "t", "reason": "json", "detail": "d", "bridge": "b", "segment": 1}
        delta.append(home, QUARANTINE, delta.to_table(QUARANTINE, [{**row, "origin": "mqtt"}]), f"w{number % 3}", number)
    _run(home)
    log = home.table(MESSAGES.name) / "_delta_log"
    assert len(list(log.glob("*.json"))) <= 5
    assert delta.landed(home, MESSAGES, "test") == DAYS * EACH
    assert [delta.landed(home, QUARANTINE, f"w{number}") for number in range(3)] == [39, 37, 38]
    _land(home, [tick(DAYS * DAY_S)], DAYS * EACH + 1)
    assert delta.landed(home, MESSAGES, "test") == DAYS * EACH + 1
    assert delta.query(home, "SELECT count(*) AS n FROM quarantine", tables=["quarantine"]) == [{"n": 39}]


def test_old_rows_of_other_tables_go_and_each_key_groups_newest_summary_stays(home: Home) -> None:
    rows = [
        {"kind": "summary", "key_group": group, "event_time_ms": START, "judged_at_ms": START + day * DAY_MS, "counts": "{}"}
        for group, days in ((0, (0, 10, 50)), (1, (5, 8)))
        for day in days
    ] + [
        {"kind": "transition", "device_id": "a", "judged_at_ms": START},
        {"kind": "late", "device_id": "a", "judged_at_ms": START},
    ]
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, rows), "job", 1)
    _run(home)
    left = delta.query(home, "SELECT kind, key_group, epoch_ms(judged_at) - ? AS at FROM judgements ORDER BY 1, 2, 3", [START])
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
        return {one["kind"]: [at // DAY_MS for at in one["at"]] for one in delta.query(home, sql, [START])}

    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, rows), "job", 1)
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, []), "amend", START + DAY_MS)
    keep = replace(KEEP, late_ms=5 * DAY_MS)
    steps = [step for step in maintain(home, keep, dry_run=False, now_s=NOW_S) if step.table == JUDGEMENTS.name]
    assert [(step.did, step.rows) for step in steps][:2] == [("hold", 2), ("remove", 8)]
    assert "fleet amend" in steps[0].note
    assert left() == {"duplicate": [9], "late": [2, 9], "refused": [1, 9]}
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, []), "amend", START + 9 * DAY_MS)
    _run(home, keep)
    assert left() == {"duplicate": [9], "late": [9], "refused": [9]}


def test_a_retired_generation_keeps_no_summary_from_going_and_the_current_ones_newest_stay(home: Home) -> None:
    made = begin_generation(home.lifecycle, home.generation(), key_groups=2, form=3, made_by="test", made_from={})
    told = [(1, 0, 0), (1, 1, 1), (1, 7, 1)]
    said = {"kind": "summary", "event_time_ms": START, "counts": "{}"}

    def say(rows: list[tuple[int, int, int]]) -> None:
        told = [
            {**said, "generation": generation, "key_group": group, "judged_at_ms": START + day * DAY_MS}
            for generation, group, day in rows
        ]
        delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, told), "job", 1)

    def left() -> list[tuple[int, int, int]]:
        sql = "SELECT generation AS g, key_group AS k, epoch_ms(judged_at) - ? AS at FROM judgements ORDER BY 1, 2, 3"
        return [(one["g"], one["k"], one["at"] // DAY_MS) for one in delta.query(home, sql, [START])]

    say(told)
    save_generations(home.lifecycle, load_generations(home.lifecycle).switched(made.number, {}))
    _judged(home, 40, generation=checkpoint_of(home.lifecycle, made.number).name)
    _run(home, replace(KEEP, summaries_ms=-2 * DAY_MS))  # all are old; the current generation has said nothing yet
    assert left() == told
    say([(2, 0, 30), (2, 0, 31), (2, 1, 90)])
    _run(home)
    assert left() == [(2, 0, 31), (2, 1, 90)]


def test_what_amendments_say_stays_as_long_as_transitions_do(home: Home) -> None:
    said = ("transition", "retract", "add", "late")
    rows = [{"kind": kind, "device_id": "a", "judged_at_ms": START + day * DAY_MS} for kind in said for day in (0, 9)]
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, rows), "job", 1)
    _run(home, replace(KEEP, late_ms=DAY_MS))
    left = delta.query(home, "SELECT kind, count(*) AS n FROM judgements GROUP BY kind ORDER BY kind")
    assert {one["kind"]: one["n"] for one in left} == {"add": 2, "late": 1, "retract": 2, "transition": 2}


def test_landing_goes_on_beside_it_and_no_row_is_lost_or_doubled(home: Home) -> None:
    last = DAYS * EACH + 60

    def land() -> None:
        for number in range(DAYS * EACH + 1, last + 1):
            _land(home, [heartbeat(DAYS * DAY_S + number, "a")], number)

    writer = threading.Thread(target=land)
    writer.start()
    rounds = 0
    while writer.is_alive():
        _judged(home, DeltaLog(home.table(MESSAGES.name)).latest() - 2)
        list(maintain(home, replace(KEEP, replaced_ms=1_000), dry_run=False))
        rounds += 1
    writer.join()
    assert rounds > 1
    found = delta.query(home, "SELECT segment, count(*) AS n FROM messages GROUP BY 1 ORDER BY 1", tables=["messages"])
    assert [one["segment"] for one in found] == list(range(1, last + 1))
    assert {one["n"] for one in found[DAYS * EACH :]} == {1}
    assert delta.landed(home, MESSAGES, "test") == last


_CHILD = """
import os, signal, sys
from pathlib import Path
from batch.maintain import maintain
from fleetpulse.io.generations import begin_generation, checkpoint_of, load_generations, save_generations
from fleetpulse.io.home import Home
from tests.unit.test_maintain import KEEP, DAY_MS, NOW_S
from dataclasses import replace
import duckdb
left = int(sys.argv[2])
def hook(event, arguments):
    global left
    if event in ("os.rename", "os.link", "os.remove", "os.truncate") or (event == "open" and arguments[1] in ("w", "wb", "a+")):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
list(maintain(Home(Path(sys.argv[1])), replace(KEEP, messages_ms=DAY_MS), dry_run=False, now_s=NOW_S))
"""


def test_killed_anywhere_it_is_done_again_to_the_same_end(home: Home) -> None:
    want = _read_on(home, 1 + 2 * EACH)
    killed, steps, at = 0, 1, 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while killed == steps - 1:
        done = subprocess.run([sys.executable, "-c", _CHILD, str(home.path), str(at)], env=environment, cwd=ROOT, check=False)
        killed += done.returncode == -signal.SIGKILL
        steps += done.returncode == -signal.SIGKILL
        at += 3  # each goes on where the one before was killed, and comes further
        assert done.returncode in (0, -signal.SIGKILL)
        assert _read_on(home, 1 + 2 * EACH) == want
        if done.returncode == 0:
            break
    assert killed > 3
    assert _run(home, replace(KEEP, messages_ms=DAY_MS)) == []
    assert _read_on(home, 1 + 2 * EACH) == want
    rows = delta.query(home, "SELECT count(*) AS n, count(DISTINCT received_at) AS d FROM messages", tables=["messages"])
    assert rows == [{"n": len(want) + 2, "d": len(want) + 2}]


def test_a_log_that_was_cleared_by_its_age_is_put_together_all_the_same(home: Home) -> None:
    want, log = _read_on(home, 0), home.table(MESSAGES.name) / "_delta_log"
    table = DeltaTable(str(home.table(MESSAGES.name)))
    table.create_checkpoint()
    for version in range(20):
        (log / f"{version:020d}.json").unlink()
    _run(home)
    assert _read_on(home, 0) == want


def test_deltas_own_clearing_leaves_the_versions_of_bronze(home: Home) -> None:
    log = home.table(MESSAGES.name) / "_delta_log"
    for path in log.glob("*.json"):
        os.utime(path, (1, 1))
    table = DeltaTable(str(home.table(MESSAGES.name)))
    table.create_checkpoint()
    for number in range(DAYS * EACH + 1, DAYS * EACH + 102):  # among them a checkpoint, with a clearing
        _land(home, [tick(DAYS * DAY_S + number)], number)
    assert len(list(log.glob("*.checkpoint.parquet"))) > 1
    assert (log / f"{0:020d}.json").exists()


def test_snapshots_stay_one_a_day_and_each_that_stays_can_be_read(home: Home) -> None:
    path = home.table(DEVICE_SNAPSHOTS.name)
    shutil.rmtree(path)
    for number in range(6):
        write_deltalake(str(path), pa.table({"number": [number]}), mode="overwrite")
    log = path / "_delta_log"
    for version in range(6):  # two on each of three days
        at_ms = START + version // 2 * DAY_MS + version * 1000
        commit = log / f"{version:020d}.json"
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = at_ms
        commit.write_text("\n".join(map(json.dumps, actions)))
        os.utime(commit, (at_ms / 1000, at_ms / 1000))
    [step] = [step for step in _run(home, replace(KEEP, device_snapshots_ms=DAY_MS + 5_000)) if step.table == path.name]
    assert (step.did, step.files) == ("delete", 3)
    kept = {version: DeltaTable(str(path), version=version).to_pyarrow_table()["number"].to_pylist() for version in (3, 4, 5)}
    assert kept == {3: [3], 4: [4], 5: [5]}
    with pytest.raises(FileNotFoundError):
        DeltaTable(str(path), version=2).to_pyarrow_table()


def test_old_and_long_logs_go_and_those_of_running_processes_stay(home: Home) -> None:
    for name, days in (("landing", 40), ("bridge", 40), ("lifecycle", 1)):
        path = home.logs / f"{name}.log"
        path.write_text("a line")
        os.utime(path, (NOW_S - days * DAY_S, NOW_S - days * DAY_S))
    (home.run("bridge")).write_text("{}")
    with (home.logs / "simulator.log").open("ab") as log:
        log.truncate(leftovers.LONG_BYTES + 1)
        list(maintain(home, KEEP, dry_run=False, now_s=NOW_S))
        log.write(b"goes on")
    names = {path.name for path in home.logs.iterdir()}
    assert names == {"bridge.log", "lifecycle.log", "simulator.log", "simulator.log.1"}
    assert (home.logs / "simulator.log").read_bytes() == b"goes on"
