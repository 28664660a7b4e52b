"""Digest of the sources that compiled kernels are made of; known without numba."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_SOURCES: Final = (Path(__file__).parent, Path(__file__).parents[1] / "core")


def digest_of(folders: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits that follow from the names and the text of the Python files in folders."""
    told = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        text = path.read_bytes()
        told.update(f"{path.parent.name}/{path.name}:{len(text)}\n".encode())
        told.update(text)
    return told.hexdigest()[:16]


SOURCES_DIGEST: Final = digest_of(_SOURCES)
