"""Compiler flags of the kernels, and the location of numba's cache.

Rule 1: machine code contains constants from imported sources: the transition table, the layout, the
ranks of message kinds. Numba invalidates its cache only by the file of the function, so it would
use outdated constants. The cache folder is therefore named by a digest of all sources in
``columnar`` and ``core`` (see `sources`).
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from numba import config, njit
from numba.core import caching

from fleetpulse.columnar.jit.sources import SOURCES_DIGEST
from fleetpulse.paths import PACKAGE

_MARK: Final = "fold-"


class _OfAllSources:
    """Mixin for numba's cache locators: adds a subfolder named by the digest of the sources."""

    def get_cache_path(self) -> str:
        place: Any = super()
        return str(Path(place.get_cache_path(), _MARK + SOURCES_DIGEST))


class Named(_OfAllSources, caching.UserProvidedCacheLocator):
    """Cache in the folder that ``NUMBA_CACHE_DIR`` names."""


class Beside(_OfAllSources, caching.InTreeCacheLocator):
    """Cache in the folder of the sources."""


class OfUser(_OfAllSources, caching.UserWideCacheLocator):
    """Cache in the user's cache folder, if the source tree is not writable."""


_config: Any = config  # numba sets its attributes at run time, from environment variables
_config.CACHE_LOCATOR_CLASSES = ",".join(f"{__name__}.{one.__name__}" for one in (Named, Beside, OfUser))

jit_cached: Final[Any] = njit(cache=True)
# For functions that take arrays and create none. Without the flag numba updates an atomic reference
# count of each array at each call between functions. A message passes through a dozen of them, and
# the counting took two thirds of its cost.
_FLAGS: Final[dict[str, Any]] = {"cache": True, "_nrt": False}
jit_no_refcount: Final[Any] = njit(**_FLAGS)


def kept_in(function: Any) -> Path:
    """Return the folder in which numba caches a function's machine code."""
    return Path(function.stats.cache_path)


def remove_outdated(function: Any) -> None:
    """Remove cached machine code of other digests, as far as possible.

    Folders that cannot be read and files that cannot be removed are ignored. Numba has one cache
    folder for each folder of sources.
    """
    current = kept_in(function)
    folders = (PACKAGE / "columnar", *(PACKAGE / "columnar").iterdir())
    sources = [folder for folder in folders if folder.is_dir() and folder.name != "__pycache__"]
    for source in sources:
        if current.parent.name == "__pycache__":
            place = source / "__pycache__"
        else:
            place = current.parent.parent / caching.UserProvidedCacheLocator.get_suitable_cache_subpath(str(source / "any.py"))
        with suppress(PermissionError):
            for folder in place.glob(f"{_MARK}*"):
                if folder.name != current.name:
                    shutil.rmtree(folder, ignore_errors=True)
