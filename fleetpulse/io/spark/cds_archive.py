"""Spark's classes as the JVM has them when it has read and checked them, in a file: later starts map it, and do a third less.

The JVM makes the file when it ends (JEP 350), and leaves it unused where Java, the JARs or their order are others by then. What
it does not see is a file that is cut short: it would be killed by it. So the length stands in the name, which is given last.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import put_in_place
from fleetpulse.paths import cache_dir

_SILENT: Final = "-Xlog:cds*=off -Xlog:class+path=off"  # it says on standard output that a file does not fit

_LEFT_S: Final = 3600.0  # nobody takes so long: who made it was killed


def class_archive(java: Path, jars: Sequence[Path]) -> Path | None:
    """Return the file that fits; None where there is none.

    Args:
        java: its home.
        jars: all that Spark starts with, in order.
    """
    for path in _folder().glob(f"{_ours(jars)}-{_key(java, jars)}-*.jsa"):
        with suppress(OSError, ValueError):
            if path.stat().st_size == int(path.stem.rpartition("-")[2]):
                return path
    return None


def makes_none(java: Path, jars: Sequence[Path]) -> bool:
    """Whether it was seen that this Java makes no such file: some lack the one of their own classes, which it builds on."""
    return _none(java, jars).exists()


def using(archive: Path) -> str:
    """Return the options by which a JVM uses a file: at its own address, since at another one 160 MB of it would be copied."""
    return f'{_SILENT} -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0 "-XX:SharedArchiveFile={archive}"'


def making(fresh: Path) -> str:
    """Return the options by which a JVM makes a file when it ends."""
    return f'{_SILENT} "-XX:ArchiveClassesAtExit={fresh}"'


def fresh_archive() -> Path:
    """Return where a file may be made; no other process is given the same.

    Raises:
        FleetError: the cache cannot be written.
    """
    try:
        _folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FleetError(
            f"cannot write {_folder()} ({error.strerror}); free some space and try again", code="cache-unwritable"
        ) from None
    for left in _folder().glob("*.new"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink()
    return _folder() / f"{os.getpid()}.new"


def keep(fresh: Path, java: Path, jars: Sequence[Path]) -> Path:
    """Give a file that was made its name, and remove those that nothing fits any more; where there is none, remember that.

    Raises:
        OSError: there is none, or it cannot be kept.
    """
    if not fresh.exists():
        _none(java, jars).touch()
    kept = _folder() / f"{_ours(jars)}-{_key(java, jars)}-{fresh.stat().st_size}.jsa"
    put_in_place(fresh, kept)
    for path in _folder().glob(f"{_ours(jars)}-*"):
        if path != kept:
            path.unlink(missing_ok=True)  # a JVM that has it mapped keeps it
    return kept


def _folder() -> Path:
    return cache_dir() / "classes"


def _none(java: Path, jars: Sequence[Path]) -> Path:
    return _folder() / f"{_ours(jars)}-{_key(java, jars)}.none"


def _ours(jars: Sequence[Path]) -> str:
    """Return what tells installations apart that share a cache."""
    return sha256("\0".join(map(str, jars)).encode()).hexdigest()[:8]


def _key(java: Path, jars: Sequence[Path]) -> str:
    """Return what says which Java and which JARs, as the JVM compares them: by place, size and time."""
    seen = sha256()
    for path in (java / "release", *jars):
        with suppress(OSError):
            at = path.stat()
            seen.update(f"{path}\0{at.st_size}\0{at.st_mtime_ns}\0".encode())
    return seen.hexdigest()[:16]
