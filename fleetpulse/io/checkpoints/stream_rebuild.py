"""Rebuilds of the state of streams: a new checkpoint that reads a recent part of bronze again.

The state of a stream is a function of the last rows of bronze: those of a span that the stream names, such as its
longest window. So a rebuild replaces a checkpoint that is damaged, or has an unsuitable number of partitions.

Rule 1: a rebuild is the renaming of two folders. If it is interrupted between them, `finish` completes it.
Rule 2: rows that the table has already are not written again: the sink compares keys until the stream has read
beyond the former position by its span.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fleetpulse.io.checkpoints.streams import next_versions
from fleetpulse.io.system.fsync import atomic_write, sync_folder

_RECORD: Final = "rebuild.json"
_SPAN: Final = "span.json"
_NEW, _OLD = ".new", ".before"


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Record of a rebuild in its new checkpoint.

    Attributes:
        begin: version of bronze from which the stream reads again.
        through: version at which the former checkpoint would have continued.
    """

    begin: int
    through: int


def write_span(checkpoint: Path, span_ms: int) -> None:
    """Record how long rows of bronze have an effect on the state of a stream, unless a longer span is recorded.

    Args:
        checkpoint: folder of the stream's checkpoint; a missing folder is created.
        span_ms: span of ``received_at``, milliseconds.
    """
    if span_ms > (read_span(checkpoint) or 0):
        checkpoint.mkdir(parents=True, exist_ok=True)
        atomic_write(checkpoint / _SPAN, json.dumps({"span_ms": span_ms}))


def read_span(checkpoint: Path) -> int | None:
    """Return the span that `write_span` has recorded; None if there is none."""
    try:
        return int(json.loads((checkpoint / _SPAN).read_text())["span_ms"])
    except FileNotFoundError:
        return None


def read_rebuild(checkpoint: Path) -> Rebuild | None:
    """Return the record of an unfinished rebuild; None if there is none."""
    try:
        return Rebuild(**json.loads((checkpoint / _RECORD).read_text()))
    except FileNotFoundError:
        return None


def end_rebuild(checkpoint: Path) -> None:
    """Remove the record: the stream has read beyond everything that its table had."""
    (checkpoint / _RECORD).unlink(missing_ok=True)


def rebuild(checkpoint: Path, begin: int) -> Rebuild:
    """Replace a checkpoint by an empty one that begins at a version of bronze.

    The former checkpoint is kept beside it, until the next rebuild.

    Args:
        checkpoint: folder of the checkpoint; its stream must not run.
        begin: version from which the stream reads again.
    """
    before = read_rebuild(checkpoint)
    through = max([*next_versions(checkpoint), before.through if before else 0, begin])
    fresh = checkpoint.with_name(f"{checkpoint.name}{_NEW}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    found = Rebuild(begin, through)
    span_ms = read_span(checkpoint)
    if span_ms is not None:
        write_span(fresh, span_ms)
    atomic_write(fresh / _RECORD, json.dumps(asdict(found)))
    set_aside(checkpoint)
    finish(checkpoint)
    return found


def set_aside(checkpoint: Path) -> None:
    """Move a checkpoint beside its place, where the next one replaces it; no-op without a checkpoint."""
    if not checkpoint.exists():
        return
    kept = checkpoint.with_name(f"{checkpoint.name}{_OLD}")
    shutil.rmtree(kept, ignore_errors=True)
    checkpoint.rename(kept)
    sync_folder(checkpoint.parent)


def finish(checkpoint: Path) -> None:
    """Complete a rebuild that was interrupted between its two renames; undo one that was interrupted before them."""
    fresh = checkpoint.with_name(f"{checkpoint.name}{_NEW}")
    if checkpoint.exists():
        shutil.rmtree(fresh, ignore_errors=True)
    elif (fresh / _RECORD).exists():
        fresh.rename(checkpoint)
        sync_folder(checkpoint.parent)
