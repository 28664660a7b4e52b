"""Paths of the project: package, root folder, files at fixed places, cache.

Rule: no other module derives paths from its own ``__file__``, so that modules can be moved.
"""

import os
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent
ROOT: Final = PACKAGE.parent  # the checkout, or the folder in which the packages are installed
BOOTSTRAP: Final = ROOT / "cli" / "common" / "bootstrap.py"  # installs the packages that a verb needs; ./fleet runs it, too
LOG4J: Final = ROOT / "infra" / "spark" / "log4j2.properties"


def cache_dir() -> Path:
    """Return the cache folder: ``FLEET_CACHE``, which ./fleet sets, or ``.cache``."""
    return Path(os.environ.get("FLEET_CACHE") or ROOT / ".cache")
