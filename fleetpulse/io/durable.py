"""What would survive a loss of power: a file by its content and, apart from that, by the name that its folder has of it."""

import errno
import os
from pathlib import Path


def no_room(error: BaseException) -> bool:
    """Return whether it says that the disk, or somebody's share of it, is full; Delta and DuckDB say so in words alone."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(f"(os error {code})" in str(error) or os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def replace_text(path: Path, text: str) -> None:
    """Write a file in the place of the one before, in one step, and on the disk: a reader finds either, whole.

    One writes it at a time, and writes over what one that was killed left half written.

    Raises:
        OSError: the system refuses; the one before stays.
    """
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(directory: Path) -> None:
    """Make the names in a folder, new or changed, survive a loss of power."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_file(path: Path) -> None:
    """Make what somebody else has written into a file survive a loss of power; its name is `sync_folder`'s.

    Raises:
        OSError: it is not there, or the disk refuses.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_tree(directory: Path) -> None:
    """Make all that lies in a folder survive a loss of power, whoever wrote it; its own name too."""
    for folder, _, names in os.walk(directory):
        for name in names:
            sync_file(Path(folder) / name)
        sync_folder(Path(folder))
    sync_folder(directory.parent)
