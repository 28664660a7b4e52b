"""Snapshot of the sessions: the version at which a new checkpoint begins, and rows that bronze no longer has."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleetpulse.columnar.streams.sessions import SessionGroup
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.checkpoints.stream_rebuild import StreamBegin, initial_state, read_begin, set_aside
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance import compaction
from fleetpulse.io.maintenance.readers import ReaderPin
from fleetpulse.io.streams.rebuilds import begin_of, rebuild_stream
from fleetpulse.io.streams.session_snapshot import begin_from, begins_before, read_snapshot, write_snapshot
from fleetpulse.io.streams.sessions import fixed_key_groups
from tests.support.histories.histories import START, row, stamped_by_bridge
from tests.support.homes.checkpoints import write_offsets
from tests.support.homes.homes import apply_retention, landed_home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
DAY_S = DAY_MS // 1000
DAYS = 5
A_DAY = 4  # rows and versions of a day


def history() -> list[Row]:
    """Return four signals each day, of which one is a command of an operator."""
    kinds = ("s/a/heartbeat", "s/b/heartbeat", "s/c/heartbeat", "_/a/control")
    return stamped_by_bridge(
        [row(day * DAY_S + 60 * nth, f"fleet/{kind}") for day in range(DAYS) for nth, kind in enumerate(kinds)]
    )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home with a version of bronze for each row; version 0 creates the table."""
    rows = history()
    return landed_home(tmp_path / "home", rows, Deployment(), range(1, len(rows)))


def take(home: Home, version: int, groups: int = 2) -> bytes:
    states = SessionGroup.begin(START).split(groups)
    write_snapshot(home, [one.to_bytes() for one in states], version)
    snapshot = read_snapshot(home)
    assert snapshot is not None
    return snapshot


def compact(home: Home, pins: Sequence[ReaderPin]) -> None:
    table = home.table(MESSAGES.name)
    planned = compaction.plan(table, pins, None, time.time_ns() // 1_000_000)
    assert planned is not None and planned.merges
    for units in planned.merges:
        assert compaction.compact(table, units)


def test_a_checkpoint_continues_at_the_version_of_the_snapshot(home: Home) -> None:
    newest = DeltaLog(home.table(MESSAGES.name)).latest()
    assert begin_from(home, take(home, 7)) == StreamBegin(7, newest + 1)
    assert begin_from(home, take(home, newest + 1)) == StreamBegin(newest + 1, newest + 1)
    assert begin_from(home, take(home, newest + 9)).begin == newest + 1, "bronze was restored from an older backup"


def test_a_compacted_file_is_read_from_its_begin(home: Home) -> None:
    compact(home, [ReaderPin("a test", DAYS * A_DAY, by_version=True)])
    inside = 1 + A_DAY + 2  # of the second day
    log = DeltaLog(home.table(MESSAGES.name))
    begin = begin_from(home, take(home, inside))
    assert begin == StreamBegin(1 + A_DAY, log.latest() + 1)
    assert log.span(begin.begin)[1] == 1 + 2 * A_DAY


def test_rows_that_retention_has_removed_since_the_snapshot_are_counted(home: Home) -> None:
    snapshot = take(home, 1 + A_DAY + 2)  # rows of the second day are missing in it
    assert begin_from(home, snapshot).missed == 0
    apply_retention(home, DAYS * A_DAY, DAY_MS)
    found = begin_from(home, snapshot)
    removed_versions = found.begin - 1
    assert removed_versions % A_DAY == 0 and removed_versions > 2 * A_DAY
    assert found.missed == removed_versions - (A_DAY + 2)


def test_a_stream_that_was_off_continues_from_its_snapshot(home: Home) -> None:
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    write_offsets(checkpoint, 0, {"version": 7})
    snapshot = take(home, 5)
    set_aside(checkpoint)
    assert begin_of(home, StreamName.SESSIONS) == 5
    assert begin_of(home, StreamName.SESSIONS) == 5
    copy = initial_state(checkpoint)
    assert copy is not None and copy.read_bytes() == snapshot
    take(home, 6)  # the first batch has written it, and is repeated
    assert begin_of(home, StreamName.SESSIONS) == 5 and copy.read_bytes() == snapshot


def test_a_rebuild_of_the_sessions_begins_with_the_snapshot(home: Home) -> None:
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    write_offsets(checkpoint, 0, "damaged")
    take(home, 5)
    with refused("checkpoint-damaged"):
        fixed_key_groups(checkpoint, 8)
    assert rebuild_stream(home, StreamName.SESSIONS) == read_begin(checkpoint)
    assert initial_state(checkpoint) is not None
    assert fixed_key_groups(checkpoint, 8) == 8


@pytest.mark.parametrize(("version", "repeats"), [(1 + A_DAY, False), (1 + A_DAY + 2, True)])
def test_a_first_batch_has_rows_of_the_snapshot_only_if_it_begins_before_its_version(
    home: Home, version: int, repeats: bool
) -> None:
    compact(home, [ReaderPin("a test", DAYS * A_DAY, by_version=True)])
    take(home, version)
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    assert begin_of(home, StreamName.SESSIONS) == 1 + A_DAY
    copy = initial_state(checkpoint)
    assert copy is not None and begins_before(checkpoint, copy) == repeats


@pytest.mark.parametrize("content", [b"", b"not Arrow", None])
def test_a_damaged_snapshot_is_refused_and_the_checkpoint_stays(home: Home, content: bytes | None) -> None:
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    write_offsets(checkpoint, 0, {"version": 7})
    whole = take(home, 5)
    path = checkpoint.with_name(f"{checkpoint.name}.state")
    path.write_bytes(whole[:-40] if content is None else content)
    with refused("session-snapshot-damaged"):
        rebuild_stream(home, StreamName.SESSIONS)
    assert (checkpoint / "offsets" / "0").exists()
