"""Recovery from a snapshot without the checkpoint's logs: each verdict is emitted exactly once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from batch.state import snapshot
from batch.state.operations import StateOperation, bootstrap, rescale
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import committed_batches, position_after, started_batches
from fleetpulse.io.checkpoints.generations import load_generations, save_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import raise_floor
from fleetpulse.io.lifecycle.state_reader import read_snapshot
from fleetpulse.io.maintenance.readers import reader_pins
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import find_snapshot, write_snapshot
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.histories.streams import DEPLOYMENT, copy_of, history, judge, land
from tests.support.refusals import refused

pytestmark = [pytest.mark.spark, pytest.mark.extended, pytest.mark.timeout(900)]
ROWS = history(31)
PARTS = [len(ROWS) * part // 4 for part in range(5)]


def _ignore(message: str) -> None:
    """Ignore a progress message."""


@pytest.fixture(scope="module")
def judged(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home with a snapshot of its first generation; its second one has judged all parts but the last."""
    home = Home(tmp_path_factory.mktemp("judged") / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    land(home, ROWS[: PARTS[1]], 1)
    judge(spark, home)
    snapshot.take(spark, home, None, _ignore)
    land(home, ROWS[PARTS[1] : PARTS[2]], 2)
    judge(spark, home)
    rescale(StateOperation(spark, home, _ignore), 4)
    land(home, ROWS[PARTS[2] : PARTS[3]], 3)
    judge(spark, home)
    land(home, ROWS[PARTS[3] :], 4)
    return home


def _overwrite_logs_and_state(home: Home) -> None:
    """Overwrite the logs and the state of the checkpoint, as a disk failure would."""
    for folder in ("offsets", "commits", "state"):
        for path in (home.checkpoint / folder).rglob("*"):
            if path.is_file():
                path.write_bytes(b"\0" * 40)


def _lose_last_commit(home: Home) -> None:
    """Delete the commit of the last batch, and overwrite the state."""
    (home.checkpoint / "commits" / str(committed_batches(home.checkpoint)[-1])).unlink()
    for path in (home.checkpoint / "state").rglob("*.zip"):
        path.write_bytes(b"\0" * 40)


def _lose_last_batches(home: Home) -> None:
    """Delete the logs of the last batches, whose judgements were emitted; the other logs stay readable."""
    for folder in ("offsets", "commits"):
        for number in started_batches(home.checkpoint)[-2:]:
            (home.checkpoint / folder / str(number)).unlink()


@pytest.mark.parametrize(
    "damage",
    [_overwrite_logs_and_state, _lose_last_commit, _lose_last_batches],
)
def test_recovery_emits_only_the_missing_judgements(
    spark: SparkSession, judged: Home, tmp_path: Path, damage: Callable[[Home], None]
) -> None:
    home, lines = copy_of(judged, tmp_path / "home"), list[str]()
    before = emitted(home)
    damage(home)
    made = bootstrap(StateOperation(spark, home, lines.append), find_snapshot(home), damaged=True)
    assert made is not None and home.generation() == replace(made, status="current")
    [unknown] = [line for line in lines if line.startswith("the stop position of generation 2 is unknown: ")]
    assert "emitting only the missing judgements; state comparison is skipped" in unknown
    assert lines[-1].startswith("emitting the missing judgements: ")
    assert emitted(home) == defined(ROWS, DEPLOYMENT) and before < emitted(home)
    assert position_after(home.checkpoint).newest_ms == max(row.received_at_ms for row in ROWS)
    judge(spark, home)
    assert emitted(home) == defined(ROWS, DEPLOYMENT)
    assert not list(home.lifecycle.glob("scratch-*")) and not list(home.lifecycle.rglob("unsaid-*"))
    assert {pin.reader for pin in reader_pins(home)} >= {"generation 3", "snapshot 1"}, (
        "a generation that cannot be restored has no pin"
    )
    predecessor = load_generations(home.lifecycle).predecessor()
    assert predecessor is not None and predecessor.number == 1


def test_a_recovery_killed_at_any_step_is_finished_by_a_repeat_or_by_the_job(
    spark: SparkSession, judged: Home, tmp_path: Path
) -> None:
    home, images = copy_of(judged, tmp_path / "home"), dict[str, Home]()
    _overwrite_logs_and_state(home)

    def report(message: str) -> None:
        if not message.startswith(("snapshot version", "the stop position")):  # nothing has changed there
            images[message] = copy_of(home, tmp_path / f"image-{len(images)}")

    bootstrap(StateOperation(spark, home, report), find_snapshot(home), damaged=True)
    assert len(images) >= 4
    for message, image in images.items():
        if image.generation().number == 2:
            bootstrap(StateOperation(spark, image, _ignore), find_snapshot(image), damaged=True)
        else:
            assert emitted(image) < defined(ROWS, DEPLOYMENT), message
            judge(spark, image)
        assert emitted(image) == defined(ROWS, DEPLOYMENT), message
        statuses = [one.status for one in load_generations(image.lifecycle).known.values()]
        assert "new" not in statuses and statuses.count("current") == 1


def test_an_impossible_recovery_is_refused_with_a_reason_and_changes_nothing(
    spark: SparkSession, judged: Home, tmp_path: Path
) -> None:
    home = copy_of(judged, tmp_path / "home")
    _overwrite_logs_and_state(home)
    taken, before = find_snapshot(home), emitted(home)
    work = StateOperation(spark, home, _ignore)
    with refused("checkpoint-damaged", match=r"\./fleet state bootstrap --damaged"):
        bootstrap(work, taken)
    with refused("option-conflict", match="omit --hold and --gate"):
        bootstrap(replace(work, holds=True), taken, damaged=True)
    assert bootstrap(replace(work, dry=True), taken, damaged=True) is None
    rows = read_snapshot(spark, home, taken.version or 0).each
    device = min(row.device_id for row in rows.filter("part = 'device' AND mode = 'online'").collect())
    columns = [
        name if name != "runtime_ms" else f"runtime_ms + int(device_id = '{device}') AS runtime_ms" for name in rows.columns
    ]
    write_snapshot(home, rows.selectExpr(columns), taken)
    with refused("judgements-do-not-follow", match=f"transition of {device}"):
        bootstrap(work, find_snapshot(home), damaged=True)
    record = load_generations(home.lifecycle)
    assert record.current == 2 and emitted(home) == before and len(list(home.lifecycle.glob("gen-*"))) == 2
    chosen = replace(record.known[2], made_from={**record.known[2].made_from, "only": "site = 'north'"})
    save_generations(home.lifecycle, record.with_one(chosen))
    with refused("snapshot-devices-differ"):
        bootstrap(work, taken, damaged=True)
    save_generations(home.lifecycle, record)
    raise_floor(home, "late", (taken.at_ms or 0) + 1)
    with refused("judgements-not-retained", match="keep_late"):
        bootstrap(work, taken, damaged=True)
