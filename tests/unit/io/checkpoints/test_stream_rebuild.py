"""Rebuilds of the checkpoints of streams: interruptions, and the part of bronze that is read again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import COVERAGE, MESSAGES
from fleetpulse.io.checkpoints import stream_rebuild
from fleetpulse.io.checkpoints.stream_rebuild import (
    StreamBegin,
    finish,
    read_begin,
    read_rebuild,
    read_span,
    rebuild,
    write_begin,
    write_span,
)
from fleetpulse.io.checkpoints.streams import next_versions
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.readers import oldest_live_pin, reader_pins
from fleetpulse.io.streams.rebuilds import end_finished_rebuild, rebuild_stream
from fleetpulse.io.streams.sink import TableSink
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.adaptive_batching import NEWEST, first_version_since
from tests.support.homes.checkpoints import write_offsets
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def _land(home: Home, *received_ms: int) -> None:
    """Append a version of bronze for each instant; the first call creates the table as version 0."""
    tables.create(home, MESSAGES)
    for number, at_ms in enumerate(received_ms):
        row = {"received_at_ms": at_ms, "kind": Kind.HEARTBEAT.value, "device_id": "d", "site": "s", "digest": number}
        tables.append_of(home, MESSAGES, tables.to_table(MESSAGES, [row]), {NEWEST: at_ms})


def test_span_of_receipt_determines_the_first_version(home: Home) -> None:
    _land(home, 1_000, 2_000, 2_500, 9_000, 10_000)
    log = DeltaLog(home.table(MESSAGES.name))
    found = [first_version_since(log, 6, span_ms) for span_ms in (0, 999, 1_000, 7_500, 8_000, 9_000, 99_000)]
    assert found == [5, 5, 4, 3, 2, 1, 1]
    assert first_version_since(log, 4, 500) == 2
    assert first_version_since(log, 0, 500) == 0


def test_rebuild_begins_before_the_span_and_keeps_those_versions(home: Home) -> None:
    _land(home, 1_000, 2_000, 3_000, 4_000)
    checkpoint = home.stream_checkpoint(StreamName.VITALS)
    write_offsets(home.checkpoint, 0, {"version": 5})
    write_offsets(checkpoint, 0, {"reservoirVersion": 4})
    write_span(checkpoint, 1_000)
    assert oldest_live_pin(reader_pins(home)).version == 2
    found = rebuild_stream(home, StreamName.VITALS)
    assert found == StreamBegin(2, 5) == read_begin(checkpoint), "the version 4 may have been read, but not committed"
    assert next_versions(checkpoint) == []
    assert read_span(checkpoint) == 1_000
    assert oldest_live_pin(reader_pins(home)).version == 2


def test_state_follows_from_the_span_before_the_newest_batch(home: Home) -> None:
    """The newest batch ran with the watermark of the one before: it has not written what its own rows end."""
    _land(home, 1_000, 2_000, 3_000, 4_000, 9_000, 9_500)
    checkpoint = home.stream_checkpoint(StreamName.COMMANDS)
    write_span(checkpoint, 1_000)
    write_offsets(home.checkpoint, 0, {"version": 7})
    write_offsets(checkpoint, 0, {"reservoirVersion": 2})
    write_offsets(checkpoint, 1, {"reservoirVersion": 5})
    write_offsets(checkpoint, 2, {"reservoirVersion": 7})
    assert oldest_live_pin(reader_pins(home)).version == 3
    write_offsets(checkpoint, 3, {"reservoirVersion": 8}, committed=False)
    assert rebuild_stream(home, StreamName.COMMANDS) == StreamBegin(3, 7)


def test_state_does_not_depend_on_rows_before_the_begin_of_the_stream(home: Home) -> None:
    """Maintenance may have removed those versions before the stream began."""
    _land(home, 1_000, 2_000, 3_000, 4_000)
    checkpoint = home.stream_checkpoint(StreamName.COMMANDS)
    write_span(checkpoint, 5_000)
    write_begin(checkpoint, StreamBegin(3))
    write_offsets(home.checkpoint, 0, {"version": 5})
    for batch, version in enumerate((4, 5)):
        write_offsets(checkpoint, batch, {"reservoirVersion": version})
        assert oldest_live_pin(reader_pins(home)).version == 3
    assert rebuild_stream(home, StreamName.COMMANDS) == StreamBegin(3, 5)


def test_stream_without_a_batch_is_refused(home: Home) -> None:
    with refused("stream-not-begun"):
        rebuild_stream(home, StreamName.VITALS)


def test_stream_whose_state_has_no_span_is_refused(home: Home) -> None:
    write_offsets(home.stream_checkpoint(StreamName.SESSIONS), 0, {"version": 4})
    with refused("stream-not-rebuildable"):
        rebuild_stream(home, StreamName.SESSIONS)


def test_interrupted_rebuild_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "vitals"
    write_offsets(checkpoint, 0, {"version": 7})

    def crash(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stream_rebuild, "finish", crash)
        with pytest.raises(KeyboardInterrupt):
            rebuild(checkpoint, StreamBegin(3, 7))
    assert not checkpoint.exists()
    finish(checkpoint)
    found = read_rebuild(checkpoint)
    assert found is not None
    assert (found.begin, found.through) == (3, 7)
    finish(checkpoint)
    assert read_rebuild(checkpoint) == found


def test_checkpoint_without_a_batch_does_not_replace_the_one_that_is_kept(tmp_path: Path) -> None:
    checkpoint = tmp_path / "vitals"
    write_offsets(checkpoint, 0, {"version": 7})
    rebuild(checkpoint, StreamBegin(3, 7))
    rebuild(checkpoint, StreamBegin(3, 8))
    assert next_versions(tmp_path / "vitals.before") == [7]
    assert read_begin(checkpoint) == StreamBegin(3, 8)


def test_rebuild_ends_once_its_span_follows_the_former_position(home: Home) -> None:
    _land(home, 1_000, 2_000, 3_000, 4_000, 9_000)
    checkpoint = home.stream_checkpoint(StreamName.VITALS)
    write_offsets(checkpoint, 0, {"version": 4})
    write_span(checkpoint, 1_500)
    rebuild_stream(home, StreamName.VITALS)
    _land(home, 10_000, 11_000)
    for version, ended in ((4, False), (6, False), (7, False), (8, False), (9, True)):
        write_offsets(checkpoint, version, {"version": version})
        end_finished_rebuild(home, StreamName.VITALS)
        assert (read_rebuild(checkpoint) is None) == ended


def test_rows_that_the_table_has_are_not_written_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = home.stream_checkpoint(StreamName.VITALS)
    monkeypatch.setattr("fleetpulse.io.tables.batch_appender.query_id", lambda _: "after")

    def batch(*received_ms: int) -> Any:
        rows = [{"received_at_ms": at_ms, "bridge": "b", "op": "open", "at_ms": at_ms} for at_ms in received_ms]
        table: pa.Table = tables.to_table(COVERAGE, rows)
        return SimpleNamespace(select=lambda *_: SimpleNamespace(toArrow=lambda: table))

    def written() -> list[int]:
        sql = "SELECT epoch_ms(received_at) AS at_ms FROM coverage ORDER BY 1"
        return [row["at_ms"] for row in tables.query(home, sql, tables=[COVERAGE.name])]

    sink = TableSink(home.table(COVERAGE.name), COVERAGE, checkpoint)
    sink(batch(1_000, 2_000), 0)
    sink(batch(1_000, 2_000), 0)
    assert written() == [1_000, 2_000]
    write_offsets(checkpoint, 0, {"version": 4})
    rebuild(checkpoint, StreamBegin(3, 4))
    monkeypatch.setattr("fleetpulse.io.tables.batch_appender.query_id", lambda _: "rebuilt")
    TableSink(home.table(COVERAGE.name), COVERAGE, checkpoint)(batch(2_000, 3_000), 0)
    assert written() == [1_000, 2_000, 3_000]
