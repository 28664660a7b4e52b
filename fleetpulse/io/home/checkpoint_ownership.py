"""Whether a checkpoint is this home's own: on another's a job would wait for ever, or leave out rows that nobody judged.

Rule 1: a checkpoint goes on with a version of bronze that is there, or with the next one that comes.
Rule 2: a home has an id, and each checkpoint that was started in it says which. Where either has none it is from before
there were ids, and is taken as it is; the job writes the home's id into it when it starts.
"""

import json
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import begun, newest_begun
from fleetpulse.io.checkpoints.generations import checkpoint_of
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write

_MARK: Final = "home-id.json"
_CURE: Final = "restore the checkpoint that belongs here, or the whole home, from one backup, or name another with --home"


def require_own_if_read(home: Home, number: int) -> None:
    """Do as `require_own` does of a checkpoint that nobody goes on with: what cannot be read of it says nothing.

    Raises:
        FleetError: it is another home's, or behind the end of bronze.
    """
    try:
        marked_with(checkpoint_of(home.lifecycle, number))
        if begun(checkpoint_of(home.lifecycle, number)):
            newest_begun(checkpoint_of(home.lifecycle, number))
    except FleetError:
        return
    require_own(home, number)


def require_own(home: Home, number: int) -> None:
    """See that a generation's checkpoint is this home's; one that has not begun is.

    Args:
        home: the home.
        number: of the generation.

    Raises:
        FleetError: it is another home's, or goes on behind the end of bronze.
    """
    checkpoint = checkpoint_of(home.lifecycle, number)
    marked, ours = marked_with(checkpoint), home.id()
    if marked is not None and ours is not None and marked != ours:
        raise FleetError(
            f'the checkpoint of generation {number} of "{home.path}" is to be of this home, whose id is {ours}; '
            f"got one of the home {marked}; {_CURE}",
            code="checkpoint-foreign",
        )
    if not begun(checkpoint):
        return
    version, latest = newest_begun(checkpoint), DeltaLog(home.table(MESSAGES.name)).latest()
    if version > latest + 1:
        raise FleetError(
            f'the checkpoint of generation {number} of "{home.path}" is to go on with a version of bronze up to {latest + 1}, '
            f"the next one that comes; got version {version}: it is another home's, or bronze is older than it; {_CURE}",
            code="checkpoint-ahead-of-bronze",
        )


def mark_own(home: Home, number: int) -> None:
    """Write the home's id into a generation's checkpoint, which may not be there yet; no effect where it has one.

    Raises:
        FleetError: the system refuses.
    """
    checkpoint, ours = checkpoint_of(home.lifecycle, number), home.id()
    if ours is None or marked_with(checkpoint) is not None:
        return
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
        atomic_write(checkpoint / _MARK, json.dumps({"id": ours}))
    except OSError as error:
        raise FleetError(
            f'"{checkpoint / _MARK}" cannot be written ({error.strerror}); see to it, and try again',
            code="checkpoint-mark-unwritable",
        ) from None


def marked_with(checkpoint: Path) -> str | None:
    """Return the id of the home that a checkpoint was started in; None where it does not say.

    Raises:
        FleetError: what it says is damaged.
    """
    path = checkpoint / _MARK
    try:
        return str(json.loads(path.read_text())["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'"{path}" is damaged ({error!r}); where the checkpoint belongs to this home, remove that file',
            code="checkpoint-mark-damaged",
        ) from None
