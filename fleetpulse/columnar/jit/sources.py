"""Digest of the sources that compiled kernels depend on, computed without numba."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fleetpulse.paths import PACKAGE

_SOURCES: Final = (PACKAGE / "columnar", PACKAGE / "core")


def digest_of(folders: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits: a digest of all Python files in and below folders.

    It depends on the paths and the text of the files.
    """
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(folder.parent).as_posix()}:{len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()[:16]


SOURCES_DIGEST: Final = digest_of(_SOURCES)
