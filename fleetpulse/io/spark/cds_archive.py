"""Class data sharing (CDS) archive of Spark's classes, for faster JVM starts.

A JVM start with the archive does a third less work. The JVM writes the archive when it ends
(JEP 350). It ignores an archive if Java, the JARs or their order have changed. It does not detect a
truncated archive and would crash. The file name therefore contains the length, and the file gets
this name last.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import replace_durably
from fleetpulse.paths import cache_dir

_SILENT: Final = "-Xlog:cds*=off -Xlog:class+path=off"  # the JVM reports a mismatched archive on standard output

_LEFT_S: Final = 3600.0  # an older unfinished file is from a killed process


def class_archive(java: Path, jars: Sequence[Path]) -> Path | None:
    """Return the matching archive; None if there is none.

    Args:
        java: home folder of Java.
        jars: all JARs of Spark's class path, in order.
    """
    for path in _folder().glob(f"{_installation_key(jars)}-{_key(java, jars)}-*.jsa"):
        with suppress(OSError, ValueError):
            if path.stat().st_size == int(path.stem.rpartition("-")[2]):
                return path
    return None


def writes_no_archive(java: Path, jars: Sequence[Path]) -> bool:
    """Return whether this Java is known to write no archive.

    Some Java installations lack the archive of the JDK classes, on which this archive is based.
    """
    return _no_archive_marker(java, jars).exists()


def use_options(archive: Path) -> str:
    """Return the JVM options to use an archive.

    The archive is mapped at its requested address; relocation would copy 160 MB.
    """
    return f'{_SILENT} -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0 "-XX:SharedArchiveFile={archive}"'


def create_options(fresh: Path) -> str:
    """Return the JVM options to write an archive when the JVM ends."""
    return f'{_SILENT} "-XX:ArchiveClassesAtExit={fresh}"'


def fresh_archive() -> Path:
    """Return the path for a new archive, unique to this process.

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


def publish_archive(fresh: Path, java: Path, jars: Sequence[Path]) -> Path:
    """Publish a new archive under its final name and remove outdated ones.

    If the JVM wrote no archive, record that for `writes_no_archive`.

    Raises:
        OSError: the JVM wrote no archive, or it cannot be stored.
    """
    if not fresh.exists():
        _no_archive_marker(java, jars).touch()
    published = _folder() / f"{_installation_key(jars)}-{_key(java, jars)}-{fresh.stat().st_size}.jsa"
    replace_durably(fresh, published)
    for path in _folder().glob(f"{_installation_key(jars)}-*"):
        if path != published:
            path.unlink(missing_ok=True)  # a JVM that mapped it can still use it
    return published


def _folder() -> Path:
    return cache_dir() / "classes"


def _no_archive_marker(java: Path, jars: Sequence[Path]) -> Path:
    return _folder() / f"{_installation_key(jars)}-{_key(java, jars)}.none"


def _installation_key(jars: Sequence[Path]) -> str:
    """Return a key of this installation among those that share the cache."""
    return sha256("\0".join(map(str, jars)).encode()).hexdigest()[:8]


def _key(java: Path, jars: Sequence[Path]) -> str:
    """Return a key of Java and the JARs: their paths, sizes and times, as for the JVM."""
    seen = sha256()
    for path in (java / "release", *jars):
        with suppress(OSError):
            at = path.stat()
            seen.update(f"{path}\0{at.st_size}\0{at.st_mtime_ns}\0".encode())
    return seen.hexdigest()[:16]
