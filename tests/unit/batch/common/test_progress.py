"""A long step says how far it is: what was counted, at a bounded rate, on standard error, and never in its answer."""

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
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every count be told."""
    monkeypatch.setattr("batch.common.progress.EVERY_S", 0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return landed_home(tmp_path / "home", [*(signal(at) for at in range(0, 900, 30)), tick(2_000)], Deployment(10_000), (9, 18))


def _query(**more: Any) -> StreamingQuery:
    return cast("StreamingQuery", SimpleNamespace(isActive=True, stop=lambda: None, lastProgress=None, **more))


def _progress(version: int) -> dict[str, Any]:
    return {"sources": [{"endOffset": json.dumps({"version": version})}]}


def test_how_far_a_step_is_is_said_every_few_seconds_and_its_words_are_made_only_then() -> None:
    said, made, clock = list[str](), list[int](), Clock()
    far = Paced(said.append, clock)

    def words() -> str:
        made.append(1)
        return f"{clock.now_s:g}"

    for tenth in range(100):
        clock.now_s = tenth * EVERY_S / 10
        far(words)
    assert said == [f"{EVERY_S * number:g}" for number in range(1, 10)]
    assert len(made) == len(said)


def test_of_a_step_that_is_silent_for_long_it_is_said_how_far_spark_is() -> None:
    said, asked, clock = list[str](), list[float](), Clock()
    steps = Steps(said.append, clock)

    def tasks() -> tuple[int, int] | None:
        asked.append(clock.now_s)
        return None if clock.now_s == 8 else (1, 7)

    steps("comparing")
    for clock.now_s in range(18):
        steps.look(tasks)
    assert said == ["comparing", *["comparing: 1 of 7 tasks of Spark's present stage done"] * 2]
    assert asked == [8, 9, 17], "Spark is not asked while a step itself speaks"
    clock.now_s = 24
    steps("comparing: 2 of 3")
    steps.look(tasks)
    assert said[-1] == "comparing: 2 of 3"


def test_a_step_that_began_while_spark_was_asked_is_not_taken_for_the_one_before() -> None:
    said, clock = list[str](), Clock()
    steps = Steps(said.append, clock)
    clock.now_s = 100

    def tasks() -> tuple[int, int]:
        steps("the next")
        return 1, 2

    steps.look(tasks)
    assert said == ["the next"]


def test_the_tasks_of_all_stages_that_run_count_and_those_that_spark_has_forgotten_do_not() -> None:
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


def test_a_spark_that_is_gone_ends_the_watch_and_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def gone() -> None:
        asked.append(1)
        raise Py4JError("the JVM is gone")

    spark = cast("SparkSession", SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=gone)))
    monkeypatch.setattr("batch.common.progress._SILENT_S", 0)
    monkeypatch.setattr("batch.common.progress._LOOK_S", 0)
    with watched(spark, Steps(lambda _: None)) as watcher:
        watcher.join(30)
    assert asked == [1]


def test_a_query_that_judges_on_says_which_version_of_bronze_it_has_come_to() -> None:
    reached: Iterator[Any] = iter([None, {"sources": []}, _progress(3), _progress(9)])
    query, told = _query(), list[int]()

    def awaited(_: float) -> bool:
        query.lastProgress = next(reached, "ended")  # type: ignore[misc]
        return query.lastProgress == "ended"

    query.awaitTermination = awaited  # type: ignore[method-assign,assignment]
    await_termination(query, told.append)
    assert told == [3, 9]
    query.lastProgress = {"sources": [{"endOffset": None}]}  # type: ignore[misc,assignment]
    assert judged_version(query) is None


def test_a_query_has_all_the_time_that_it_needs_while_it_comes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch.state.generation._PATIENCE_S", 60.0)
    now_s = 0.0
    monkeypatch.setattr("batch.state.generation.time.monotonic", lambda: now_s)
    steps: Iterator[tuple[float, int]] = iter([(50.0, 1), (100.0, 2), (150.0, 3), (200.0, 3), (211.0, 3)])
    query = _query()

    def awaited(_: float) -> bool:
        nonlocal now_s
        now_s, version = next(steps)
        query.lastProgress = _progress(version)  # type: ignore[misc]
        return False

    query.awaitTermination = awaited  # type: ignore[method-assign,assignment]
    with refused("judging-timeout"):
        await_termination(query)
    assert list(steps) == []


@pytest.mark.usefixtures("at_once")
def test_a_copy_says_how_much_of_it_is_there(tmp_path: Path) -> None:
    checkpoint, said = tmp_path / "from", list[str]()
    commit_batch(checkpoint, 0, 5_000)
    copy_checkpoint(checkpoint, tmp_path / "to", said.append)
    sizes = sum(path.stat().st_size for path in (tmp_path / "to").rglob("*") if path.is_file())
    assert said[0].startswith("copying: 1 files") and said[-1] == f"copying: 2 files, {sizes} bytes so far"


@pytest.mark.usefixtures("at_once")
def test_judging_in_this_process_says_each_slice(home: Home) -> None:
    said, pieces = list[str](), pieces_of(home)
    question = job.planned(home, parse_policy({"rules": {"timeout": "30s"}}), None, None).question
    job.replay_here(question, slices_of(pieces, 9), said.append)
    assert [one.split(",")[0] for one in said] == [f"judging: {number} of 3 slices" for number in (1, 2, 3)]
    replay_bronze(home, START + 2_000_000, Origin(), said.append)
    assert said[-1] == "judging: 1 of 1 slices, received up to 2023-11-14T22:46:40.000Z"


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("form", ["--json", "--verdicts"])
def test_what_a_program_reads_of_a_backtest_has_nothing_of_how_far_it_is(home: Home, form: str, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text('[rules]\ntimeout = "20s"\n')
    done = CliRunner().invoke(app, ["backtest", "--policy", str(tmp_path / "short.toml"), "--home", str(home.path), form])
    assert done.exit_code == 0 and "judging: 1 of 1 slices" in done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_written_is_counted_once_while_it_is_written(tmp_path: Path) -> None:
    home = Home(tmp_path)
    said = RowCounter(home.table(JUDGEMENTS.name))
    assert said.count() == 0, "it is not there yet"
    tables.create(home, JUDGEMENTS)
    for number, count in enumerate((2, 3), 1):
        rows: list[dict[str, Any]] = [{"kind": "late", "device_id": "d"}] * count
        tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "test", number)
        assert said.count() == said.count() == sum((2, 3)[:number])
    entry = home.table(JUDGEMENTS.name) / "_delta_log" / f"{3:020}.json"
    entry.write_text('{"add": {"path"')
    assert said.count() == 5, "half an entry is none"
    entry.write_text(json.dumps({"add": {"path": "x", "stats": json.dumps({"numRecords": 7})}}))
    assert said.count() == 12


@pytest.mark.usefixtures("at_once")
def test_a_canary_says_how_long_it_has_run_how_far_both_are_and_how_much_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, said = empty(tmp_path / "home", Deployment()), list[str]()
    commit_batch(home.checkpoint, 0, 5_000)
    query = _query()
    query.lastProgress = _progress(4)  # type: ignore[misc,assignment]
    monkeypatch.setattr(canary, "start", lambda *_, **__: query)
    monkeypatch.setattr(canary, "_LOOK_S", 0.01)
    made = Generation(2, 3, 4, "migrate --canary", {"generation": 1}, 1)
    work = StateOperation(lambda: cast("SparkSession", None), home, said.append)
    canary._side_by_side(work, made, home.table(JUDGEMENTS.name), 0.05)
    assert said[0] == (
        "canary: 0 s of 0 s; generation 2 has judged bronze up to version 4, the running one up to 1; "
        "0 judgements in the scratch table"
    )
