"""Paths of the project: package, root folder, files at fixed places, cache.

Rule: no other module derives paths from its own ``__file__``, so that modules can be moved.
"""

import os
import re
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError

PACKAGE: Final = Path(__file__).parent
ROOT: Final = PACKAGE.parent  # the checkout, or the folder in which the packages are installed
BOOTSTRAP: Final = ROOT / "cli" / "common" / "bootstrap.py"  # installs the packages that a verb needs; ./fleet runs it, too
LOG4J: Final = ROOT / "infra" / "spark" / "log4j2.properties"
PYTHON_WORKER: Final = ROOT / "infra" / "spark" / "python-worker"  # command of Spark's Python workers
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # `Path` merges the two slashes of an address


def home_folder(path: Path) -> Path:
    """Return the path of a home, unless it is an address.

    Raises:
        FleetError: the path begins with a scheme, such as ``s3://``.
    """
    if _ADDRESS.match(str(path)):
        raise FleetError(
            f'a home is a folder, and its files are linked, locked and renamed; got the address "{path}"; write the path of a '
            f"folder, on a file system that all hosts share if Spark runs on a cluster",
            code="home-is-an-address",
        )
    return path


def cache_dir() -> Path:
    """Return the cache folder: ``FLEET_CACHE``, which ./fleet sets, or ``.cache``."""
    return Path(os.environ.get("FLEET_CACHE") or ROOT / ".cache")
