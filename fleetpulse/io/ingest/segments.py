"""Segments: what the bridge received, a numbered Arrow file each, durable before anything is acknowledged.

Rule 1: a segment is whole or absent: written aside, synced, renamed, and its folder synced.
Rule 2: the newest segment is the bridge's whole memory: where it stands is in its metadata and its last row.
Rule 3: a number is given once: who writes a segment whose number is taken has lost its place to another, and learns it.
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
    ]
)
_BEFORE: Final = pa.schema([field for field in SEGMENT_SCHEMA if field.name != "refused"])  # read as if none had been


class SegmentRow(NamedTuple):
    """A row of a segment, in the order of `SEGMENT_SCHEMA`.

    Attributes:
        received_at_ms: when the bridge had it, epoch milliseconds.
        topic: where it was published.
        payload: its bytes.
        origin: the door, see `Origin`.
        recording: id of the recording it was played from.
        line: its line there, from 0.
        command: name of the command's file.
        refused: why the bridge refuses it, in one word: it goes to quarantine whatever it says.
    """

    received_at_ms: int
    topic: str
    payload: bytes
    origin: str
    recording: str | None = None
    line: int | None = None
    command: str | None = None
    refused: str | None = None


assert list(SegmentRow._fields) == SEGMENT_SCHEMA.names, "rows are written as they are declared"
Tail = tuple[int, int]  # the last ``received_at_ms`` of a bridge's rows, and how many of them share it
_NAME: Final = re.compile(r"(\d{12})\.arrow")


@dataclass(frozen=True, slots=True)
class BridgeOffset:
    """Where a bridge stands: the last row of its newest segment, and what the segment says beside it.

    Attributes:
        number: of the segment.
        received_at_ms: of its last row.
        recording: the recording that the last row belongs to; None where it is live.
        line: the newest line of it that is durable.
        ended: whether that is the line after its last.
        last_canary_ms: ``received_at`` of the newest canary that came back; None since a recording was played, or at first.
        gap_open: whether the newest gap row opened one.
        played: the recording that was last played to its end.
        shared: sites that other bridges take.
        fence: whether landing wrote the segment, since the bridge was not heard of.
        left_open: bridges that do not listen, as a recording says that has not ended.
        gap_rows: bridges of which a recording has a gap row at the instant of the last row.
        tail: see `tail_of`.
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


class SegmentTakenError(Exception):
    """A segment's number is taken: another wrote it, since this bridge was not heard of."""


def rows_table(rows: Sequence[SegmentRow]) -> pa.Table:
    """Return rows as a table of `SEGMENT_SCHEMA`."""
    return columns_table(list(zip(*rows, strict=True)))


def columns_table(columns: Sequence[Sequence[Any]]) -> pa.Table:
    """Return columns of Python's values as a table of `SEGMENT_SCHEMA`."""
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
    """Write a segment and return its path when it would survive a loss of power.

    Args:
        directory: the bridge's folder.
        number: the segment's, one more than the newest.
        table: at least one row of `SEGMENT_SCHEMA`, in order of ``received_at_ms``.
        bridge: the bridge's name.
        last_canary_ms: ``received_at`` of the newest canary that came back.
        gap_open: whether a gap is open after the last row.
        played: the recording that was last played to its end.
        shared: sites that other bridges take.
        fence: whether it is written in the bridge's place.
        left_open: bridges that do not listen, as a recording says that has not ended.
        gap_rows: bridges of which a recording has a gap row at the instant of the last row.
        tail: of the segments before it.

    Raises:
        OSError: the disk is full, or refuses; nothing is left behind.
        SegmentTakenError: there is a segment of this number.
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
    aside = path.with_suffix(
        f".{os.getpid()}.{'fence' if fence else 'tmp'}"
    )  # one's own, also beside another process of the same bridge
    try:
        _write_synced(aside, table.cast(SEGMENT_SCHEMA).replace_schema_metadata(metadata))
        os.link(aside, path)  # unlike a rename it does not replace what is there
        aside.unlink()
        sync_folder(directory)
    except FileExistsError:
        aside.unlink(missing_ok=True)
        raise SegmentTakenError(f"segment {number} of {bridge} was written by another") from None
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return path


def _before(table: pa.Table, tail: Tail | None) -> int:
    """Return how many rows of earlier segments share the first row's ``received_at_ms``."""
    return tail[1] if tail is not None and table["received_at_ms"][0].as_py() == tail[0] else 0


def tail_of(table: pa.Table, tail: Tail | None) -> Tail:
    """Return the last ``received_at_ms`` of a bridge's rows, and how many of them share it.

    Args:
        table: of its newest segment.
        tail: of the segments before that.
    """
    received = table["received_at_ms"].to_numpy()
    count = len(received) - int(np.searchsorted(received, received[-1]))
    return int(received[-1]), count + (_before(table, tail) if count == len(received) else 0)


def positions(segment: pa.Table) -> NDArray[np.int64]:
    """Return of each row of a segment how many rows of its bridge before it share its ``received_at_ms``.

    Args:
        segment: as `read_segment` returns it.
    """
    received = segment["received_at_ms"].to_numpy()
    before = int((segment.schema.metadata or {}).get(b"before") or 0)
    return runs(received, before)


def runs(received_ms: NDArray[np.int64], before: int = 0) -> NDArray[np.int64]:
    """Return of each row how many rows before it share its instant, those of the first instant ``before`` more."""
    places = np.arange(len(received_ms))
    fresh = np.ones(len(received_ms), bool)
    fresh[1:] = received_ms[1:] != received_ms[:-1]
    begun = np.maximum.accumulate(np.where(fresh, places, 0))
    return places - begun + np.where(begun == 0, before, 0)


def _write_synced(path: Path, table: pa.Table) -> None:
    with path.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """Return number and path of each segment, in order; none where the folder is not there.

    Raises:
        FleetError: an Arrow file lies there that is not named as a segment.
    """
    found: list[tuple[int, Path]] = []
    for path in directory.glob("*.arrow"):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise FleetError(
                f'"{path}" is not a segment; they are named 000000000001.arrow and so on; move it elsewhere',
                code="segment-name-invalid",
            )
        found.append((int(named[1]), path))
    return sorted(found)


def commands_in(directory: Path, number: int) -> set[str] | None:
    """Return the names of the command files whose rows a segment has; None where it is gone.

    Raises:
        FleetError: it cannot be read.
    """
    try:
        named = read_segment(directory / f"{number:012d}.arrow")["command"]
    except FileNotFoundError:
        return None
    return {name for name in named.to_pylist() if name is not None}


def remove_leftovers(directory: Path, *, fences: bool = False) -> int:
    """Remove what who was killed was still writing; return how many files.

    Args:
        directory: the bridge's folder.
        fences: those of landing, which alone may ask for it; otherwise the bridge's, likewise.
    """
    leftovers = list(directory.glob("*.fence" if fences else "*.tmp"))
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def read_segment(path: Path) -> pa.Table:
    """Read a segment.

    Raises:
        FleetError: it is torn, or not a segment of ours.
        FileNotFoundError: it is gone.
    """
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        raise FleetError(
            f'segment "{path}" is torn or not Arrow ({error}); restore it from a backup, or move it elsewhere and do without '
            f"the rows that it held",
            code="segment-damaged",
        ) from None
    if table.schema.equals(_BEFORE):
        table = table.append_column(SEGMENT_SCHEMA.field("refused"), pa.nulls(table.num_rows, pa.string()))
    if not table.schema.equals(SEGMENT_SCHEMA) or b"number" not in (table.schema.metadata or {}) or not table.num_rows:
        raise FleetError(
            f'"{path}" is Arrow but not a segment of this version; move it elsewhere', code="segment-version-unsupported"
        )
    return table


def position(directory: Path) -> BridgeOffset | None:
    """Return where the bridge stands by its newest segment; None where there is none.

    Raises:
        FleetError: the newest segment cannot be read.
    """
    segments = list_segments(directory)
    if not segments:
        return None
    number, path = segments[-1]
    table = read_segment(path)
    said = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    last = table.slice(table.num_rows - 1).to_pylist()[0]
    canary = said.get("last_canary_ms")
    return BridgeOffset(
        number=number,
        received_at_ms=last["received_at_ms"],
        recording=last["recording"],
        line=last["line"],
        ended=is_end(last["origin"], last["topic"], last["recording"]),
        last_canary_ms=int(canary) if canary else None,
        gap_open=bool(said.get("gap_open")),
        played=said.get("played") or None,
        shared=frozenset(json.loads(said.get("shared") or "[]")),
        fence=bool(said.get("fence")),
        left_open=frozenset(json.loads(said.get("left_open") or "[]")),
        gap_rows=frozenset(json.loads(said.get("gap_rows") or "[]")),
        tail=tail_of(table, (table["received_at_ms"][0].as_py(), int(said.get("before") or 0))),
    )
