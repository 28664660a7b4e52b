"""What maintenance is told and what it tells: for how long what is kept, and what was done."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fleetpulse.core.times import format_instant
from fleetpulse.io.system.fsync import no_room

AHEAD_MS: Final = 3_600_000  # rows land while it works, and clocks differ a little: that is not worth a word
FULL: Final = "left for the next time: the disk is full"
BUSY: Final = "left for the next time: others were writing"


@dataclass(frozen=True, slots=True)
class Keep:
    """For how long what is kept, in milliseconds; None for ever. See the settings ``keep_...``."""

    messages_ms: int | None
    quarantine_ms: int | None
    stream_health_ms: int | None
    summaries_ms: int | None
    late_ms: int | None
    device_snapshots_ms: int | None
    quality_ms: int | None
    logs_ms: int | None
    replaced_ms: int
    generations_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done, or that a dry run would do.

    Attributes:
        table: or what else it was done to.
        did: remove (rows), join (small files), checkpoint (the log), delete (files, and the log's old versions), hold.
        files: how many went, or were joined.
        size_bytes: of them.
        rows: that were removed, or written again.
        note: what is worth knowing of it.
    """

    table: str
    did: str
    files: int = 0
    size_bytes: int = 0
    rows: int = 0
    note: str = ""


def ahead(newest_ms: int) -> str:
    """Say that the newest row's age is not what others are counted from."""
    return f"the newest is of {format_instant(newest_ms)}, which lies ahead, so ages count back from now"


def since(note: str, newest_ms: int, now_ms: int) -> str:
    """Return a note with that said, where it is so."""
    return f"{note}; {ahead(newest_ms)}" if newest_ms > now_ms + AHEAD_MS else note


def as_room_allows(table: str, steps: Iterator[Step]) -> Iterator[Step]:
    """Do steps that write; where the disk is full they wait for the next time, since what is deleted behind them makes room."""
    try:
        yield from steps
    except Exception as error:
        if not no_room(error):
            raise
        yield Step(table, "hold", note=FULL)
