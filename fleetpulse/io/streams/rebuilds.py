"""Begin and end of the rebuild of a stream, by the versions of bronze that its state depends on."""

from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.stream_rebuild import Rebuild, end_rebuild, finish, read_rebuild, read_span, rebuild
from fleetpulse.io.checkpoints.streams import next_versions
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.adaptive_batching import first_version_since


def rebuild_stream(home: Home, name: StreamName) -> Rebuild:
    """Replace the checkpoint of a stream by one that reads the rows again that its state depends on.

    Args:
        home: home of the stream; the caller holds its state.
        name: the stream.

    Returns:
        Versions of bronze at which the stream begins, and up to which it had read.

    Raises:
        FleetError: the stream has not begun, or its offsets are damaged.
    """
    checkpoint = home.stream_checkpoint(name)
    finish(checkpoint)
    versions, span_ms = next_versions(checkpoint), read_span(checkpoint)
    if versions and span_ms is None:
        raise FleetError(
            f'the state of the stream "{name}" does not follow from a recent part of bronze; restore "{checkpoint}" from a '
            f"backup, or remove it: the stream then begins at the present",
            code="stream-not-rebuildable",
        )
    if not versions or span_ms is None:
        raise FleetError(
            f'the stream "{name}" of "{home.path}" has no committed batch, so there is no state to rebuild; start it with the '
            f"setting streams",
            code="stream-not-begun",
        )
    return rebuild(checkpoint, first_version_since(DeltaLog(home.table(MESSAGES.name)), min(versions), span_ms))


def end_finished_rebuild(home: Home, name: StreamName) -> None:
    """End the rebuild of a stream if nothing that it still keeps was read before the rebuild."""
    checkpoint = home.stream_checkpoint(name)
    if (rebuilt := read_rebuild(checkpoint)) is None or not (versions := next_versions(checkpoint)):
        return
    oldest = first_version_since(DeltaLog(home.table(MESSAGES.name)), min(versions), read_span(checkpoint) or 0)
    if oldest > rebuilt.through:
        end_rebuild(checkpoint)
