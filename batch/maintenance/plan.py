"""Inputs and outputs of maintenance: retention times, and the steps done."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fleetpulse.core.times import HOUR_MS, format_instant
from fleetpulse.io.system.fsync import is_disk_full

AHEAD_MS: Final = HOUR_MS  # lead of the newest row that is not reported: rows land while maintenance runs, and clocks differ
FULL: Final = "postponed to the next run: the disk is full"
BUSY: Final = "postponed to the next run: another writer changed the table"


@dataclass(frozen=True, slots=True)
class Keep:
    """Retention times in milliseconds, see the settings ``keep_...``; None: for ever."""

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
    audit_ms: int | None = None
    sessions_ms: int | None = None
    vitals_ms: int | None = None
    commands_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One maintenance step that was done, or that a dry run would do.

    Attributes:
        table: table, or other object of the step, such as ``logs``.
        did: remove (rows), join (small files), keep (facts of the devices), checkpoint (of the log),
            delete (files, and old versions of the log), aside (rotate a log), hold (nothing done, reason in `note`).
        files: number of files deleted or joined.
        size_bytes: total size of these files.
        rows: number of rows removed or rewritten.
        note: details for display.
    """

    table: str
    did: str
    files: int = 0
    size_bytes: int = 0
    rows: int = 0
    note: str = ""


def ahead(newest_ms: int) -> str:
    """Describe a newest row in the future, which is not used as reference for ages."""
    return f"the newest row is of {format_instant(newest_ms)}, in the future, so ages are relative to now"


def since(note: str, newest_ms: int, now_ms: int) -> str:
    """Return a note, extended by `ahead` if the newest row is in the future."""
    return f"{note}; {ahead(newest_ms)}" if newest_ms > now_ms + AHEAD_MS else note


def unless_disk_full(table: str, steps: Iterator[Step]) -> Iterator[Step]:
    """Run steps that write; postpone them to the next run if the disk is full.

    Later steps delete files, and so free disk space.
    """
    try:
        yield from steps
    except Exception as error:
        if not is_disk_full(error):
            raise
        yield Step(table, "hold", note=FULL)
