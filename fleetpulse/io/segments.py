"""Segments: what the bridge had in its hands, raw, in files that are whole or not there.

Rule: a segment has its name only when its bytes, and the folder's entry, have reached the disk.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from fleetpulse.core.envelope import TOPIC_PREFIX
from fleetpulse.core.errors import FleetError

SEGMENT_SCHEMA: Final = pa.schema(
    [
        ("received_at_ms", pa.int64()),
        ("topic", pa.string()),
        ("payload", pa.binary()),
        ("origin", pa.string()),
        ("recording", pa.string()),
        ("line", pa.int64()),
        ("command", pa.string()),
    ]
)
_SUFFIX: Final = ".arrow"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a bridge stands: the last row of its newest segment.

    Attributes:
        number: of the segment.
        received_at_ms: of its last row.
        recording: the recording that was being played; None where none was.
        line: the last line of it that was written.
        ended: whether that was the line after its last.
        last_canary_ms: when the last canary came back; None where none has.
    """

    number: int
    received_at_ms: int
    recording: str | None
    line: int | None
    ended: bool
    last_canary_ms: int | None


def write_segment(directory: Path, number: int, rows: pa.Table, *, bridge: str, last_canary_ms: int | None) -> Path:
    """Write one segment so that it survives whatever comes next.

    Args:
        directory: the bridge's folder.
        number: the segment's, one more than the newest.
        rows: columns of `SEGMENT_SCHEMA`.
        bridge: the bridge's name.
        last_canary_ms: when its last canary came back.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    canary = "" if last_canary_ms is None else str(last_canary_ms)
    schema = SEGMENT_SCHEMA.with_metadata({"bridge": bridge, "number": str(number), "last_canary_ms": canary})
    path = directory / f"{number:012d}{_SUFFIX}"
    fresh = directory / f".{path.name}.new"
    try:
        with fresh.open("wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                writer.write_table(rows.cast(schema))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    _sync_folder(directory)
    return path


def _sync_folder(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """Return number and path of each segment, oldest first."""
    return sorted((int(path.stem), path) for path in directory.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def read_segment(path: Path) -> pa.Table:
    """Read one segment.

    Raises:
        FleetError: it is damaged, or not a segment.
    """
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            return reader.read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise FleetError(
            f'the segment "{path}" cannot be read ({error}); move it out of the folder to go on without its rows'
        ) from None


def position(directory: Path) -> Position | None:
    """Return where the bridge of a folder stands; None where it has written nothing. Leftovers of a crash are removed."""
    for leftover in directory.glob(f".*{_SUFFIX}.new"):
        leftover.unlink(missing_ok=True)
    segments = list_segments(directory)
    if not segments:
        return None
    number, path = segments[-1]
    rows = read_segment(path)
    last = rows.slice(rows.num_rows - 1).to_pylist()[0]
    canary = (rows.schema.metadata or {}).get(b"last_canary_ms", b"")
    ended = last["recording"] is not None and last["topic"].startswith(TOPIC_PREFIX)
    return Position(
        number, last["received_at_ms"], last["recording"], last["line"], ended, int(canary) if canary else None
    )
