"""Begin of a stream's checkpoint, and end of a rebuild, by the versions of bronze that its state depends on.

Rule 1: without a checkpoint, a stream begins at the version of bronze at which the lifecycle job continues. Sessions
begin with their snapshot if there is one, also after the stream was off.
Rule 2: the rows from the begin of a rebuild on are read again, and those of its table are not written twice.
"""

from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.checkpoints.stream_rebuild import (
    StreamBegin,
    end_rebuild,
    finish,
    read_begin,
    read_rebuild,
    read_span,
    rebuild,
    write_begin,
)
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.readers import batch_ends, state_begin


def begin_of(home: Home, name: StreamName) -> int:
    """Return the version of bronze at which a stream's checkpoint begins; record it if it has no batch yet.

    Raises:
        FleetError: the snapshot of the stream cannot be read.
    """
    checkpoint = home.stream_checkpoint(name)
    finish(checkpoint)
    if committed_batches(checkpoint):
        return 0  # its offsets determine the version
    if (begun := read_begin(checkpoint)) is not None:
        return begun.begin
    if (continued := _continue_from_snapshot(home, name)) is not None:
        return continued.begin
    ends = batch_ends(home.checkpoint)
    begin = min(ends[0], DeltaLog(home.table(MESSAGES.name)).latest()) if ends else 0
    write_begin(checkpoint, StreamBegin(begin))
    return begin


def rebuild_stream(home: Home, name: StreamName) -> StreamBegin:
    """Replace the checkpoint of a stream by one that reads the rows again that its state depends on.

    Args:
        home: home of the stream; the caller holds its state.
        name: the stream.

    Returns:
        Begin of the new checkpoint.

    Raises:
        FleetError: the stream has not begun, or its offsets or its snapshot are damaged.
    """
    checkpoint = home.stream_checkpoint(name)
    finish(checkpoint)
    if (continued := _continue_from_snapshot(home, name)) is not None:
        return continued
    has_batch = bool(committed_batches(checkpoint))
    if has_batch and name is StreamName.SESSIONS:
        raise FleetError(
            f'the stream "{name}" has a checkpoint without a snapshot beside it; restore the snapshot from a backup, or remove '
            f'"{checkpoint}": the stream then begins at the present, and sessions that are open in its table stay open',
            code="stream-not-rebuildable",
        )
    log = DeltaLog(home.table(MESSAGES.name))
    begin = state_begin(log, checkpoint)
    if not has_batch or begin is None or read_span(checkpoint) is None:
        raise FleetError(
            f'the stream "{name}" of "{home.path}" has no committed batch, so there is no state to rebuild; start it with the '
            f"setting streams",
            code="stream-not-begun",
        )
    found = StreamBegin(begin, log.latest() + 1)
    rebuild(checkpoint, found)
    return found


def _continue_from_snapshot(home: Home, name: StreamName) -> StreamBegin | None:
    """Replace the checkpoint of the sessions by one that begins with their snapshot; None without a snapshot."""
    if name is not StreamName.SESSIONS:
        return None
    from fleetpulse.io.streams.session_snapshot import begin_from, read_snapshot

    if (snapshot := read_snapshot(home)) is None:
        return None
    found = begin_from(home, snapshot)
    rebuild(home.stream_checkpoint(name), found, snapshot)
    return found


def end_finished_rebuild(home: Home, name: StreamName) -> None:
    """End the rebuild of a stream if nothing that it still keeps was read before the rebuild."""
    checkpoint = home.stream_checkpoint(name)
    if (rebuilt := read_rebuild(checkpoint)) is None:
        return
    oldest = state_begin(DeltaLog(home.table(MESSAGES.name)), checkpoint)
    if oldest is not None and oldest >= rebuilt.through:
        end_rebuild(checkpoint)
