"""Delta appender: constant cost, no row lost beside other writers, no partial commit."""

import errno
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import MESSAGES, QUARANTINE
from fleetpulse.io.delta import appender as appending
from fleetpulse.io.delta.appender import CHECKPOINT_EVERY, Appender
from fleetpulse.io.delta.commits import Added, replace_files
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from tests.support.form import examples
from tests.support.homes.homes import empty
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(), name="a home")]
_AT = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def home(home: Home) -> Home:
    tables.create(home, MESSAGES)
    return home


def rows(*numbers: int) -> pa.Table:
    return tables.to_table(MESSAGES, [{"seq": number, "received_at_ms": number, "device_id": f"d{number}"} for number in numbers])


def found(home: Home) -> list[int]:
    return [row["seq"] for row in tables.query(home, "SELECT seq FROM messages ORDER BY seq", tables=["messages"])]


def test_append_does_not_read_the_whole_log_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    appender, opened = Appender(home.table("messages")), list[Path]()
    for name in ("write_log_checkpoint", "open_known"):
        original = getattr(appending, name)
        monkeypatch.setattr(appending, name, lambda path, original=original: (opened.append(path), original(path))[1])
    versions = [appender.append(rows(number), {"landing": number}) for number in range(1, CHECKPOINT_EVERY + 5)]
    assert versions == [*range(1, CHECKPOINT_EVERY + 5)]
    assert len(opened) == 1, "the table is opened only for the checkpoint of its log"
    log = home.table("messages") / "_delta_log"
    assert (log / f"{CHECKPOINT_EVERY:020d}.checkpoint.parquet").exists() and (log / "_last_checkpoint").exists()
    assert found(home) == [*range(1, CHECKPOINT_EVERY + 5)]
    assert tables.landed(home, MESSAGES, "landing") == CHECKPOINT_EVERY + 4


def test_append_keeps_the_commits_of_other_writers(home: Home) -> None:
    table = home.table("messages")
    first, second = Appender(table), Appender(table)
    assert first.append(rows(1), {"one": 1}) == 1
    assert second.append(rows(2), {"other": 1}) == 2
    write_deltalake(str(table), rows(3), mode="append")
    both = rows(1, 2)
    write_deltalake(str(table / "aside"), both)
    name = Path(DeltaTable(str(table / "aside")).get_add_actions()["path"].to_pylist()[0]).name
    (table / "aside" / name).rename(table / name)
    replaced = {str(path): 1 for path in DeltaTable(str(table), version=2).get_add_actions()["path"].to_pylist()}
    assert replace_files(table, replaced, [Added(name, 1, {"numRecords": 2})], "OPTIMIZE", data_change=False) == 4
    assert first.append(rows(4), {"one": 2}) == 5
    assert found(home) == [1, 2, 3, 4]
    assert [tables.landed(home, MESSAGES, name) for name in ("one", "other")] == [2, 1]


def test_append_never_uses_a_version_below_a_checkpoint_of_the_log(home: Home) -> None:
    """The log may have been cleared since the appender was last used: a commit there would never be read."""
    table = home.table("messages")
    idle, busy = Appender(table), Appender(table)
    idle.append(rows(1), {"idle": 1})
    for number in (2, 3, 4):
        busy.append(rows(number), {"busy": number})
    DeltaTable(str(table)).create_checkpoint()
    for commit in (table / "_delta_log").glob("*.json"):
        if int(commit.stem) < 4:
            commit.unlink()
    assert idle.append(rows(5), {"idle": 2}) == 5
    assert found(home) == [1, 2, 3, 4, 5]


def test_concurrent_appenders_lose_no_row(home: Home) -> None:
    def run(writer: int) -> None:
        appender = Appender(home.table("messages"))
        for number in range(1, 21):
            appender.append(rows(writer * 100 + number), {f"w{writer}": number})

    threads = [threading.Thread(target=run, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found(home) == [writer * 100 + number for writer in range(4) for number in range(1, 21)]
    assert tables.version(home.table("messages")) == 80


def test_append_accepts_a_column_that_another_writer_added(home: Home) -> None:
    table = home.table("messages")
    appender = Appender(table)
    more = rows(2).append_column("further", pa.array(["x"]))
    with refused("column-unknown"):
        appender.append(more, {})
    write_deltalake(str(table), more, mode="append", schema_mode="merge")
    appender.append(rows(1), {})
    appender.append(rows(3).append_column("further", pa.array(["y"])), {})
    assert DeltaTable(str(table)).to_pyarrow_table()["further"].to_pylist().count(None) == 1
    assert found(home) == [1, 2, 3]


def test_second_appender_with_the_same_writer_name_is_refused(home: Home) -> None:
    first, second = Appender(home.table("messages")), Appender(home.table("messages"))
    first.append(rows(1), {"landing": 1})
    with refused("appender-superseded"):
        second.append(rows(1), {"landing": 1})
    assert found(home) == [1]
    assert len([*home.table("messages").glob("*.parquet")]) == 1, "the file of the refused append is removed"


def test_checkpoint_of_the_log_is_durable_before_the_next_commit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    table, synced = home.table("messages"), list[str]()
    monkeypatch.setattr("fleetpulse.io.delta.commits.sync_file", lambda path: synced.append(path.name))
    appender = Appender(table)
    for number in range(1, CHECKPOINT_EVERY + 1):
        appender.append(rows(number), {"landing": number})
    assert synced == [f"{CHECKPOINT_EVERY:020d}.checkpoint.parquet", "_last_checkpoint"]


def test_full_disk_leaves_the_table_unchanged(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    table = home.table("messages")
    appender = Appender(table)

    def full(_number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place in ("fleetpulse.io.delta.appender.os.fsync", "fleetpulse.io.delta.appender.put_commit"):
        with monkeypatch.context() as patched:
            patched.setattr(place, lambda *_: full(0))
            with pytest.raises(OSError, match="No space left"):
                appender.append(rows(1), {"landing": 1})
        assert not [*table.glob("*.parquet")] and tables.version(table) == 0, place
    with monkeypatch.context() as patched:  # the checkpoint of the log is optional: no row is missing without it
        patched.setattr(appending, "CHECKPOINT_EVERY", 1)
        patched.setattr(appending, "write_log_checkpoint", lambda _: full(0))
        appender.append(rows(1), {"landing": 1})
    assert found(home) == [1]


def test_error_after_the_commit_loses_no_row(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    appender = Appender(home.table("messages"))
    with monkeypatch.context() as patched:
        patched.setattr("fleetpulse.io.delta.commits.sync_folder", lambda _: os.close(1_000_000))
        with pytest.raises(OSError, match="Bad file descriptor"):
            appender.append(rows(1), {"landing": 1})
    assert found(home) == [1]
    assert tables.landed(home, MESSAGES, "landing") == 1, "the writer's number is recorded, so the row is not landed again"
    assert Appender(home.table("messages")).append(rows(2), {"landing": 2}) == 2
    assert found(home) == [1, 2]


def test_commit_without_rows_records_its_numbers_and_adds_no_file(home: Home) -> None:
    Appender(home.table("messages")).append(rows(), {"landing": 7})
    assert tables.landed(home, MESSAGES, "landing") == 7
    assert not [*home.table("messages").glob("*.parquet")]


def test_table_with_an_unsupported_protocol_is_refused(home: Home) -> None:
    table = DeltaTable(str(home.table("messages")))
    table.alter.set_table_properties({"delta.enableDeletionVectors": "true"}, raise_if_not_exists=False)
    assert DeltaTable(str(home.table("messages"))).protocol().min_reader_version > 2
    with refused("table-protocol-unsupported"):
        Appender(home.table("messages"))


_INSTANTS = st.none() | st.integers(0, 10**15).map(lambda us: _AT + timedelta(microseconds=us))
_TEXTS = st.none() | st.text(max_size=20) | st.sampled_from(["x" * 10_000, "of\u2028two\x85lines", "\U00020000"])


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.tuples(_INSTANTS, _TEXTS), min_size=1, max_size=5))
def test_statistics_in_the_log_bound_the_rows_of_their_file(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    home = empty(tmp_path_factory.mktemp("home"), Deployment())
    tables.create(home, QUARANTINE)
    given_rows = [{"received_at": at, "topic": text, "payload": b"\xff"} for at, text in drawn]
    tables.append(home, QUARANTINE, pa.Table.from_pylist(given_rows, tables.arrow_schema(QUARANTINE)), "landing", 1)
    for column in ("received_at", "topic"):
        values = [row[column] for row in given_rows if row[column] is not None]
        (file,) = tables.files_of(home, QUARANTINE, column)
        assert DeltaLog(home.table("quarantine")).appended(1) == [(str(file.path), len(given_rows))]
        assert file.rows == len(given_rows)
        if file.least is not None and file.greatest is not None:
            assert values and file.least <= min(values) and max(values) <= file.greatest
        assert tables.files_of(home, QUARANTINE, column, values[:1]) if values else True
