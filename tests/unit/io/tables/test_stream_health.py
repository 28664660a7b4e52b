"""Rows of stream_health: one a batch, written without holding up the stream, and deleted when they are old."""

import json
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from deltalake import DeltaTable

from fleetpulse.core.monitoring.health import BatchContext, Progress, to_row
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, STREAM_HEALTH
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.stream_health import StreamHealth, _progress_since, rows_between, tidy
from fleetpulse.reports import judgements
from tests.support.histories.histories import recorded_progress


class Recorded(dict[str, Any]):
    """A batch's progress, with the names of Spark's class."""

    @property
    def json(self) -> str:
        return json.dumps(self)


class Query:
    """A query that remembers the progress of some batches."""

    def __init__(self, run: str, *batches: int) -> None:
        self.runId, self.recentProgress = run, [_progress(batch, run) for batch in batches]

    @property
    def lastProgress(self) -> Recorded | None:  # noqa: N802 - Spark's name
        return self.recentProgress[-1] if self.recentProgress else None


def _progress(batch: int, run: str) -> Recorded:
    return Recorded({**recorded_progress("compaction"), "batchId": batch, "runId": run})


def _home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.prepare(None)
    tables.create(home, JUDGEMENTS)
    tables.create(home, MESSAGES)
    return home


def _follow(home: Home, run: str, remembered: list[int], limit_s: float = 10.0) -> None:
    """Follow one run of a query that remembers these batches at its end."""
    query = Query(run)
    health = StreamHealth(home, 1)
    health.follow(cast("Any", query))
    query.recentProgress += [_progress(batch, run) for batch in remembered]
    health.stop(limit_s)


def _written(home: Home) -> list[tuple[str, int]]:
    rows = tables.query(home, "SELECT run_id, batch_id FROM stream_health ORDER BY batch_id, run_id", tables=["stream_health"])
    return [(row["run_id"], row["batch_id"]) for row in rows]


def test_a_batch_is_written_once_however_often_it_is_reported(tmp_path: Path) -> None:
    home = _home(tmp_path)
    _follow(home, "a", [0, 1, 2])
    assert _written(home) == [("a", 0), ("a", 1), ("a", 2)]
    _follow(home, "a", [0, 1, 2, 3])  # as after an append whose answer was lost
    _follow(home, "b", [4, 5])
    assert _written(home) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)]


def test_a_query_is_asked_for_all_that_it_remembers_only_where_several_batches_are_new() -> None:
    query = Query("a", 3, 4, 5)

    def since(batch: int) -> list[int]:
        return [one.batch_id for one in _progress_since(cast("Any", query), batch)]

    assert (since(-1), since(3), since(4), since(5)) == ([3, 4, 5], [4, 5], [5], [])
    query.recentProgress = [query.recentProgress[-1]]
    assert (since(3), since(4)) == ([5], [5]), "what it has forgotten is missing"
    assert _progress_since(cast("Any", Query("a")), -1) == []


def test_rows_that_were_read_are_written_when_the_query_can_no_longer_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetpulse.io.tables.stream_health._EVERY_S", 0.05)
    home = _home(tmp_path)
    asked = threading.Event()

    class Gone(Query):
        @property
        def lastProgress(self) -> Recorded | None:  # noqa: N802 - Spark's name
            if asked.is_set():
                raise ConnectionError("the JVM is gone")
            asked.set()
            return super().lastProgress

    health = StreamHealth(home, 1)
    health.follow(cast("Any", Gone("a", 0)))
    assert asked.wait(10)
    health.stop(10)
    assert _written(home) == [("a", 0)]


def test_the_newest_batch_is_that_of_the_checkpoint_whatever_the_clock_said(tmp_path: Path) -> None:
    home = _home(tmp_path)
    tables.create(home, STREAM_HEALTH)
    usual = to_row(Progress(recorded_progress("compaction")), BatchContext(1))
    hour_ms = 3_600_000
    stands = [(1, 7, 9 * hour_ms), (2, 0, 5 * hour_ms), (2, 1, 2 * hour_ms)]  # the clock is set back again and again
    rows = [{**usual, "generation": number, "batch_id": batch, "began_at_ms": at_ms} for number, batch, at_ms in stands]
    tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, rows), "run", 1)
    told = judgements.health(home, batches=2)
    assert told is not None
    assert (told["newest"]["generation"], told["newest"]["batch_id"]) == (2, 1)


def test_a_table_that_cannot_be_written_is_no_fault_of_the_stream(tmp_path: Path) -> None:
    home = _home(tmp_path)
    home.table(STREAM_HEALTH.name).write_text("in the way")
    _follow(home, "a", [0, 1])
    home.table(STREAM_HEALTH.name).unlink()
    _follow(home, "a", [0, 1, 2])
    assert [batch for _, batch in _written(home)] == [0, 1, 2]


def test_a_progress_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    home = _home(tmp_path)
    health = StreamHealth(home, 1)
    query = Query("a", 1)
    query.recentProgress.insert(0, Recorded({"runId": "a", "batchId": 0}))
    health.follow(cast("Any", query))
    health.stop()
    assert _written(home) == [("a", 1)]


def test_old_rows_and_small_files_go(tmp_path: Path) -> None:
    home = _home(tmp_path)
    tables.create(home, STREAM_HEALTH)
    before_ms = 1_700_000_000_000
    for batch, at_ms in enumerate([before_ms - 1, before_ms, before_ms + 1]):
        row = {**to_row(Progress(recorded_progress("first")), BatchContext(1)), "batch_id": batch, "began_at_ms": at_ms}
        tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, [row]), "run", batch + 1)
    path = home.table(STREAM_HEALTH.name)
    tidy(path, before_ms)
    assert [batch for _, batch in _written(home)] == [1, 2]
    assert len(DeltaTable(str(path)).file_uris()) == 1
    assert tables.landed(home, STREAM_HEALTH, "run") == 3


def test_a_run_tidies_once_in_so_many_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.io.tables.stream_health._COMMITS", 3)
    home = _home(tmp_path)
    tables.create(home, STREAM_HEALTH)
    health = StreamHealth(home, 1)
    version, files = -1, []
    for batch in range(4):
        row = {**to_row(Progress(recorded_progress("first")), BatchContext(1)), "batch_id": batch}
        row["began_at_ms"] = round(time.time() * 1000)
        tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, [row]), "run", batch + 1)
        version = health._tidy(version)
        files.append(len(DeltaTable(str(home.table(STREAM_HEALTH.name))).file_uris()))
    assert files[:3] == [1, 2, 1]
    assert [batch for _, batch in _written(home)] == [0, 1, 2, 3]


def test_rows_are_counted_from_the_log_as_far_as_it_goes(tmp_path: Path) -> None:
    home = _home(tmp_path)
    path = home.table(MESSAGES.name)
    assert rows_between(path, (0, 1)) == 0
    assert rows_between(path, (0, 2)) is None
    assert rows_between(path, None) is None


def test_the_report_rates_the_newest_figure_and_tells_the_worst(tmp_path: Path) -> None:
    home = _home(tmp_path)
    assert judgements.health(home) is None
    tables.create(home, STREAM_HEALTH)
    rows = []
    for batch, size in enumerate([6_000_000_000, 1_000_000_000, 999_999_999]):
        row = to_row(Progress(recorded_progress("compaction")), BatchContext(1, devices={"online": batch}))
        rows.append({**row, "batch_id": batch, "state_bytes": size, "state_update_us": 7 if batch < 2 else None})
    tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, rows), "run", 3)
    told = judgements.health(home)
    assert told is not None
    by_metric = {one["metric"]: one for one in told["rated"]}
    assert (by_metric["state size"]["rating"], by_metric["state size"]["worst"]) == ("good", 6_000_000_000)
    assert (by_metric["state update"]["value"], by_metric["state update"]["rating"]) == (7, "good")
    assert (told["newest"]["batch_id"], told["newest"]["devices"], told["batches"]) == (2, {"online": 2}, 3)
    json.dumps(told)
