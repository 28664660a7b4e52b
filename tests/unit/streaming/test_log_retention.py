"""Log retention of judgements: the log is shortened while its query runs, and readers continue."""

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
IN_AN_HOUR_S = time.time() + 3600
MINUTE_MS = 60_000


@pytest.fixture
def home(home: Home) -> Home:
    tables.create(home, JUDGEMENTS)
    return home


def _commit_batch(home: Home, batch: int, writer: str = "query", **summary: int) -> None:
    """Commit a batch as the query does."""
    row = {"kind": "summary", "key_group": 0, "counts": json.dumps(summary or {"online": batch}), "judged_at_ms": batch * 1000}
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [row]), writer, batch)


def _commits(home: Home) -> list[int]:
    return sorted(int(path.stem) for path in (home.table(JUDGEMENTS.name) / "_delta_log").glob("*.json") if path.stem.isdecimal())


def _age(home: Home, seconds: float) -> None:
    """Set the age of the checkpoints of the log."""
    for path in (home.table(JUDGEMENTS.name) / "_delta_log").glob("*.checkpoint.parquet"):
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_log_below_an_old_checkpoint_is_removed_and_the_table_is_unchanged(home: Home) -> None:
    table = home.table(JUDGEMENTS.name)
    for batch in range(1, 13):
        _commit_batch(home, batch)
    (table / "_delta_log" / f"{3:020d}.crc").write_text("{}")
    write_log_checkpoint(table)
    _commit_batch(home, 13)
    assert shorten_log(table, "query", 2 * 3600_000, IN_AN_HOUR_S) == 0, "the checkpoint is not old enough"
    assert shorten_log(table, "query", MINUTE_MS, IN_AN_HOUR_S) == 13
    assert _commits(home) == [12, 13]
    assert not (table / "_delta_log" / f"{3:020d}.crc").exists()
    assert tables.query(home, "SELECT count(*) AS n FROM judgements")[0]["n"] == 13
    assert tables.landed(home, JUDGEMENTS, "query") == 13
    _commit_batch(home, 14)
    assert _commits(home) == [12, 13, 14]


def test_commits_of_others_after_the_last_commit_of_the_query_are_kept(home: Home) -> None:
    """Otherwise a removed version would seem free to the query, and its commit there is never read."""
    table = home.table(JUDGEMENTS.name)
    for batch in range(1, 6):
        _commit_batch(home, batch)
    for number in range(1, 6):
        _commit_batch(home, number, "amend")
    write_log_checkpoint(table)
    assert newest_by(table, "query") == 5
    assert outdated_log(table, MINUTE_MS, IN_AN_HOUR_S), "its age alone allows removal"
    assert shorten_log(table, "query", MINUTE_MS, IN_AN_HOUR_S) == 0
    assert shorten_log(table, "another query", MINUTE_MS, IN_AN_HOUR_S) == 0, "a query without a commit"
    _commit_batch(home, 6)
    assert shorten_log(table, "query", MINUTE_MS, IN_AN_HOUR_S) == 10
    assert _commits(home) == [10, 11]


def test_log_is_kept_while_a_generation_is_created_or_maintenance_runs(home: Home) -> None:
    for batch in range(1, 6):
        _commit_batch(home, batch)
    write_log_checkpoint(home.table(JUDGEMENTS.name))
    _age(home, 3600)
    for lock in (exclusive_state_change(home, "a canary", lambda _: None), exclusive_maintenance(home, lambda _: None)):
        with lock:
            trim_judgements_log(home, "query", MINUTE_MS)
            assert _commits(home) == [0, 1, 2, 3, 4, 5]
    trim_judgements_log(home, "query", MINUTE_MS)
    assert _commits(home) == [5]


def test_error_of_the_disk_is_logged_and_not_raised(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("read-only")

    monkeypatch.setattr("streaming.lifecycle.shorten_log", refuse)
    with capture_logs() as logged:
        trim_judgements_log(home, "query", MINUTE_MS)
    assert [(one["event"], one["error"]) for one in logged] == [
        ("cannot shorten the log of judgements; it stays as it is", "read-only")
    ]


@pytest.mark.parametrize("content", [b'{"txn": {"appId"', b"\0" * 40, b"\xff\xfe"])
def test_truncated_commit_is_logged_and_not_raised(home: Home, content: bytes) -> None:
    (home.table(JUDGEMENTS.name) / "_delta_log" / f"{1:020d}.json").write_bytes(content)
    with capture_logs() as logged:
        trim_judgements_log(home, "query", MINUTE_MS)
    assert [one["event"] for one in logged] == ["cannot shorten the log of judgements; it stays as it is"]


def test_reader_of_commits_skips_versions_that_were_removed(home: Home) -> None:
    _commit_batch(home, 1, online=1)
    commits = Commits(home, 1)
    _commit_batch(home, 2, online=2)
    assert commits.through("query", 2) == {"summary": 1}
    for batch in range(3, 8):
        _commit_batch(home, batch, online=batch)
    write_log_checkpoint(home.table(JUDGEMENTS.name))
    shorten_log(home.table(JUDGEMENTS.name), "query", MINUTE_MS, IN_AN_HOUR_S)
    assert _commits(home) == [7]
    assert commits.through("query", 3) is None, "the row counts of that batch are no longer known"
    assert commits.through("query", 7) == {"summary": 1}
    assert commits.devices() == {"online": 7}
    assert commits.through("query", 8) is None, "not committed yet"
    _commit_batch(home, 8, online=8)
    assert (commits.through("query", 8), commits.devices()) == ({"summary": 1}, {"online": 8})


def test_newest_version_is_searched_from_the_last_known_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    table = home.table(JUDGEMENTS.name)
    log = DeltaLog(table)
    _commit_batch(home, 1)
    assert log.latest() == 1
    _commit_batch(home, 2)
    _commit_batch(home, 3)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", lambda *_: pytest.fail("the log must not be listed at each call"))
        assert log.latest() == 3
    for batch in range(4, 8):
        _commit_batch(home, batch)
    write_log_checkpoint(table)
    shorten_log(table, "query", MINUTE_MS, IN_AN_HOUR_S)
    assert _commits(home) == [7]
    assert log.latest() == 7, "the last known version was removed meanwhile"
