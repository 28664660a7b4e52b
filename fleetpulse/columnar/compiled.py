"""How the fold is compiled, and where what was compiled is kept.

Rule 1: machine code holds the values of what its source imports: the table of modes, the layout, the ranks of messages.
Numba knows a function's own file alone, and would go on by yesterday's table; kept code is therefore that of all sources here
and in ``core``, and no two states of them share a folder.
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from numba import config, njit
from numba.core import caching

_SOURCES: Final = (Path(__file__).parent, Path(__file__).parents[1] / "core")
_MARK: Final = "fold-"


def digest_of(folders: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits that follow from the names and the text of the Python files in folders."""
    told = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        text = path.read_bytes()
        told.update(f"{path.parent.name}/{path.name}:{len(text)}\n".encode())
        told.update(text)
    return told.hexdigest()[:16]


SOURCES_DIGEST: Final = digest_of(_SOURCES)


class _OfAllSources:
    """A place of numba's, and in it the folder of the sources as they are."""

    def get_cache_path(self) -> str:
        place: Any = super()
        return str(Path(place.get_cache_path(), _MARK + SOURCES_DIGEST))


class Named(_OfAllSources, caching.UserProvidedCacheLocator):
    """In the folder that ``NUMBA_CACHE_DIR`` names."""


class Beside(_OfAllSources, caching.InTreeCacheLocator):
    """Beside the source."""


class OfUser(_OfAllSources, caching.UserWideCacheLocator):
    """In the user's cache, where the tree cannot be written."""


_config: Any = config  # it has its names from the environment's
_config.CACHE_LOCATOR_CLASSES = ",".join(f"{__name__}.{one.__name__}" for one in (Named, Beside, OfUser))

kept: Final[Any] = njit(cache=True)
# Of functions that are given arrays and make none. Numba otherwise counts a reference to each array, atomically, wherever
# one function gives it to another: a message passes through a dozen of them, and two thirds of its cost were this counting.
_FLAGS: Final[dict[str, Any]] = {"cache": True, "_nrt": False}
borrowing: Final[Any] = njit(**_FLAGS)


def remove_outdated(function: Any) -> None:
    """Remove what was compiled of other sources, where a function's machine code is kept; no effect on what cannot be removed."""
    ours = Path(function.stats.cache_path)
    for folder in ours.parent.glob(f"{_MARK}*"):
        if folder != ours:
            shutil.rmtree(folder, ignore_errors=True)
