"""Progress lines of long steps: counts at a bounded rate, on standard error, never in the output."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from typer.testing import CliRunner

from batch import backtest as job
from batch.common.progress import EVERY_S, Paced, Steps, tasks_of, watched
from batch.quality.rejudge import Origin, replay_bronze
from batch.state import canary
from batch.state.canary import RowCounter
from batch.state.checkpoint_copy import copy_checkpoint
from batch.state.generation import await_termination, judged_version
from batch.state.operations import StateOperation
from cli.app import app
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.generations import Generation
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.bronze_slices import pieces_of, slices_of
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import commit_batch, empty, landed_home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


class Clock:
    """Clock that is set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause between progress lines."""
    monkeypatch.setattr("batch.common.progress.EVERY_S", 0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return landed_home(tmp_path / "home", [*(signal(at) for at in range(0, 900, 30)), tick(2_000)], Deployment(10_000), (9, 18))


def _query(**more: Any) -> StreamingQuery:
    return cast("StreamingQuery", SimpleNamespace(isActive=True, stop=lambda: None, lastProgress=None, **more))


def _progress(version: int) -> dict[str, Any]:
    return {"sources": [{"endOffset": json.dumps({"version": version})}]}


def test_paced_progress_builds_and_writes_a_line_only_every_few_seconds() -> None:
    lines, built, clock = list[str](), list[int](), Clock()
    paced = Paced(lines.append, clock)

    def line() -> str:
        built.append(1)
        return f"{clock.now_s:g}"

    for tenth in range(100):
        clock.now_s = tenth * EVERY_S / 10
        paced(line)
    assert lines == [f"{EVERY_S * number:g}" for number in range(1, 10)]
    assert len(built) == len(lines)


def test_silent_step_reports_the_task_counts_of_spark() -> None:
    lines, polled_at_s, clock = list[str](), list[float](), Clock()
    steps = Steps(lines.append, clock)

    def tasks() -> tuple[int, int] | None:
        polled_at_s.append(clock.now_s)
        return None if clock.now_s == 8 else (1, 7)

    steps("comparing")
    for clock.now_s in range(18):
        steps.report_if_silent(tasks)
    assert lines == ["comparing", *["comparing: 1 of 7 tasks of Spark's present stage done"] * 2]
    assert polled_at_s == [8, 9, 17], "Spark is not polled while the step reports its own progress"
    clock.now_s = 24
    steps("comparing: 2 of 3")
    steps.report_if_silent(tasks)
    assert lines[-1] == "comparing: 2 of 3"


def test_task_counts_are_dropped_if_the_next_step_starts_during_the_poll() -> None:
    lines, clock = list[str](), Clock()
    steps = Steps(lines.append, clock)
    clock.now_s = 100

    def tasks() -> tuple[int, int]:
        steps("the next")
        return 1, 2

    steps.report_if_silent(tasks)
    assert lines == ["the next"]


def test_task_counts_include_running_stages_and_skip_unknown_ones() -> None:
    stages = {
        3: SimpleNamespace(numCompletedTasks=2, numTasks=7),
        4: SimpleNamespace(numCompletedTasks=0, numTasks=5),
    }
    active = [3, 4, 5]
    tracker = SimpleNamespace(getActiveStageIds=lambda: active, getStageInfo=stages.get)
    spark = cast("SparkSession", SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker)))
    assert tasks_of(spark) == (2, 12)
    active[:] = [5]
    assert tasks_of(spark) is None


def test_watcher_ends_without_an_error_if_the_jvm_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    polls = list[int]()

    def gone() -> None:
        polls.append(1)
        raise Py4JError("the JVM is gone")

    spark = cast("SparkSession", SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=gone)))
    monkeypatch.setattr("batch.common.progress._SILENT_S", 0)
    monkeypatch.setattr("batch.common.progress._POLL_S", 0)
    with watched(spark, Steps(lambda _: None)) as watcher:
        watcher.join(30)
    assert polls == [1]


def test_running_query_reports_its_version_of_bronze() -> None:
    reached: Iterator[Any] = iter([None, {"sources": []}, _progress(3), _progress(9)])
    query, versions = _query(), list[int]()

    def has_ended(_: float) -> bool:
        query.lastProgress = next(reached, "ended")  # type: ignore[misc]
        return query.lastProgress == "ended"

    query.awaitTermination = has_ended  # type: ignore[method-assign,assignment]
    await_termination(query, versions.append)
    assert versions == [3, 9]
    query.lastProgress = {"sources": [{"endOffset": None}]}  # type: ignore[misc,assignment]
    assert judged_version(query) is None


def test_query_times_out_only_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch.state.generation._PATIENCE_S", 60.0)
    now_s = 0.0
    monkeypatch.setattr("batch.state.generation.time.monotonic", lambda: now_s)
    steps: Iterator[tuple[float, int]] = iter([(50.0, 1), (100.0, 2), (150.0, 3), (200.0, 3), (211.0, 3)])
    query = _query()

    def has_ended(_: float) -> bool:
        nonlocal now_s
        now_s, version = next(steps)
        query.lastProgress = _progress(version)  # type: ignore[misc]
        return False

    query.awaitTermination = has_ended  # type: ignore[method-assign,assignment]
    with refused("judging-timeout"):
        await_termination(query)
    assert list(steps) == []


@pytest.mark.usefixtures("unpaced")
def test_checkpoint_copy_reports_files_and_bytes(tmp_path: Path) -> None:
    checkpoint, lines = tmp_path / "from", list[str]()
    commit_batch(checkpoint, 0, 5_000)
    copy_checkpoint(checkpoint, tmp_path / "to", lines.append)
    sizes = sum(path.stat().st_size for path in (tmp_path / "to").rglob("*") if path.is_file())
    assert lines[0].startswith("copying: 1 files") and lines[-1] == f"copying: 2 files, {sizes} bytes so far"


@pytest.mark.usefixtures("unpaced")
def test_replay_in_this_process_reports_each_slice(home: Home) -> None:
    lines, pieces = list[str](), pieces_of(home)
    question = job.planned(home, parse_policy({"rules": {"timeout": "30s"}}), None, None).question
    job.replay_here(question, slices_of(pieces, 9), lines.append)
    assert [one.split(",")[0] for one in lines] == [f"judging: {number} of 3 slices" for number in (1, 2, 3)]
    replay_bronze(home, START + 2_000_000, Origin(), lines.append)
    assert lines[-1] == "judging: 1 of 1 slices, received up to 2023-11-14T22:46:40.000Z"


@pytest.mark.usefixtures("unpaced")
@pytest.mark.parametrize("form", ["--json", "--verdicts"])
def test_backtest_output_for_programs_has_no_progress_lines(home: Home, form: str, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text('[rules]\ntimeout = "20s"\n')
    result = CliRunner().invoke(app, ["backtest", "--policy", str(tmp_path / "short.toml"), "--home", str(home.path), form])
    assert result.exit_code == 0 and "judging: 1 of 1 slices" in result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()]


def test_row_counter_counts_each_commit_once_and_skips_partial_entries(tmp_path: Path) -> None:
    home = Home(tmp_path)
    counter = RowCounter(home.table(JUDGEMENTS.name))
    assert counter.count() == 0, "the table does not exist yet"
    tables.create(home, JUDGEMENTS)
    for number, count in enumerate((2, 3), 1):
        rows: list[dict[str, Any]] = [{"kind": "late", "device_id": "d"}] * count
        tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "test", number)
        assert counter.count() == counter.count() == sum((2, 3)[:number])
    entry = home.table(JUDGEMENTS.name) / "_delta_log" / f"{3:020}.json"
    entry.write_text('{"add": {"path"')
    assert counter.count() == 5, "a partial entry of the log is not counted"
    entry.write_text(json.dumps({"add": {"path": "x", "stats": json.dumps({"numRecords": 7})}}))
    assert counter.count() == 12


@pytest.mark.usefixtures("unpaced")
def test_canary_reports_its_duration_both_positions_and_the_judgement_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, lines = empty(tmp_path / "home", Deployment()), list[str]()
    commit_batch(home.checkpoint, 0, 5_000)
    query = _query()
    query.lastProgress = _progress(4)  # type: ignore[misc,assignment]
    monkeypatch.setattr(canary, "start", lambda *_, **__: query)
    monkeypatch.setattr(canary, "_POLL_S", 0.01)
    generation = Generation(2, 3, 4, "migrate --canary", {"generation": 1}, 1)
    operation = StateOperation(lambda: cast("SparkSession", None), home, lines.append)
    canary._side_by_side(operation, generation, home.table(JUDGEMENTS.name), 0.05)
    assert lines[0] == (
        "canary: 0 s of 0 s; generation 2 has judged bronze up to version 4, the running one up to 1; "
        "0 judgements in the scratch table"
    )
