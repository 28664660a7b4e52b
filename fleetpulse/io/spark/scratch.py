"""Scratch of Spark on the local disk: temporary folders of sessions, blocks between tasks, and half-written files."""

import re
import shutil
from pathlib import Path
from typing import Final

BLOCKS: Final = "blocks-*"  # folders in which a query hands over its blocks; see `query`
TEMPORARY: Final = "tmp"  # of a session's JVM
_ASIDE: Final = re.compile(r"\..+\.[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(\.TID\d+)?\.tmp(\.crc)?")


def remains_of(folder: Path) -> list[Path]:
    """Return what killed sessions left in a folder that only one session uses at a time, for the next one to remove."""
    return sorted(path for pattern in ("local", TEMPORARY, BLOCKS) for path in folder.glob(pattern) if path.is_dir())


def remove_aside(checkpoint: Path) -> None:
    """Remove what a Spark that was killed was still writing: it writes aside, renames, and never looks for what it left.

    Args:
        checkpoint: which no query writes to now.
    """
    for path in checkpoint.rglob(".*.tmp*"):
        if _ASIDE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def remove_folders(folders: list[Path]) -> None:
    """Remove folders with all that is in them; what cannot be removed is left for the next time."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
