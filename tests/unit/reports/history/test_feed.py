"""Feed of changes: each row once in commit order, from any cursor, and expired cursors."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.errors import Misuse
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.history import feed
from fleetpulse.reports.history.feed import NEWEST, OLDEST, Cursor, changes_after, parse_cursor
from tests.support.form import examples
from tests.support.histories.histories import START
from tests.support.homes.homes import empty
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def _append(home: Home, number: int, *kinds: str) -> None:
    """Append a version with a row of each kind; its device names the version and the place."""
    rows: list[dict[str, Any]] = [
        {"kind": kind, "device_id": f"{number}-{place}", "transition_no": place, "event_time_ms": START, "to_mode": "online"}
        for place, kind in enumerate(kinds)
    ]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "test", number)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DeltaLog:
    home = empty(tmp_path_factory.mktemp("feed") / "home", Deployment(10_000))
    _append(home, 1, "transition", "transition", "late", "add", "retract", "transition")
    _append(home, 2, "late", "summary")
    _append(home, 3, "transition")
    _append(home, 4, *["transition"] * 5, "add", "add")
    tables.open_table(home.table(JUDGEMENTS.name)).optimize.compact()
    _append(home, 6, "retract", "duplicate")
    return DeltaLog(home.table(JUDGEMENTS.name))


def _follow(log: DeltaLog, cursor: Cursor, limits: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(100):
        found = changes_after(log, cursor, limits[step % len(limits)])
        assert len(found.rows) <= limits[step % len(limits)]
        rows += found.rows
        cursor = parse_cursor(str(found.following), log)
        if found.at_end:
            assert cursor == parse_cursor(NEWEST, log)
            return rows
    raise AssertionError("the feed has no end")


@settings(max_examples=examples(8))
@given(limits=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_client_that_follows_receives_each_row_once_in_commit_order(log: DeltaLog, limits: list[int]) -> None:
    rows = _follow(log, parse_cursor(OLDEST, log), limits)
    versions = [int(row["device_id"].partition("-")[0]) for row in rows]
    assert versions == sorted(versions)
    by_version = {number: sorted(row["kind"] for row in rows if row["device_id"].startswith(f"{number}-")) for number in versions}
    assert by_version == {
        1: ["add", "retract", "transition", "transition", "transition"], 3: ["transition"],
        4: ["add", "add", *["transition"] * 5], 6: ["retract"],
    }  # fmt: skip
    assert len({row["device_id"] for row in rows}) == len(rows)


def test_a_client_can_continue_after_any_row(log: DeltaLog) -> None:
    rows = _follow(log, Cursor(0), [1_000])
    for place, row in list(enumerate(rows))[::3]:
        rest = _follow(log, parse_cursor(row["cursor"], log), [3])
        assert [one["device_id"] for one in rest] == [one["device_id"] for one in rows[place + 1 :]]


def test_few_versions_are_read_for_one_answer(log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _follow(log, Cursor(0), [1_000])
    monkeypatch.setattr(feed, "_VERSIONS", 2)
    found = changes_after(log, Cursor(0), 1_000)
    assert (found.following, found.at_end) == (Cursor(2), False)
    assert len(_follow(log, Cursor(0), [1_000])) == len(rows)


def test_a_client_that_begins_at_the_end_receives_newer_rows(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment(10_000))
    log = DeltaLog(home.table(JUDGEMENTS.name))
    cursor = parse_cursor(NEWEST, log)
    assert changes_after(log, cursor, 10).at_end
    _append(home, 1, "transition")
    found = changes_after(log, cursor, 10)
    assert [row["device_id"] for row in found.rows] == ["1-0"]
    assert (found.rows[0]["to_mode"], found.rows[0]["event_time_ms"]) == ("online", START)
    assert changes_after(log, found.following, 10).rows == []


def test_a_cursor_without_its_version_is_expired(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment(10_000))
    for number in range(1, 4):
        _append(home, number, "transition")
    log = DeltaLog(home.table(JUDGEMENTS.name))
    [removed] = [path for path in log.log.glob("*.json") if int(path.stem) == 2]
    removed.unlink()
    with refused("cursor-expired", match="keep_judgement_versions"):
        changes_after(log, Cursor(1), 10)
    assert parse_cursor(OLDEST, log) == Cursor(3)
    assert [row["device_id"] for row in changes_after(log, Cursor(3), 10).rows] == ["3-0"]
    with refused("cursor-expired"):
        changes_after(log, Cursor(5), 10)
    for path in log.table.glob("kind=transition/*"):
        path.unlink()
    with refused("cursor-expired"):
        changes_after(log, Cursor(3), 10)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "-1.0", "1.x", "٣.0", "1.0.0", "9" * 30 + ".0"])
def test_a_text_that_is_no_cursor_is_refused(log: DeltaLog, text: str) -> None:
    with refused("parameter-invalid", Misuse):
        parse_cursor(text, log)


def test_the_feed_of_a_home_without_judgements_is_empty(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "nothing")
    for text in (NEWEST, OLDEST):
        found = changes_after(log, parse_cursor(text, log), 10)
        assert (found.rows, found.at_end) == ([], True)
