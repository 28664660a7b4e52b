"""Rows of stream_health: one per batch, written without blocking the stream, removed when old."""

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
    """Progress of a batch, with the interface of Spark's class."""

    @property
    def json(self) -> str:
        return json.dumps(self)


class Query:
    """Query that has the progress of some batches."""

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


def _follow(home: Home, run: str, available: list[int], limit_s: float = 10.0) -> None:
    """Follow one run of a query that ends with the progress of some batches."""
    query = Query(run)
    health = StreamHealth(home, 1)
    health.follow(cast("Any", query))
    query.recentProgress += [_progress(batch, run) for batch in available]
    health.stop(limit_s)


def _written(home: Home) -> list[tuple[str, int]]:
    rows = tables.query(home, "SELECT run_id, batch_id FROM stream_health ORDER BY batch_id, run_id", tables=["stream_health"])
    return [(row["run_id"], row["batch_id"]) for row in rows]


def test_a_batch_is_written_once_however_often_it_is_reported(tmp_path: Path) -> None:
    home = _home(tmp_path)
    _follow(home, "a", [0, 1, 2])
    assert _written(home) == [("a", 0), ("a", 1), ("a", 2)]
    _follow(home, "a", [0, 1, 2, 3])  # as after an append whose response was lost
    _follow(home, "b", [4, 5])
    assert _written(home) == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)]


def test_recent_progress_is_fetched_only_if_several_batches_are_new() -> None:
    query = Query("a", 3, 4, 5)

    def since(batch: int) -> list[int]:
        return [one.batch_id for one in _progress_since(cast("Any", query), batch)]

    assert (since(-1), since(3), since(4), since(5)) == ([3, 4, 5], [4, 5], [5], [])
    query.recentProgress = [query.recentProgress[-1]]
    assert (since(3), since(4)) == ([5], [5]), "the progress of batch 4 is no longer available"
    assert _progress_since(cast("Any", Query("a")), -1) == []


def test_collected_rows_are_written_after_the_query_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.io.tables.stream_health._EVERY_S", 0.05)
    home = _home(tmp_path)
    polled = threading.Event()

    class Gone(Query):
        @property
        def lastProgress(self) -> Recorded | None:  # noqa: N802 - Spark's name
            if polled.is_set():
                raise ConnectionError("the JVM is gone")
            polled.set()
            return super().lastProgress

    health = StreamHealth(home, 1)
    health.follow(cast("Any", Gone("a", 0)))
    assert polled.wait(10)
    health.stop(10)
    assert _written(home) == [("a", 0)]


def test_newest_batch_follows_batch_numbers_and_not_the_clock(tmp_path: Path) -> None:
    home = _home(tmp_path)
    tables.create(home, STREAM_HEALTH)
    usual = to_row(Progress(recorded_progress("compaction")), BatchContext(1))
    hour_ms = 3_600_000
    batches = [(1, 7, 9 * hour_ms), (2, 0, 5 * hour_ms), (2, 1, 2 * hour_ms)]  # the clock is set back again and again
    rows = [{**usual, "generation": number, "batch_id": batch, "began_at_ms": at_ms} for number, batch, at_ms in batches]
    tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, rows), "run", 1)
    report = judgements.health(home, batches=2)
    assert report is not None
    assert (report["newest"]["generation"], report["newest"]["batch_id"]) == (2, 1)


def test_unwritable_health_table_does_not_fail_the_stream(tmp_path: Path) -> None:
    home = _home(tmp_path)
    home.table(STREAM_HEALTH.name).write_text("in the way")
    _follow(home, "a", [0, 1])
    home.table(STREAM_HEALTH.name).unlink()
    _follow(home, "a", [0, 1, 2])
    assert [batch for _, batch in _written(home)] == [0, 1, 2]


def test_unreadable_progress_loses_only_its_own_row(tmp_path: Path) -> None:
    home = _home(tmp_path)
    health = StreamHealth(home, 1)
    query = Query("a", 1)
    query.recentProgress.insert(0, Recorded({"runId": "a", "batchId": 0}))
    health.follow(cast("Any", query))
    health.stop()
    assert _written(home) == [("a", 1)]


def test_tidy_removes_old_rows_and_merges_small_files(tmp_path: Path) -> None:
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


def test_health_table_is_tidied_once_in_several_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_row_count_is_unknown_beyond_the_versions_in_the_log(tmp_path: Path) -> None:
    home = _home(tmp_path)
    path = home.table(MESSAGES.name)
    assert rows_between(path, (0, 1)) == 0
    assert rows_between(path, (0, 2)) is None
    assert rows_between(path, None) is None


def test_report_rates_the_newest_value_and_includes_the_worst(tmp_path: Path) -> None:
    home = _home(tmp_path)
    assert judgements.health(home) is None
    tables.create(home, STREAM_HEALTH)
    rows = []
    for batch, size in enumerate([6_000_000_000, 1_000_000_000, 999_999_999]):
        row = to_row(Progress(recorded_progress("compaction")), BatchContext(1, devices={"online": batch}))
        rows.append({**row, "batch_id": batch, "state_bytes": size, "state_update_us": 7 if batch < 2 else None})
    tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, rows), "run", 3)
    report = judgements.health(home)
    assert report is not None
    by_metric = {one["metric"]: one for one in report["rated"]}
    assert (by_metric["state size"]["rating"], by_metric["state size"]["worst"]) == ("good", 6_000_000_000)
    assert (by_metric["state update"]["value"], by_metric["state update"]["rating"]) == (7, "good")
    assert (report["newest"]["batch_id"], report["newest"]["devices"], report["batches"]) == (2, {"online": 2}, 3)
    json.dumps(report)
