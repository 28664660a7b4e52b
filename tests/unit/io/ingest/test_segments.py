"""Segments: a file is complete or absent, and holds the position of its bridge."""

from pathlib import Path

import pyarrow as pa
import pytest

from fleetpulse.io.ingest.segments import (
    SEGMENT_SCHEMA,
    BridgePosition,
    SegmentRow,
    bridge_position,
    list_segments,
    positions,
    read_segment,
    remove_leftovers,
    rows_table,
    tail_of,
    write_segment,
)
from tests.support.refusals import refused

ROW = SegmentRow(7, "fleet/s/d/heartbeat", b"\x00\xff", "mqtt")


def write(folder: Path, number: int, *rows: SegmentRow, canary: int | None = None) -> Path:
    return write_segment(folder, number, rows_table(list(rows) or [ROW]), bridge="b", last_canary_ms=canary)


def test_segment_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = read_segment(write(tmp_path, 1))
    assert table.schema.equals(SEGMENT_SCHEMA)
    assert table.to_pylist() == [ROW._asdict()]
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001.arrow"]


def test_segments_are_listed_in_order(tmp_path: Path) -> None:
    for number in (10, 9, 100):
        write(tmp_path, number)
    assert [number for number, _ in list_segments(tmp_path)] == [9, 10, 100]


def test_bridge_position_is_that_of_the_newest_row(tmp_path: Path) -> None:
    assert bridge_position(tmp_path) is None
    assert bridge_position(tmp_path / "none") is None
    write(tmp_path, 1, canary=3)
    assert bridge_position(tmp_path) == BridgePosition(1, 7, last_canary_ms=3, tail=(7, 1))
    line = ROW._replace(origin="replay", recording="r", line=4)
    write(tmp_path, 2, line)
    assert bridge_position(tmp_path) == BridgePosition(2, 7, "r", 4, tail=(7, 1))
    write(tmp_path, 3, line._replace(topic="replay/r", line=5))
    assert bridge_position(tmp_path) == BridgePosition(3, 7, "r", 5, ended=True, tail=(7, 1))
    write_segment(tmp_path, 4, rows_table([ROW]), bridge="b", last_canary_ms=None, gap_open=True, played="r")
    assert bridge_position(tmp_path) == BridgePosition(4, 7, gap_open=True, played="r", tail=(7, 1))
    left_open = frozenset({"c", "d"})
    write_segment(tmp_path, 5, rows_table([ROW]), bridge="b", last_canary_ms=None, left_open=left_open)
    assert bridge_position(tmp_path) == BridgePosition(5, 7, left_open=left_open, tail=(7, 1))
    write_segment(tmp_path, 6, rows_table([ROW]), bridge="b", last_canary_ms=None, gap_rows=left_open)
    assert bridge_position(tmp_path) == BridgePosition(6, 7, gap_rows=left_open, tail=(7, 1))


@pytest.mark.parametrize("kept", [0, 8, 200])
def test_truncated_segment_is_refused(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:kept])
    with refused("segment-damaged"):
        read_segment(path)


def test_file_with_another_schema_or_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "000000000001.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.schema([("a", pa.int64())])) as writer:
        writer.write_table(pa.table({"a": [1]}))
    with refused("segment-version-unsupported"):
        read_segment(path)
    path.rename(tmp_path / "mine.arrow")
    with refused("segment-name-invalid"):
        list_segments(tmp_path)


def test_unfinished_files_are_no_segments_and_are_removed(tmp_path: Path) -> None:
    (tmp_path / "000000000002.tmp").write_bytes(b"half")
    assert list_segments(tmp_path) == []
    assert remove_leftovers(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_one_instant_are_numbered_across_segments_and_restarts(tmp_path: Path) -> None:
    tail, found = None, list[list[int]]()
    for number, stamps in enumerate([[5, 5, 7], [7], [7, 7, 8], [9]], 1):
        table = rows_table([ROW._replace(received_at_ms=at_ms) for at_ms in stamps])
        write_segment(tmp_path, number, table, bridge="b", last_canary_ms=None, tail=tail)
        tail = tail_of(table, tail)
        known = bridge_position(tmp_path)
        assert known is not None and known.tail == tail, "a restarted bridge continues the numbering"
        found.append(positions(read_segment(tmp_path / f"{number:012d}.arrow")).tolist())
    assert found == [[0, 1, 0], [1], [2, 3, 0], [0]]
