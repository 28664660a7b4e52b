"""Facts in memory: failures, restores and rollbacks between refreshes."""

import os
import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from duckdb import DuckDBPyConnection

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.tables import tables
from fleetpulse.reports import frontiers
from fleetpulse.reports.present import mirror
from fleetpulse.reports.present.kept import keep_present
from fleetpulse.reports.present.mirror import PresentMirror
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import JudgedHome, commit_batch, empty

pytestmark = pytest.mark.unit
DAY_S = DAY_MS // 1000


class _Watched:
    """A judged home with a mirror."""

    def __init__(self, path: Path) -> None:
        self.judged = JudgedHome(empty(path / "home", Deployment(10_000)))
        self.home = self.judged.home
        self.held = PresentMirror(self.home)
        self.now_ms = START

    def batch(self, *rows: Row) -> None:
        self.judged.land_and_judge(*rows)

    def refresh(self) -> "_Watched":
        self.now_ms += 1
        self.held.refresh(self.now_ms)
        return self

    def facts(self, held: PresentMirror | None = None) -> Any:
        """Return the facts, without the clocks, which are those of the load."""
        held = held or self.held
        with held.cursor() as cursor:
            devices = cursor.execute("SELECT * EXCLUDE (clock, clock_offset_ms) FROM live.devices WHERE mode != 'unjudged'")
            rows = sorted(map(repr, devices.fetchall()))
            changes = sorted(map(repr, cursor.execute("FROM live.changes").fetchall()))
        return rows, changes, held.reached.kinds, held.reached.modes

    def loaded(self) -> Any:
        """Return the facts of a new load."""
        fresh = PresentMirror(self.home)
        fresh.refresh(self.now_ms)
        return self.facts(fresh)


@pytest.fixture
def watched(tmp_path: Path) -> _Watched:
    made = _Watched(tmp_path)
    made.batch(signal(10, "a"), signal(20, "b"), tick(40))
    return made.refresh()


def test_counts_include_transitions_that_are_older_than_a_day(watched: _Watched) -> None:
    watched.batch(signal(3 * DAY_S, "a"), tick(3 * DAY_S + 60))
    for facts in (watched.refresh().facts(), watched.loaded()):
        assert facts[3] == {"offline": 2, "online": 3}
        assert len(facts[1]) == 1, "of the last day only"


def test_a_word_that_no_mode_has_is_shown_as_it_is_stored(watched: _Watched) -> None:
    damaged = {
        "kind": "transition", "device_id": "a", "life_ms": START, "transition_no": 77, "from_mode": "online", "to_mode": "asleep",
        "trigger": "boredom", "event_time_ms": START + 30_000, "last_seen_ms": START, "policy_version": "p",
        "judged_at_ms": START + 30_000, "generation": 1,
    }  # fmt: skip
    tables.append_of(watched.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [damaged]), {"damage": 1})
    for held in (watched.refresh().held, PresentMirror(watched.home)):
        held.refresh(watched.now_ms)
        with held.cursor() as cursor:
            found = cursor.execute('SELECT to_mode, "trigger" FROM live.changes WHERE transition_no = 77').fetchall()
        assert found == [("asleep", "boredom")]


def test_a_refresh_that_failed_is_repeated_whole(watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.batch(signal(60, "c"), signal(65, "a"), tick(90))
    before = watched.facts()
    for name in ("_listed", "counted", "Reached"):
        with monkeypatch.context() as patched:
            patched.setattr(mirror, name, _fails)
            with pytest.raises(ZeroDivisionError):
                watched.refresh()
        if name != "Reached":
            assert watched.facts() == before
        views = "SELECT count(*) FROM duckdb_views() WHERE NOT internal AND database_name = 'memory'"
        assert watched.held._connection.execute(views).fetchall() == [(0,)], "views name files that maintenance may remove"
        assert watched.held._connection.execute("SELECT count(*) FROM duckdb_tables() WHERE temporary").fetchall() == [(0,)]
    assert watched.refresh().facts() == watched.loaded()
    assert len(watched.facts()[1]) == 3


def _fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


def test_transitions_committed_during_a_load_are_listed_once(watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    original = mirror.present_in

    def then_committed(*arguments: Any) -> Any:
        present = original(*arguments)
        watched.batch(signal(60, "c"), tick(90))
        return present

    held = PresentMirror(watched.home)
    with monkeypatch.context() as patched:
        patched.setattr(mirror, "present_in", then_committed)
        held.refresh(watched.now_ms)
    held.refresh(watched.now_ms + 1)
    assert watched.facts(held) == watched.loaded()


@pytest.mark.parametrize("replace", ["_replace", "_load_changes"])
def test_a_mirror_shows_that_facts_and_version_differ(watched: _Watched, monkeypatch: pytest.MonkeyPatch, replace: str) -> None:
    """A fold replaces the facts before their version is known; a load replaces both after all reading."""
    original, seen = getattr(watched.held, replace), list[bool]()

    def observed(*arguments: Any) -> None:
        original(*arguments)
        seen.append(watched.held.is_replacing)

    monkeypatch.setattr(watched.held, replace, observed)
    monkeypatch.setattr(watched.held, "_is_due", lambda _: replace == "_load_changes")
    watched.batch(signal(60, "c"), tick(90))
    watched.refresh()
    assert seen == [replace == "_replace"]
    assert not watched.held.is_replacing


def test_facts_are_loaded_again_after_a_rollback_of_the_frontier(watched: _Watched) -> None:
    watched.batch(signal(2 * DAY_S, "a"), tick(2 * DAY_S + 60))
    watched.refresh()
    commit_batch(watched.home.checkpoint, 99, START + 40_000)
    assert watched.refresh().facts() == watched.loaded()
    assert len(watched.facts()[1]) == 5


def test_facts_are_loaded_again_after_a_restore_of_a_table(watched: _Watched, tmp_path: Path) -> None:
    folder = watched.home.table(JUDGEMENTS.name)
    shutil.copytree(folder, tmp_path / "backup")
    watched.batch(signal(60, "c"), tick(90))
    watched.refresh()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    other = {
        "kind": "transition",
        "device_id": "z",
        "to_mode": "online",
        "event_time_ms": START,
        "judged_at_ms": START,
        "transition_no": 1,
    }
    tables.append(watched.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [other]), "other", 1)
    assert watched.refresh().facts() == watched.loaded()
    assert any("'z'" in row for row in watched.facts()[0])


def test_signals_are_read_again_after_an_interval_even_if_the_clock_was_set_back(watched: _Watched) -> None:
    watched.batch(signal(41, "new"))

    def heard() -> list[Any]:
        with watched.held.cursor() as cursor:
            return cursor.execute("SELECT 1 FROM live.devices WHERE device_id = 'new'").fetchall()

    assert not watched.refresh() or not heard()
    watched.now_ms -= timedelta(days=1) // timedelta(milliseconds=1)
    assert watched.refresh() and heard()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("elsewhere")
def test_cursors_show_instants_in_utc(watched: _Watched) -> None:
    assert os.environ["TZ"] == "Asia/Tokyo"
    with watched.held.cursor() as cursor:
        assert cursor.execute("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]


def test_a_load_that_needs_more_memory_gets_it(watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_present(watched.home, frontiers.judged_frontier_ms(watched.home))
    limits, load_changes = list[str](), PresentMirror._load_changes

    def limited(held: PresentMirror, connection: DuckDBPyConnection, frontier_ms: int | None) -> None:
        [(limit,)] = connection.execute("SELECT current_setting('memory_limit')").fetchall()
        limits.append(limit)
        if len(limits) == 1:
            connection.execute("SET temp_directory = ''")
            connection.execute("CREATE TEMP TABLE large AS SELECT range AS n, uuid() AS text FROM range(20_000_000)")
        load_changes(held, connection, frontier_ms)

    monkeypatch.setattr(mirror, "_MEMORY_OF_LOAD", "20MiB")
    monkeypatch.setattr(tables, "SPILLING_MEMORY", "64MiB")
    monkeypatch.setattr(PresentMirror, "_load_changes", limited)
    assert watched.loaded() == watched.facts()
    assert limits == ["20.0 MiB", "64.0 MiB"]


def test_tables_beyond_the_memory_are_in_a_folder_of_the_process(watched: _Watched) -> None:
    with watched.held.cursor() as cursor:
        [(folder, limit)] = cursor.execute("SELECT current_setting('temp_directory'), current_setting('memory_limit')").fetchall()
        assert Path(folder).parent.stat().st_mode & 0o077 == 0 and not folder.startswith(str(Path.cwd()))
        assert limit == "381.4 MiB", "of queries, not of the load"
