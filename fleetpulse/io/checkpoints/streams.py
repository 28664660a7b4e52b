"""Checkpoints of the streams beside the lifecycle, read from their files without Spark."""

import json
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import committed_batches, started_batches

_VERSION_KEYS: Final = ("version", "reservoirVersion")  # of an offset of `BlockSource`, and of Delta's source


def next_versions(checkpoint: Path) -> list[int]:
    """Return the versions of bronze at which the sources of a stream continue.

    The newest committed batch determines them; the job repeats a batch that was started after it.

    Args:
        checkpoint: folder of the stream's checkpoint.

    Returns:
        One version for each source; empty before the first committed batch.

    Raises:
        FleetError: the offsets of the batch cannot be read.
    """
    done = committed_batches(checkpoint)
    return versions_after(checkpoint, done[-1]) if done else []


def versions_after(checkpoint: Path, batch: int) -> list[int]:
    """Return the versions of bronze at which the sources of a stream continue after a batch that was started.

    Raises:
        FleetError: the offsets of the batch cannot be read.
    """
    path = checkpoint / "offsets" / str(batch)
    try:
        return [_version(json.loads(line)) for line in path.read_text().splitlines()[2:] if line != "-"]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise FleetError(
            f'the offsets in "{path}" cannot be read ({error!r}), so the versions that the stream still needs are unknown; '
            f"restore the checkpoint, or remove its folder: the stream then begins at the present, or with its snapshot",
            code="offsets-damaged",
        ) from None


def _version(offset: dict[str, Any]) -> int:
    return int(next(offset[key] for key in _VERSION_KEYS if key in offset))


def has_begun(checkpoint: Path) -> bool:
    """Return whether a stream has started a batch."""
    return bool(started_batches(checkpoint))
