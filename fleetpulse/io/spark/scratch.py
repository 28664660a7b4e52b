"""Scratch files of Spark: session folders, block files, unfinished writes."""

import re
import shutil
from pathlib import Path
from typing import Final

BLOCKS: Final = "blocks-*"  # folders of a query's block files, see `query`
SHARED: Final = "shared-*"  # folders of the check that executors share the home, see `cluster`
TEMPORARY: Final = "tmp"  # temporary folder of a session's JVM
_TEMPORARY_FILE: Final = re.compile(r"\..+\.[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(\.TID\d+)?\.tmp(\.crc)?")


def leftovers(folder: Path) -> list[Path]:
    """Return the leftovers of killed sessions, for the next session to remove.

    Args:
        folder: folder that only one session uses at a time.
    """
    return sorted(path for pattern in ("local", TEMPORARY, BLOCKS, SHARED) for path in folder.glob(pattern) if path.is_dir())


def remove_temporary_files(checkpoint: Path) -> None:
    """Remove the unfinished temporary files of a killed Spark.

    Spark writes to a temporary file, renames it, and never removes leftovers of earlier runs.

    Args:
        checkpoint: checkpoint of a query that does not run.
    """
    for path in checkpoint.rglob(".*.tmp*"):
        if _TEMPORARY_FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def remove_folders(folders: list[Path]) -> None:
    """Remove folders recursively; ignore errors, so that a later call can retry."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
