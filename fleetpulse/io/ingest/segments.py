"""Segments: numbered Arrow files of messages, durable before acknowledgement.

Rule 1: a segment is complete or absent. It is written to a temporary file, synced, linked under its
name, and its folder is synced.
Rule 2: the newest segment is the only memory of the bridge. Its metadata and its last row are the
position of the bridge.
Rule 3: a number is used once. A writer whose number is taken was fenced, and gets an error.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.replay_envelope import is_end
from fleetpulse.io.system.fsync import sync_folder

SEGMENT_SCHEMA: Final = pa.schema(
    [
        ("received_at_ms", pa.int64()),
        ("topic", pa.string()),
        ("payload", pa.binary()),
        ("origin", pa.string()),  # mqtt, replay, command or bridge
        ("recording", pa.string()),
        ("line", pa.int64()),
        ("command", pa.string()),
        ("refused", pa.string()),
        ("payload_bytes", pa.int64()),
        ("payload_digest", pa.int64()),
        ("messages", pa.int64()),
    ]
)
_FIRST_COLUMNS: Final = 7  # in segments of all versions; a later column that a segment lacks is read as nulls


class SegmentRow(NamedTuple):
    """Row of a segment, in the order of `SEGMENT_SCHEMA`.

    Attributes:
        received_at_ms: time at which the bridge received the message, epoch milliseconds.
        topic: topic of the message.
        payload: bytes of the payload.
        origin: source of the message, see `Origin`.
        recording: id of the recording from which the message was replayed.
        line: line in the recording, from 0.
        command: file name of the command.
        refused: reason in one word if the bridge refuses the message, which is then quarantined
            whatever its content.
        payload_bytes: size of the payload as received, if the bridge cut it; None if it is whole.
        payload_digest: `digest64` of the payload as received, if the bridge cut it.
        messages: number of messages that a refused row counts, if there are several.
    """

    received_at_ms: int
    topic: str
    payload: bytes
    origin: str
    recording: str | None = None
    line: int | None = None
    command: str | None = None
    refused: str | None = None
    payload_bytes: int | None = None
    payload_digest: int | None = None
    messages: int | None = None


assert list(SegmentRow._fields) == SEGMENT_SCHEMA.names, "the fields of SegmentRow must match SEGMENT_SCHEMA"
Tail = tuple[int, int]  # last ``received_at_ms`` of a bridge's rows, and the number of rows that share it
_NAME: Final = re.compile(r"(\d{12})\.arrow")


@dataclass(frozen=True, slots=True)
class BridgePosition:
    """Position of a bridge: last row and metadata of its newest segment.

    Attributes:
        number: number of the segment.
        received_at_ms: ``received_at`` of the last row, epoch milliseconds.
        recording: recording of the last row; None for a live row.
        line: newest durable line of the recording.
        ended: whether the last row marks the end of the recording.
        last_canary_ms: ``received_at`` of the newest canary that returned, epoch milliseconds; None
            at first and after a replay.
        gap_open: whether the newest gap row opened a coverage gap.
        played: recording that was last replayed to its end.
        shared: sites that other bridges serve.
        fence: whether landing wrote the segment to fence the bridge.
        left_open: bridges with an open gap in a recording that has not ended.
        gap_rows: bridges with a gap row of a recording at the instant of the last row.
        tail: last instant of the rows and the number of rows that share it, see `tail_of`.
    """

    number: int
    received_at_ms: int
    recording: str | None = None
    line: int | None = None
    ended: bool = False
    last_canary_ms: int | None = None
    gap_open: bool = False
    played: str | None = None
    shared: frozenset[str] = frozenset()
    fence: bool = False
    left_open: frozenset[str] = frozenset()
    gap_rows: frozenset[str] = frozenset()
    tail: Tail | None = None


class BridgeFencedError(Exception):
    """The number of a segment is taken: landing fenced this bridge."""


def rows_table(rows: Sequence[SegmentRow]) -> pa.Table:
    """Return rows as a table of `SEGMENT_SCHEMA`."""
    return columns_table(list(zip(*rows, strict=True)))


def columns_table(columns: Sequence[Sequence[Any]]) -> pa.Table:
    """Return columns of Python values as a table of `SEGMENT_SCHEMA`."""
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SEGMENT_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SEGMENT_SCHEMA)


def write_segment(
    directory: Path,
    number: int,
    table: pa.Table,
    *,
    bridge: str,
    last_canary_ms: int | None,
    gap_open: bool = False,
    played: str | None = None,
    shared: frozenset[str] = frozenset(),
    fence: bool = False,
    left_open: frozenset[str] = frozenset(),
    gap_rows: frozenset[str] = frozenset(),
    tail: Tail | None = None,
) -> Path:
    """Write a segment durably and return its path.

    Args:
        directory: folder of the bridge's segments.
        number: number of the segment, one more than the newest.
        table: at least one row of `SEGMENT_SCHEMA`, in order of ``received_at_ms``.
        bridge: name of the bridge.
        last_canary_ms: ``received_at`` of the newest canary that returned, epoch milliseconds.
        gap_open: whether a coverage gap is open after the last row.
        played: recording that was last replayed to its end.
        shared: sites that other bridges serve.
        fence: whether landing writes the segment to fence the bridge.
        left_open: bridges with an open gap in a recording that has not ended.
        gap_rows: bridges with a gap row of a recording at the instant of the last row.
        tail: tail of the earlier segments, see `tail_of`.

    Raises:
        OSError: the write failed, for example on a full disk; no file is left behind.
        BridgeFencedError: a segment of this number exists.
    """
    metadata = {
        "bridge": bridge,
        "number": str(number),
        "last_canary_ms": "" if last_canary_ms is None else str(last_canary_ms),
        "gap_open": "1" if gap_open else "",
        "played": played or "",
        "shared": json.dumps(sorted(shared)),
        "fence": "1" if fence else "",
        "left_open": json.dumps(sorted(left_open)),
        "gap_rows": json.dumps(sorted(gap_rows)),
        "before": str(_before(table, tail)),
    }
    path = directory / f"{number:012d}.arrow"
    temporary = path.with_suffix(
        f".{os.getpid()}.{'fence' if fence else 'tmp'}"
    )  # unique to this process, even if another process of the same bridge runs
    try:
        _write_synced(temporary, table.cast(SEGMENT_SCHEMA).replace_schema_metadata(metadata))
        os.link(temporary, path)  # unlike a rename, a link does not replace an existing file
        temporary.unlink()
        sync_folder(directory)
    except FileExistsError:
        temporary.unlink(missing_ok=True)
        raise BridgeFencedError(f"segment {number} of {bridge} was written by another process") from None
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _before(table: pa.Table, tail: Tail | None) -> int:
    """Return the number of rows of earlier segments with the first row's instant."""
    return tail[1] if tail is not None and table["received_at_ms"][0].as_py() == tail[0] else 0


def tail_of(table: pa.Table, tail: Tail | None) -> Tail:
    """Return the last ``received_at_ms`` of a bridge and the number of its rows.

    Args:
        table: table of the newest segment.
        tail: tail of the earlier segments.
    """
    received = table["received_at_ms"].to_numpy()
    count = len(received) - int(np.searchsorted(received, received[-1]))
    return int(received[-1]), count + (_before(table, tail) if count == len(received) else 0)


def positions(segment: pa.Table) -> NDArray[np.int64]:
    """Return the position of each row among the bridge's rows of the same instant.

    Args:
        segment: segment returned by `read_segment`.

    Returns:
        For each row, the number of earlier rows of the bridge with the same ``received_at_ms``.
    """
    received = segment["received_at_ms"].to_numpy()
    before = int((segment.schema.metadata or {}).get(b"before") or 0)
    return positions_within_instant(received, before)


def positions_within_instant(received_ms: NDArray[np.int64], before: int = 0) -> NDArray[np.int64]:
    """Return for each row the number of earlier rows with the same instant.

    Args:
        received_ms: instants of the rows, ascending.
        before: number of rows of the first instant that precede these rows.
    """
    places = np.arange(len(received_ms))
    fresh = np.ones(len(received_ms), bool)
    fresh[1:] = received_ms[1:] != received_ms[:-1]
    first = np.maximum.accumulate(np.where(fresh, places, 0))
    return places - first + np.where(first == 0, before, 0)


def _write_synced(path: Path, table: pa.Table) -> None:
    with path.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """Return number and path of each segment, in order; empty without a folder.

    Raises:
        FleetError: an Arrow file in the folder does not have the name of a segment.
    """
    found: list[tuple[int, Path]] = []
    for path in directory.glob("*.arrow"):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise FleetError(
                f'"{path}" is not a segment; expected a name such as 000000000001.arrow; move it elsewhere',
                code="segment-name-invalid",
            )
        found.append((int(named[1]), path))
    return sorted(found)


def commands_in(directory: Path, number: int) -> set[str] | None:
    """Return the command files with rows in a segment; None if it is missing.

    Raises:
        FleetError: the segment cannot be read.
    """
    try:
        named = read_segment(directory / f"{number:012d}.arrow")["command"]
    except FileNotFoundError:
        return None
    return {name for name in named.to_pylist() if name is not None}


def remove_leftovers(directory: Path, *, fences: bool = False) -> int:
    """Remove the unfinished files of a killed process; return their number.

    Args:
        directory: folder of the bridge's segments.
        fences: whether to remove the files of landing instead of the bridge's; each of the two
            processes may only remove its own files.
    """
    leftovers = list(directory.glob("*.fence" if fences else "*.tmp"))
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def read_segment(path: Path) -> pa.Table:
    """Read a segment.

    Raises:
        FleetError: the file is damaged or not a segment of this version.
        FileNotFoundError: the file is missing.
    """
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise FleetError(
            f'segment "{path}" is truncated or not Arrow ({error}); restore it from a backup, or move it elsewhere and lose '
            f"its rows",
            code="segment-damaged",
        ) from None
    if table.num_columns >= _FIRST_COLUMNS:
        for column in list(SEGMENT_SCHEMA)[table.num_columns :]:
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    if not table.schema.equals(SEGMENT_SCHEMA) or b"number" not in (table.schema.metadata or {}) or not table.num_rows:
        raise FleetError(
            f'"{path}" is an Arrow file but not a segment of this version; move it elsewhere', code="segment-version-unsupported"
        )
    return table


def bridge_position(directory: Path) -> BridgePosition | None:
    """Return the position of a bridge from its newest segment; None without one.

    Raises:
        FleetError: the newest segment cannot be read.
    """
    segments = list_segments(directory)
    if not segments:
        return None
    number, path = segments[-1]
    table = read_segment(path)
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    last = table.slice(table.num_rows - 1).to_pylist()[0]
    canary = metadata.get("last_canary_ms")
    return BridgePosition(
        number=number,
        received_at_ms=last["received_at_ms"],
        recording=last["recording"],
        line=last["line"],
        ended=is_end(last["origin"], last["topic"], last["recording"]),
        last_canary_ms=int(canary) if canary else None,
        gap_open=bool(metadata.get("gap_open")),
        played=metadata.get("played") or None,
        shared=frozenset(json.loads(metadata.get("shared") or "[]")),
        fence=bool(metadata.get("fence")),
        left_open=frozenset(json.loads(metadata.get("left_open") or "[]")),
        gap_rows=frozenset(json.loads(metadata.get("gap_rows") or "[]")),
        tail=tail_of(table, (table["received_at_ms"][0].as_py(), int(metadata.get("before") or 0))),
    )
