"""Snapshot of the stream ``sessions``: the open sessions of all devices at a version of bronze, beside the checkpoint.

Rule 1: the stream writes it with its first batch, and with the first batch of each hour of ``received_at``, after the
table has the rows of that batch. It stays when the checkpoint is damaged, removed or set aside.
Rule 2: a new checkpoint begins with a copy of it. The stream reads bronze at or before its version, and skips the
rows that the snapshot includes: if it reads earlier versions, those up to the newest instant of the snapshot.
Rule 3: rows that retention has removed since the snapshot are counted, and reported as a problem.
"""

from collections.abc import Sequence
from pathlib import Path

from fleetpulse.columnar.streams.sessions import SessionGroup, stored_metadata
from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.stream_rebuild import StreamBegin, read_begin
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.tables.row_accounting import landed_before, landed_before_oldest
from fleetpulse.io.tables.tables import newest


def write_snapshot(home: Home, states: Sequence[bytes], version: int) -> None:
    """Replace the snapshot.

    Args:
        home: home of the stream.
        states: stored states of all key groups after one batch.
        version: version of bronze at which the batch ends.
    """
    rows = landed_before(DeltaLog(home.table(MESSAGES.name)), version)
    joined = SessionGroup.joined([SessionGroup.from_bytes(one) for one in states])
    atomic_write(_path(home), joined.to_bytes({"version": version, "rows": rows}))


def read_snapshot(home: Home) -> bytes | None:
    """Return the snapshot for a new checkpoint; None if the stream has written none."""
    try:
        return _path(home).read_bytes()
    except FileNotFoundError:
        return None


def begin_from(home: Home, snapshot: bytes) -> StreamBegin:
    """Return the begin of a checkpoint that continues from a snapshot.

    Raises:
        FleetError: the snapshot is damaged, or has an unknown format version.
    """
    try:
        SessionGroup.from_bytes(snapshot)
        known = stored_metadata(snapshot)
        version, rows = int(known["version"]), known["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'the snapshot "{_path(home)}" is damaged ({error!r}); restore it from a backup, or remove it: the stream then '
            f"begins at the present, and sessions that are open in its table stay open",
            code="session-snapshot-damaged",
        ) from None
    log = DeltaLog(home.table(MESSAGES.name))
    begin = min(log.readable_since(version), log.latest() + 1)
    missed: int | None = 0
    if begin > version:
        landed = landed_before_oldest(newest(home, MESSAGES))
        missed = None if landed is None or rows is None else landed - rows
    return StreamBegin(begin, log.latest() + 1, missed)


def begins_before(checkpoint: Path, state: Path) -> bool:
    """Return whether a checkpoint reads bronze from before the version of the snapshot with which it begins.

    Args:
        checkpoint: folder of the checkpoint.
        state: its copy of the snapshot.
    """
    begun = read_begin(checkpoint)
    return begun is None or begun.begin < int(stored_metadata(state.read_bytes())["version"])


def _path(home: Home) -> Path:
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    return checkpoint.with_name(f"{checkpoint.name}.state")
