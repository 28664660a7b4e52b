"""Folders of the project: where its files are, and where it keeps what it fetches and compiles.

Rule 1: no other module counts parent folders of its own file, so that a module can move.
"""

import os
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent
ROOT: Final = PACKAGE.parent  # a checkout, or the folder that the packages are installed into
BOOTSTRAP: Final = ROOT / "cli" / "common" / "bootstrap.py"  # installs what a verb needs; ./fleet runs it, too
LOG4J: Final = ROOT / "infra" / "spark" / "log4j2.properties"


def cache_dir() -> Path:
    """Return the project's cache: FLEET_CACHE, which ./fleet sets."""
    return Path(os.environ.get("FLEET_CACHE") or ROOT / ".cache")
