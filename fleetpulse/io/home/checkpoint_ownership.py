"""Check that a checkpoint belongs to its home.

With the checkpoint of another home, a job would wait forever or skip rows that were never judged.

Rule 1: a checkpoint continues at an existing version of bronze, or at the next one to be written.
Rule 2: a home has an id, and each checkpoint started in it has a file with this id. A home or
checkpoint without an id is older than ids and is accepted. The job writes the home's id into the
checkpoint when it starts.
"""

import json
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import newest_begun, started_batches
from fleetpulse.io.checkpoints.generations import checkpoint_of
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write

_MARK: Final = "home-id.json"
_ADVICE: Final = "restore this home's checkpoint, or the whole home, from one backup, or choose another home with --home"


def require_own_if_readable(home: Home, number: int) -> None:
    """Like `require_own`, but ignore an unreadable checkpoint.

    Used for a checkpoint that no job will continue.

    Raises:
        FleetError: the checkpoint belongs to another home, or continues after the end of bronze.
    """
    try:
        marked_with(checkpoint_of(home.lifecycle, number))
        if started_batches(checkpoint_of(home.lifecycle, number)):
            newest_begun(checkpoint_of(home.lifecycle, number))
    except FleetError:
        return
    require_own(home, number)


def require_own(home: Home, number: int) -> None:
    """Check that a generation's checkpoint belongs to this home.

    Args:
        home: home of the generation.
        number: number of the generation. Its checkpoint may have no batch yet.

    Raises:
        FleetError: the checkpoint belongs to another home, or continues after the end of bronze.
    """
    checkpoint = checkpoint_of(home.lifecycle, number)
    marked, own_id = marked_with(checkpoint), home.id()
    if marked is not None and own_id is not None and marked != own_id:
        raise FleetError(
            f'the checkpoint of generation {number} of "{home.path}" belongs to another home: expected id {own_id}, '
            f"found {marked}; {_ADVICE}",
            code="checkpoint-foreign",
        )
    if not started_batches(checkpoint):
        return
    version, latest = newest_begun(checkpoint), DeltaLog(home.table(MESSAGES.name)).latest()
    if version > latest + 1:
        raise FleetError(
            f'the checkpoint of generation {number} of "{home.path}" does not match bronze: expected a version up to '
            f"{latest + 1} (the next one), found {version}; the checkpoint belongs to another home, or bronze is "
            f"older; {_ADVICE}",
            code="checkpoint-ahead-of-bronze",
        )


def mark_own(home: Home, number: int) -> None:
    """Write the home's id into a generation's checkpoint, unless it has an id.

    The folder of the checkpoint is created if it does not exist.

    Raises:
        FleetError: the file cannot be written.
    """
    checkpoint, own_id = checkpoint_of(home.lifecycle, number), home.id()
    if own_id is None or marked_with(checkpoint) is not None:
        return
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
        atomic_write(checkpoint / _MARK, json.dumps({"id": own_id}))
    except OSError as error:
        raise FleetError(
            f'"{checkpoint / _MARK}" cannot be written ({error.strerror}); fix the cause and try again',
            code="checkpoint-mark-unwritable",
        ) from None


def marked_with(checkpoint: Path) -> str | None:
    """Return the id of the home in which a checkpoint was started; None without an id.

    Raises:
        FleetError: the file with the id is damaged.
    """
    path = checkpoint / _MARK
    try:
        return str(json.loads(path.read_text())["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'"{path}" is damaged ({error!r}); if the checkpoint belongs to this home, remove that file',
            code="checkpoint-mark-damaged",
        ) from None
