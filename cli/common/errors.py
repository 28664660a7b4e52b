"""Errors that a command reports by one sentence, and their codes."""

from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.corruption import DamagedError, corruption_message
from fleetpulse.io.system.fsync import is_disk_full


def expected_error(error: BaseException) -> FleetError | None:
    """Return the error to report, also for a full disk or a damaged file; None for a bug."""
    if isinstance(error, FleetError):
        return error
    if is_disk_full(error):
        where = f' ("{error.filename}")' if isinstance(error, OSError) and error.filename else ""
        return FleetError(
            f"the disk is full{where}; free some space, as ./fleet maintain does, and run the command again", code="disk-full"
        )
    why = corruption_message(error)
    return None if why is None else DamagedError("a table or file that the command needs", why)
