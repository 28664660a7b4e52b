"""How the fold is compiled, and where what was compiled is kept.

Rule 1: machine code holds the values of what its source imports: the table of modes, the layout, the ranks of messages.
Numba knows a function's own file alone, and would go on by yesterday's table; kept code is therefore that of all sources here
and in ``core``, and no two states of them share a folder.
"""

import shutil
from pathlib import Path
from typing import Any, Final

from numba import config, njit
from numba.core import caching

from fleetpulse.columnar.jit.sources import SOURCES_DIGEST
from fleetpulse.paths import PACKAGE

_MARK: Final = "fold-"


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

jit_cached: Final[Any] = njit(cache=True)
# Of functions that are given arrays and make none. Numba otherwise counts a reference to each array, atomically, wherever
# one function gives it to another: a message passes through a dozen of them, and two thirds of its cost were this counting.
_FLAGS: Final[dict[str, Any]] = {"cache": True, "_nrt": False}
jit_no_refcount: Final[Any] = njit(**_FLAGS)


def kept_in(function: Any) -> Path:
    """Return the folder in which numba keeps a function's machine code."""
    return Path(function.stats.cache_path)


def remove_outdated(function: Any) -> None:
    """Remove machine code of other sources, wherever numba keeps that of this package; no effect on what cannot be removed.

    Numba has a folder for each folder of sources.
    """
    ours = kept_in(function)
    sources = [folder for folder in (PACKAGE / "columnar", *(PACKAGE / "columnar").iterdir()) if folder.is_dir()]
    for source in sources:
        if ours.parent.name == "__pycache__":
            place = source / "__pycache__"
        else:
            place = ours.parent.parent / caching.UserProvidedCacheLocator.get_suitable_cache_subpath(str(source / "any.py"))
        for folder in place.glob(f"{_MARK}*"):
            if folder.name != ours.name:
                shutil.rmtree(folder, ignore_errors=True)
