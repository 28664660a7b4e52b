"""Recordings: a small file cannot fill the memory, whatever it expands to."""

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpulse.io.ingest.recording import MAX_LINE_BYTES, inspect, read
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
LINE = b'{"received_at_ms": 1700000000000, "topic": "fleet/s/d/heartbeat", "payload": {}}'


@pytest.mark.parametrize("reader", [inspect, lambda path: list(read(path))], ids=["inspect", "read"])
def test_a_small_file_that_expands_to_an_endless_line_is_refused_with_bounded_memory(
    reader: Callable[[Path], object], tmp_path: Path
) -> None:
    bomb, zeros = tmp_path / "bomb.ndjson.gz", bytes(1 << 20)
    with gzip.open(bomb, "wb") as file:
        file.write(LINE + b"\n")
        for _ in range(40):
            file.write(zeros)
    assert bomb.stat().st_size < 50_000
    tracemalloc.start()
    try:
        with refused("recording-line-too-long", match=r'line 2 of ".*bomb.ndjson.gz".*8,388,608 bytes'):
            reader(bomb)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()


def test_the_longest_line_is_read_and_one_more_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.ndjson"
    path.write_bytes(LINE.ljust(MAX_LINE_BYTES - 1) + b"\n" + LINE)
    assert inspect(path).lines == 2
    path.write_bytes(LINE.ljust(MAX_LINE_BYTES) + b"\n")
    with refused("recording-line-too-long", match="line 1 of"):
        inspect(path)


def test_a_line_of_endless_depth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.ndjson"
    path.write_bytes(b"[" * 200_000 + b"\n")
    with refused("recording-line-invalid"):
        inspect(path)
