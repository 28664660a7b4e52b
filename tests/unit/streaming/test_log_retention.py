"""The log of judgements is kept short beside the query that writes to it, and who reads on by version is not lost by that."""

import json
import os
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.commits import write_log_checkpoint
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.exclusive import exclusive_maintenance, exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.vacuum import newest_by, outdated_log, shorten_log
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.stream_health import Commits
from streaming.lifecycle import trim_judgements_log

pytestmark = pytest.mark.unit
AN_HOUR_LATER_S = time.time() + 3600
MINUTE_MS = 60_000


@pytest.fixture
def home(home: Home) -> Home:
    tables.create(home, JUDGEMENTS)
    return home


def _say(home: Home, batch: int, writer: str = "query", **summary: int) -> None:
    """Commit a batch as the query does: its number is one more than the batch's."""
    row = {"kind": "summary", "key_group": 0, "counts": json.dumps(summary or {"online": batch}), "judged_at_ms": batch * 1000}
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [row]), writer, batch)


def _commits(home: Home) -> list[int]:
    return sorted(int(path.stem) for path in (home.table(JUDGEMENTS.name) / "_delta_log").glob("*.json") if path.stem.isdecimal())


def _age(home: Home, seconds: float) -> None:
    """Let the checkpoints have been there for a while."""
    for path in (home.table(JUDGEMENTS.name) / "_delta_log").glob("*.checkpoint.parquet"):
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_what_lies_below_an_old_checkpoint_goes_and_the_table_stays_as_it_is(home: Home) -> None:
    table = home.table(JUDGEMENTS.name)
    for batch in range(1, 13):
        _say(home, batch)
    (table / "_delta_log" / f"{3:020d}.crc").write_text("{}")
    write_log_checkpoint(table)
    _say(home, 13)
    assert shorten_log(table, "query", 2 * 3600_000, AN_HOUR_LATER_S) == 0, "the checkpoint has not been there for so long"
    assert shorten_log(table, "query", MINUTE_MS, AN_HOUR_LATER_S) == 13
    assert _commits(home) == [12, 13]
    assert not (table / "_delta_log" / f"{3:020d}.crc").exists()
    assert tables.query(home, "SELECT count(*) AS n FROM judgements")[0]["n"] == 13
    assert tables.landed(home, JUDGEMENTS, "query") == 13
    _say(home, 14)
    assert _commits(home) == [12, 13, 14]


def test_what_others_have_put_in_behind_the_querys_last_commit_stays(home: Home) -> None:
    """Else the number behind that commit looks free to a batch that began before, and what it commits there nobody reads."""
    table = home.table(JUDGEMENTS.name)
    for batch in range(1, 6):
        _say(home, batch)
    for number in range(1, 6):
        _say(home, number, "amend")
    write_log_checkpoint(table)
    assert newest_by(table, "query") == 5
    assert outdated_log(table, MINUTE_MS, AN_HOUR_LATER_S), "by its age alone it would go"
    assert shorten_log(table, "query", MINUTE_MS, AN_HOUR_LATER_S) == 0
    assert shorten_log(table, "another query", MINUTE_MS, AN_HOUR_LATER_S) == 0, "one that has not committed yet"
    _say(home, 6)
    assert shorten_log(table, "query", MINUTE_MS, AN_HOUR_LATER_S) == 10
    assert _commits(home) == [10, 11]


def test_nothing_goes_while_a_generation_is_made_or_the_home_is_maintained(home: Home) -> None:
    for batch in range(1, 6):
        _say(home, batch)
    write_log_checkpoint(home.table(JUDGEMENTS.name))
    _age(home, 3600)
    for busy in (exclusive_state_change(home, "a canary", lambda _: None), exclusive_maintenance(home, lambda _: None)):
        with busy:
            trim_judgements_log(home, "query", MINUTE_MS)
            assert _commits(home) == [0, 1, 2, 3, 4, 5]
    trim_judgements_log(home, "query", MINUTE_MS)
    assert _commits(home) == [5]


def test_a_disk_that_refuses_is_said_and_ends_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("read-only")

    monkeypatch.setattr("streaming.lifecycle.shorten_log", refuse)
    with capture_logs() as logged:
        trim_judgements_log(home, "query", MINUTE_MS)
    assert [(one["event"], one["error"]) for one in logged] == [
        ("cannot shorten the log of judgements; it stays as it is", "read-only")
    ]


@pytest.mark.parametrize("content", [b'{"txn": {"appId"', b"\0" * 40, b"\xff\xfe"])
def test_a_commit_that_was_cut_off_ends_nothing(home: Home, content: bytes) -> None:
    (home.table(JUDGEMENTS.name) / "_delta_log" / f"{1:020d}.json").write_bytes(content)
    with capture_logs() as logged:
        trim_judgements_log(home, "query", MINUTE_MS)
    assert [one["event"] for one in logged] == ["cannot shorten the log of judgements; it stays as it is"]


def test_figures_go_on_where_the_log_was_cleared_while_nobody_looked(home: Home) -> None:
    _say(home, 1, online=1)
    commits = Commits(home, 1)
    _say(home, 2, online=2)
    assert commits.through("query", 2) == {"summary": 1}
    for batch in range(3, 8):
        _say(home, batch, online=batch)
    write_log_checkpoint(home.table(JUDGEMENTS.name))
    shorten_log(home.table(JUDGEMENTS.name), "query", MINUTE_MS, AN_HOUR_LATER_S)
    assert _commits(home) == [7]
    assert commits.through("query", 3) is None, "what that batch wrote is no longer known"
    assert commits.through("query", 7) == {"summary": 1}
    assert commits.devices() == {"online": 7}
    assert commits.through("query", 8) is None, "not there yet"
    _say(home, 8, online=8)
    assert (commits.through("query", 8), commits.devices()) == ({"summary": 1}, {"online": 8})


def test_the_newest_version_is_found_from_the_one_that_was_known(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    table = home.table(JUDGEMENTS.name)
    log = DeltaLog(table)
    _say(home, 1)
    assert log.latest() == 1
    _say(home, 2)
    _say(home, 3)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", lambda *_: pytest.fail("a log of a day is not listed at each look"))
        assert log.latest() == 3
    for batch in range(4, 8):
        _say(home, batch)
    write_log_checkpoint(table)
    shorten_log(table, "query", MINUTE_MS, AN_HOUR_LATER_S)
    assert _commits(home) == [7]
    assert log.latest() == 7, "what it knew was cleared meanwhile"
