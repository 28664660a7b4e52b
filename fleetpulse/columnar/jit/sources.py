"""Digest of the sources that compiled kernels are made of; known without numba."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fleetpulse.paths import PACKAGE

_SOURCES: Final = (PACKAGE / "columnar", PACKAGE / "core")


def digest_of(folders: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits that depend on the names and the text of all Python files in and below folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(folder.parent).as_posix()}:{len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()[:16]


SOURCES_DIGEST: Final = digest_of(_SOURCES)
