"""Locks of files: one holder each, or several that share it; the operating system lets go of one whatever way its process dies.

Rule: who holds what is asked of the locks and never of process numbers, which two containers may both have.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from fleetpulse.io.system.fsync import no_room

_TRIES: Final = 5
_UNNAMED: Final = "another run"  # which began on a full disk


def _flocked(held: TextIO, how: int = fcntl.LOCK_EX) -> bool:
    """Take the lock; tried for a moment, since a command that asks who holds it holds it meanwhile."""
    for attempt in range(_TRIES):
        try:
            fcntl.flock(held, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05 * (attempt < _TRIES - 1))
    return False


@contextmanager
def held(path: Path, by: str, refused: Callable[[str], Exception]) -> Iterator[None]:
    """Hold a file's lock, and say in it who does.

    Args:
        path: the file; it is made where it is absent.
        by: who takes it, in words.
        refused: makes the error of who holds it.
    """
    with path.open("a+") as file:
        if not _flocked(file):
            file.seek(0)
            raise refused(file.read().strip() or _UNNAMED)
        file.truncate(0)
        try:
            os.write(file.fileno(), f"{by} (process {os.getpid()})".encode())
        except OSError as error:
            if not no_room(error):  # it is held all the same: what makes room must be let in
                raise
        try:
            yield
        finally:
            file.truncate(0)


@contextmanager
def briefly(path: Path) -> Iterator[None]:
    """Hold a file's lock for an instant, and wait for whoever has it: for what is read and written in one step.

    Args:
        path: the file; it is made where it is absent.

    Raises:
        OSError: the system refuses.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def folder_held(path: Path) -> Iterator[None]:
    """Hold a folder for an instant as `briefly` holds a file: nothing is written, so that whoever may read it may hold it.

    Raises:
        OSError: there is none, or the system refuses.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def shared(path: Path, by: str, refused: Callable[[str], Exception]) -> Iterator[None]:
    """Hold a file's lock together with others who share it, and say in it who they are.

    Args:
        path: the file; it is made where it is absent.
        by: who they are, in the same words for each of them.
        refused: makes the error of who holds it alone.
    """
    with path.open("r+" if path.exists() else "w+") as file:
        if not _flocked(file, fcntl.LOCK_SH):
            raise refused(file.read().strip() or _UNNAMED)
        os.pwrite(file.fileno(), by.encode(), 0)  # all write the same, so that it does not matter who is last
        file.truncate(len(by.encode()))
        yield


def holder(path: Path) -> str | None:
    """Say who holds a file's lock, as `held` wrote it; None where nobody does.

    Raises:
        OSError: the file cannot be read; one that is absent is held by nobody.
    """
    try:
        with path.open() as file:  # one who may only read may ask as well
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or _UNNAMED
    except FileNotFoundError:
        pass
    return None
