"""Begins of the checkpoints of streams: at the present, or by a rebuild of a state that the stream had before.

The state of a stream is a function of the last rows of bronze: those of a span that the stream names, such as its
longest window. A rebuild replaces a checkpoint that is damaged, or has an unsuitable number of partitions. Sessions
begin with a copy of their snapshot.

Rule 1: the version at which a checkpoint begins is recorded before its first batch. If that batch is interrupted, it
begins there again.
Rule 2: a rebuild is the renaming of two folders. If it is interrupted between them, `finish` completes it.
Rule 3: rows that the table has already are not written again: the sink compares keys until the stream has read
beyond the rows that had landed before the rebuild, by its span.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.streams import has_begun
from fleetpulse.io.system.fsync import atomic_write, sync_folder

_RECORD: Final = "begin.json"
_STATE: Final = "initial.arrow"
_SPAN: Final = "span.json"
_NEW, _OLD = ".new", ".before"


@dataclass(frozen=True, slots=True)
class StreamBegin:
    """Begin of a checkpoint, recorded in it.

    Attributes:
        begin: version of bronze from which the stream reads.
        through: version of bronze before which rows may have had an effect on the table; 0 without a rebuild, and
            after its end.
        missed: number of rows of bronze that the stream has not read, because retention removed them; None if the
            number is unknown.
    """

    begin: int
    through: int = 0
    missed: int | None = 0


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
    """Return the span that `write_span` has recorded; None if there is none.

    Raises:
        FleetError: the record is damaged.
    """
    try:
        return int(json.loads((checkpoint / _SPAN).read_text())["span_ms"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _damaged(checkpoint / _SPAN, error) from None


def write_begin(checkpoint: Path, begin: StreamBegin) -> None:
    """Record the begin of a checkpoint; a missing folder is created."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    atomic_write(checkpoint / _RECORD, json.dumps(asdict(begin)))


def read_begin(checkpoint: Path) -> StreamBegin | None:
    """Return the begin of a checkpoint; None if none is recorded.

    Raises:
        FleetError: the record is damaged.
    """
    try:
        return StreamBegin(**json.loads((checkpoint / _RECORD).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(checkpoint / _RECORD, error) from None


def read_rebuild(checkpoint: Path) -> StreamBegin | None:
    """Return the begin of a checkpoint whose rebuild has not ended; None otherwise."""
    found = read_begin(checkpoint)
    return found if found is not None and found.through else None


def end_rebuild(checkpoint: Path) -> None:
    """Record that the stream has read beyond everything that had an effect on its table before."""
    if (found := read_rebuild(checkpoint)) is not None:
        write_begin(checkpoint, replace(found, through=0))


def initial_state(checkpoint: Path) -> Path | None:
    """Return the file of the state with which a checkpoint begins; None if it begins without one."""
    path = checkpoint / _STATE
    return path if path.exists() else None


def rebuild(checkpoint: Path, begin: StreamBegin, state: bytes | None = None) -> None:
    """Replace a checkpoint by one without a batch; a missing one is created.

    The former checkpoint is kept beside it, until the next one is set aside.

    Args:
        checkpoint: folder of the checkpoint; its stream must not run.
        begin: begin of the new checkpoint.
        state: state with which it begins; None for none.
    """
    fresh = checkpoint.with_name(f"{checkpoint.name}{_NEW}")
    shutil.rmtree(fresh, ignore_errors=True)
    if (span_ms := read_span(checkpoint)) is not None:
        write_span(fresh, span_ms)
    if state is not None:
        fresh.mkdir(parents=True, exist_ok=True)
        atomic_write(fresh / _STATE, state)
    write_begin(fresh, begin)
    set_aside(checkpoint)
    finish(checkpoint)


def set_aside(checkpoint: Path) -> None:
    """Move a checkpoint beside its place, where the next one replaces it; one without a batch is removed."""
    if not has_begun(checkpoint):
        shutil.rmtree(checkpoint, ignore_errors=True)
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


def _damaged(record: Path, error: Exception) -> FleetError:
    return FleetError(
        f'the record "{record}" of a stream cannot be read ({error!r}); restore the checkpoint, or remove its folder: the stream '
        f"then begins at the present, or with its snapshot",
        code="checkpoint-damaged",
    )
