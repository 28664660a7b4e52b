"""File locks, exclusive or shared, released by the system when a process ends.

Rule: the holder is determined from the lock, never from a process id, which two containers may
share.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from fleetpulse.io.system.fsync import is_disk_full

_TRIES: Final = 5
_UNNAMED: Final = "another run"  # a holder that could not write its name on a full disk


def _flocked(held: TextIO, operation: int = fcntl.LOCK_EX) -> bool:
    """Take the lock; retry briefly, because `lock_holder` also takes it for a moment."""
    for attempt in range(_TRIES):
        try:
            fcntl.flock(held, operation | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05 * (attempt < _TRIES - 1))
    return False


@contextmanager
def named_lock(path: Path, by: str, refused: Callable[[str], Exception]) -> Iterator[None]:
    """Hold the exclusive lock of a file until the context exits; record the holder.

    Args:
        path: path of the file; a missing file is created.
        by: description of the holder, written into the file.
        refused: function that makes the error from the description of the present holder.
    """
    with path.open("a+") as file:
        if not _flocked(file):
            file.seek(0)
            raise refused(file.read().strip() or _UNNAMED)
        file.truncate(0)
        try:
            os.write(file.fileno(), f"{by} (process {os.getpid()})".encode())
        except OSError as error:
            if not is_disk_full(error):  # the lock is held anyway: a command that frees disk space must be able to run
                raise
        try:
            yield
        finally:
            file.truncate(0)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Wait for the exclusive lock of a file and hold it until the context exits.

    Use it for short read-modify-write steps.

    Args:
        path: path of the file; a missing file is created.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def folder_held(path: Path) -> Iterator[None]:
    """Hold the lock of a folder as `exclusive_lock` holds that of a file.

    Nothing is written, so that read access to the folder suffices.

    Raises:
        OSError: the folder is missing or cannot be locked.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def shared_lock(path: Path, by: str, refused: Callable[[str], Exception]) -> Iterator[None]:
    """Hold the shared lock of a file until the context exits; record the holders.

    Args:
        path: path of the file; a missing file is created.
        by: description of the holders, the same for each, written into the file.
        refused: function that makes the error from the description of an exclusive holder.
    """
    with path.open("r+" if path.exists() else "w+") as file:
        if not _flocked(file, fcntl.LOCK_SH):
            raise refused(file.read().strip() or _UNNAMED)
        os.pwrite(file.fileno(), by.encode(), 0)  # all holders write the same text, in any order
        file.truncate(len(by.encode()))
        yield


def lock_holder(path: Path) -> str | None:
    """Return the description of a lock's exclusive holder; None if it is not held.

    A missing file is not held.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open() as file:  # read access suffices
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or _UNNAMED
    except FileNotFoundError:
        pass
    return None
