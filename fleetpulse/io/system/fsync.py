"""What would survive a loss of power: a file by its content and, apart from that, by the name that its folder has of it."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def no_room(error: BaseException) -> bool:
    """Return whether it says that the disk, or somebody's share of it, is full; Delta and DuckDB say so in words alone."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(f"(os error {code})" in str(error) or os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def atomic_write(path: Path, content: str | bytes, *, sync: bool = True, mode: int = 0o666, aside: Path | None = None) -> None:
    """Replace a file in one step: a reader finds the old one or the new one, whole.

    Args:
        path: the file.
        content: all of it.
        sync: whether content and name survive a loss of power once this has returned.
        mode: permission bits of the new file, less the umask.
        aside: where it is written first, beside the file. By default one name for all writers, of which there is one at a
            time: it writes over what a killed one left.

    Raises:
        OSError: the system refuses; the old file stays, and nothing is left aside.
    """
    fresh = aside or path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def put_in_place(aside: Path, path: Path) -> None:
    """Replace a file by one that somebody else has written aside, in one step, and on the disk.

    Raises:
        OSError: the system refuses; both stay as they are.
    """
    sync_file(aside)
    aside.replace(path)
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
