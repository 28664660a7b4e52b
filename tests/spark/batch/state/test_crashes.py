"""Killed state operations: a repeated call finishes, and a refused call changes nothing.

At each step the home is copied: the copy is the disk that a kill at this step leaves, and the operation is repeated on it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from batch.state import snapshot
from batch.state.canary import CanaryPlan, canary
from batch.state.device_filter import matching_devices
from batch.state.operations import (
    StateOperation,
    bootstrap,
    bootstrap_devices,
    check_form,
    migrate,
    repartition,
    repartition_anew,
    rescale,
    rollback,
)
from fleetpulse.columnar.snapshot.bootstrap import REGISTERED_SCHEMA
from fleetpulse.core.operations.device_filter import parse_device_filter
from fleetpulse.core.operations.dropped_devices import arguments_as_planned
from fleetpulse.core.replay import outcome
from fleetpulse.core.rows import Kind
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import committed_batches, position_after
from fleetpulse.io.checkpoints.generations import checkpoint_of, load_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.state_reader import read_snapshot
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import files_of, find_snapshot, snapshots, write_snapshot
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.form import IS_DEFAULT
from tests.support.histories.histories import START
from tests.support.histories.streams import DEPLOYMENT, copy_of, history, judge, land
from tests.support.refusals import refused

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
ROWS = history(23)
CUT = len(ROWS) * 2 // 3
LISTED = dict.fromkeys(["ghost", *sorted({row.device_id for row in ROWS[CUT:] if row.kind is Kind.HEARTBEAT})], START)
Operation = Callable[[StateOperation], object]


def _listed(since_ms: dict[str, int]) -> pa.Table:
    """Return a list of devices with their times of registration."""
    nulls = pa.nulls(len(since_ms), pa.string())
    registered_us = [at_ms * 1000 for at_ms in since_ms.values()]
    return pa.Table.from_arrays(
        [
            pa.array(one).cast(field.type)
            for one, field in zip(
                ([*since_ms], ["site"] * len(since_ms), nulls, nulls, registered_us), REGISTERED_SCHEMA, strict=True
            )
        ],
        schema=REGISTERED_SCHEMA,
    )


def _canary(work: StateOperation) -> None:
    check_form(work.home, 4)
    canary(work, "migrate", CanaryPlan(4, 4, 0.5, nullcontext))


OPERATIONS: dict[str, Operation] = {
    "snapshot": lambda work: snapshot.take(work.spark, work.home, None, work.report),
    "bootstrap": lambda work: bootstrap(work, find_snapshot(work.home)),
    "migrate": lambda work: migrate(work, 4),
    "canary": _canary,
    "list": lambda work: bootstrap_devices(work, lambda frontier_ms: _listed(LISTED), "a test"),
    "repartition": lambda work: repartition(work, 3),
    "repartition anew": lambda work: repartition_anew(work, 3),
    "rescale": lambda work: rescale(work, 3),
    "rollback": rollback,
}
AGAIN = {  # error of an operation whose end is reached already
    "migrate": "state-version-unchanged",
    "canary": "state-version-unchanged",
    "repartition": "partitions-unchanged",
    "repartition anew": "partitions-unchanged",
    "rescale": "key-groups-unchanged",
    "rollback": "rollback-already-done",
}


@pytest.fixture(scope="module")
def judged(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home whose second generation has judged two thirds of a history, with a snapshot of its first one."""
    home = Home(tmp_path_factory.mktemp("judged") / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    work = StateOperation(spark, home, lambda message: None)
    land(home, ROWS[: CUT // 2], 1)
    judge(spark, home)
    snapshot.take(spark, home, None, work.report)
    rescale(work, 4)
    land(home, ROWS[CUT // 2 : CUT], 2)
    judge(spark, home)
    return home


def _files_of(home: Home) -> str:
    """List the files of the checkpoints and of the table of snapshots, with their sizes."""
    folders = (home.lifecycle, home.table(DEVICE_SNAPSHOTS.name))
    return "\n".join(sorted(f"{path} {path.stat().st_size}" for one in folders for path in one.rglob("*") if path.is_file()))


# They make, in this order: a generation of the same devices, a generation from a snapshot.
_IN_DEFAULT = ("migrate", "bootstrap")


@pytest.mark.parametrize(
    "operation", [pytest.param(one, marks=[] if one in _IN_DEFAULT else pytest.mark.extended) for one in OPERATIONS]
)
def test_a_state_operation_killed_at_any_step_finishes_on_the_next_call(
    spark: SparkSession, judged: Home, tmp_path: Path, operation: str
) -> None:
    home = copy_of(judged, tmp_path / "home")
    unchanged, images = _files_of(home), dict[str, Home]()  # a kill that leaves an unchanged disk needs no further call

    def report(message: str) -> None:
        if (files := _files_of(home)) not in {unchanged, *images}:  # otherwise the disk is that of a kill one step earlier
            images[files] = copy_of(home, tmp_path / f"image-{len(images)}")

    OPERATIONS[operation](StateOperation(spark, home, report))
    assert images, "a step has changed the disk"
    last = list(images.values())[-2:][0]
    for image in [last] if IS_DEFAULT else images.values():
        before = image.generation().number
        if before == 3 and operation not in ("bootstrap", "list"):  # it was killed after its last step
            with refused(AGAIN[operation]):
                OPERATIONS[operation](StateOperation(spark, image, lambda message: None))
        else:
            OPERATIONS[operation](StateOperation(spark, image, lambda message: None))
        statuses = [one.status for one in load_generations(image.lifecycle).known.values()]
        assert "new" not in statuses and statuses.count("current") == 1
        assert image.generation().number >= before
        assert len(snapshots(image)) == 1 + (operation == "snapshot"), "no snapshot is written twice"
    assert operation == "snapshot" or home.generation().number == 3
    want = _judge_rest(spark, home) if operation == "list" else defined(ROWS, DEPLOYMENT)  # listed devices start new lives
    assert _judge_rest(spark, last) == want


def _judge_rest(spark: SparkSession, home: Home) -> Counter[tuple[object, ...]]:
    land(home, ROWS[CUT:], 3)
    judge(spark, home)
    return emitted(home)


def test_a_canary_with_a_different_judgement_is_removed_and_the_judgement_is_named(
    spark: SparkSession, judged: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch.common.progress.EVERY_S", 0)
    lines = list[str]()
    home = copy_of(judged, tmp_path / "home")
    before = load_generations(home.lifecycle)
    known = set(home.table(JUDGEMENTS.name).rglob("*.parquet"))
    changed: list[str] = []

    @contextmanager
    def stopped() -> Iterator[None]:
        land(home, ROWS[CUT:], 3)
        judge(spark, home)
        for path in sorted(set(home.table(JUDGEMENTS.name).rglob("kind=transition/*.parquet")) - known)[:1]:
            rows = pq.ParquetFile(path).read()
            runtimes = [rows["runtime_ms"][0].as_py() + 1, *rows["runtime_ms"].to_pylist()[1:]]
            index = rows.schema.get_field_index("runtime_ms")
            pq.write_table(rows.set_column(index, rows.schema.field(index), pa.array(runtimes, rows.schema.types[index])), path)
            changed.append(rows["device_id"][0].as_py())
        yield

    plan = CanaryPlan(4, 4, 0.5, stopped)
    with refused("canary-differs") as raised:
        canary(StateOperation(spark, home, lines.append), "migrate", plan)
    assert [one for one in lines if one.startswith("canary: 0 s of 0 s; generation 3 has judged ")], lines
    [device] = changed
    assert f"1 judgements are missing, 1 are additional: transition of {device}; nothing has changed" in str(raised.value)
    record = load_generations(home.lifecycle)
    assert record.current == before.current and {one.status for one in record.known.values()} == {
        "retired",
        "current",
        "discarded",
    }
    assert not list(home.lifecycle.glob("scratch-*")) and not checkpoint_of(home.lifecycle, 3).exists()


@pytest.mark.extended
def test_devices_selected_for_a_bootstrap_are_judged_as_in_the_whole_fleet(
    spark: SparkSession, judged: Home, tmp_path: Path
) -> None:
    home, only, lines = copy_of(judged, tmp_path / "home"), parse_device_filter("site = 'north'"), list[str]()
    kept = matching_devices(read_snapshot(spark, home, find_snapshot(home).version or 0).each, only).count()
    assert bootstrap(StateOperation(spark, home, lines.append, dry=True), find_snapshot(home), only) is None
    dropped = find_snapshot(home).devices - kept
    assert dropped > 0
    planned = [f"--version={find_snapshot(home).version}", f"--drops-at-most={dropped}"]
    assert arguments_as_planned("\n".join(lines)) == planned
    bootstrap(StateOperation(spark, home, lambda message: None), find_snapshot(home), only, drops_at_most=dropped)
    land(home, ROWS[CUT:], 3)
    judge(spark, home)
    only_north = {row.device_id for row in ROWS if row.site == "north"} - {row.device_id for row in ROWS if row.site != "north"}
    assert len(only_north) > 3
    want = {one: count for one, count in defined(ROWS, DEPLOYMENT).items() if one[1] in only_north}
    assert {one: count for one, count in emitted(home).items() if one[1] in only_north} == want
    number, taken = home.generation().number, find_snapshot(home)
    lines.clear()
    bootstrap(StateOperation(spark, home, lines.append), taken)
    assert f"generations {taken.generation} and {number} have different devices; they are not compared" in lines
    assert home.generation().number > number, "the second bootstrap restores all devices of the snapshot"
    judge(spark, home)
    second = snapshot.take(spark, home, None, lambda message: None)
    rows = read_snapshot(spark, home, second.version or 0).each.filter("part = 'device'").collect()
    assert {row.device_id: row["mode"] for row in rows} == {
        name: one.mode for name, one in outcome(ROWS, DEPLOYMENT).devices.items()
    }


@pytest.mark.extended
def test_a_device_list_starts_new_lives_with_silence_counted_from_registration(
    spark: SparkSession, judged: Home, tmp_path: Path
) -> None:
    home = copy_of(judged, tmp_path / "home")
    beats = Counter(row.device_id for row in ROWS[CUT:] if row.kind is Kind.HEARTBEAT)
    # Devices with wrong clocks may have no transitions.
    with_transitions = {one[1] for one in defined(ROWS[CUT:], DEPLOYMENT) if one[0] == "transition"}
    active = [device for device, _ in beats.most_common() if device in with_transitions][:4]
    since_ms = {**dict.fromkeys(active, START), "ghost": START, "fresh": ROWS[CUT - 1].received_at_ms - 40_000}
    listed = _listed(since_ms)
    work = StateOperation(spark, home, lambda message: None)
    before = emitted(home)
    with refused("list-empty"):
        bootstrap_devices(work, lambda frontier_ms: listed.slice(0, 0), "a test")
    bootstrap_devices(work, lambda frontier_ms: listed, "a test")
    taken = snapshot.take(spark, home, None, work.report)
    rows = {row.device_id: row for row in read_snapshot(spark, home, taken.version or 0).each.filter("part = 'device'").collect()}
    assert rows.keys() == since_ms.keys()
    assert (rows["ghost"]["mode"], rows["fresh"]["mode"]) == ("offline", "provisioned")
    assert {round(row.life.timestamp() * 1000) for row in rows.values()} == {(taken.frontier_ms or 0) + 1}
    land(home, ROWS[CUT:], 3)
    judge(spark, home)
    added = emitted(home) - before
    assert {one[1] for one in added if one[0] == "transition"} >= set(active)
    assert not [one for one in added if one[1] == "ghost"], "its timeout expired before the frontier"
    ids = tables.query(home, "SELECT device_id, life, transition_no FROM judged_transitions")
    assert len({tuple(one.values()) for one in ids}) == len(ids)


def test_an_impossible_operation_is_refused_with_a_reason_and_changes_nothing(
    spark: SparkSession, judged: Home, tmp_path: Path
) -> None:
    home = copy_of(judged, tmp_path / "home")
    work, before = StateOperation(spark, home, lambda message: None), load_generations(home.lifecycle)
    refusals: list[tuple[Operation, str, str]] = [
        (lambda work: rescale(work, 4), "key-groups-unchanged", "4"),
        (lambda work: rescale(work, 0), "key-groups-out-of-range", "1 to 100,000 .* got 0"),
        (lambda work: repartition(work, 2), "partitions-unchanged", "2"),
        (lambda work: repartition_anew(work, 0), "partitions-out-of-range", "1 to 10,000 .* got 0"),
        (lambda work: migrate(work, 9), "state-version-unwritable", "4, 5, 6; got 9"),
        (lambda work: migrate(work, 6), "state-version-unchanged", "6"),
        (lambda work: rollback(work, 7), "rollback-generation-unknown", "7 .*: 1"),
        (lambda work: bootstrap(work, find_snapshot(work.home, 77)), "snapshot-unknown", "77; .*: 1"),
        (lambda work: bootstrap(work, find_snapshot(work.home, None, 5)), "snapshot-unknown", "before 1970"),
        (
            lambda work: bootstrap(work, find_snapshot(work.home), parse_device_filter("site = 'nowhere'")),
            "filter-fits-none",
            "got 0 of",
        ),
        (
            lambda work: bootstrap(work, find_snapshot(work.home), parse_device_filter("site = 'north'"), drops_at_most=0),
            "bootstrap-drops-more",
            "at most 0",
        ),
        (
            lambda work: snapshot.take(work.spark, work.home, 4711, work.report),
            "checkpoint-batch-missing",
            "4711",
        ),
    ]
    for operation, code, fact in refusals:
        with refused(code, match=fact):
            operation(work)
    for name, operation in OPERATIONS.items():
        if name not in ("snapshot", "canary"):  # their callers check whether anything must be done
            assert operation(StateOperation(spark, home, lambda message: None, dry=True)) is None
    assert load_generations(home.lifecycle) == before
    assert len(snapshots(home)) == 1
    with home.state_held("another"), refused("state-in-use", match=r"another \(process"), home.state_held("me"):
        pass


@pytest.mark.extended
def test_a_generation_with_one_different_device_is_refused_and_the_device_is_named(
    spark: SparkSession, judged: Home, tmp_path: Path
) -> None:
    home = copy_of(judged, tmp_path / "home")
    taken = find_snapshot(home)
    rows = read_snapshot(spark, home, taken.version or 0).each
    device = min(row.device_id for row in rows.filter("part = 'device' AND mode = 'online'").collect())
    columns = [
        name if name != "runtime_ms" else f"runtime_ms + int(device_id = '{device}') AS runtime_ms" for name in rows.columns
    ]
    write_snapshot(home, rows.selectExpr(columns), taken)
    with refused("generation-differs", match=f"lost or changed: {device}; new or changed: {device};"):
        bootstrap(StateOperation(spark, home, lambda message: None), find_snapshot(home))
    record = load_generations(home.lifecycle)
    assert record.current == 2 and [one.status for one in record.known.values()].count("current") == 1
    assert len(list(home.lifecycle.glob("gen-*"))) == 2, "the different generation is removed"


@pytest.mark.parametrize("only", [None, "site = 'north'"])
def test_bootstrap_reports_a_damaged_snapshot_by_its_version(
    spark: SparkSession, judged: Home, tmp_path: Path, only: str | None
) -> None:
    home = copy_of(judged, tmp_path / "home")
    taken, record = find_snapshot(home), load_generations(home.lifecycle)
    selected = None if only is None else parse_device_filter(only)
    for path in files_of(home.table(DEVICE_SNAPSHOTS.name), taken.version or 0):
        if "part=device" in str(path):
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
            content = bytearray(path.read_bytes())
            content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)  # the data pages; the footer stays intact
            path.write_bytes(content)
    with refused("snapshot-unreadable", match=f"snapshot version {taken.version} .*--version"):
        bootstrap(StateOperation(spark, home, lambda message: None), taken, selected)
    assert load_generations(home.lifecycle).current == record.current


@pytest.mark.parametrize("continued_by", [pytest.param("operation", marks=pytest.mark.extended), "job"])
def test_an_emitted_batch_without_a_commit_is_committed_with_its_watermark(
    spark: SparkSession, judged: Home, tmp_path: Path, continued_by: str
) -> None:
    home = copy_of(judged, tmp_path / "home")
    middle = CUT + (len(ROWS) - CUT) // 2
    land(home, ROWS[CUT:middle], 3)
    judge(spark, home)  # the commit is removed below, as by a kill after Delta's commit and before Spark's
    position = position_after(home.checkpoint)
    commit = home.checkpoint / "commits" / str(position.batch)
    content = commit.read_text()
    commit.unlink()
    if continued_by == "operation":
        rescale(StateOperation(spark, home, lambda message: None), 3)
        assert position_after(checkpoint_of(home.lifecycle, 2), position.batch) == position
        assert json.loads(commit.read_text().splitlines()[1]) == json.loads(content.splitlines()[1])
    land(home, ROWS[middle:], 4)
    judge(spark, home)
    assert emitted(home) == defined(ROWS, DEPLOYMENT)


def test_a_damaged_state_fails_a_rescale_and_is_replaced_from_a_snapshot(
    spark: SparkSession, judged: Home, tmp_path: Path
) -> None:
    home = copy_of(judged, tmp_path / "home")
    batch = committed_batches(home.checkpoint)[-1]
    offsets = home.checkpoint / "offsets" / str(batch)
    intact = offsets.read_text()
    offsets.write_text(intact.splitlines()[0] + '\n{"conf": {}}\n{"nothing": 1}\n')
    with refused("checkpoint-damaged"):
        position_after(home.checkpoint)
    offsets.write_text(intact)
    for path in home.checkpoint.glob("state/0/*/*.changelog"):
        path.write_bytes(path.read_bytes()[:-20])
    for path in home.checkpoint.glob("state/0/*/*.zip"):
        path.write_bytes(b"no archive")
    with pytest.raises(Exception, match=r"(?i)state|zip|checksum|read"):
        rescale(StateOperation(spark, home, lambda message: None), 5)
    assert home.generation().number == 2
    bootstrap(StateOperation(spark, home, lambda message: None), find_snapshot(home), damaged=True)
    land(home, ROWS[CUT:], 3)
    judge(spark, home)
    assert emitted(home) == defined(ROWS, DEPLOYMENT)
    record = json.loads((home.lifecycle / "generations.json").read_text())
    assert all(one["status"] != "new" for one in record["generations"])
