"""Disk cache of the fold's kernels, compiled once for each source version.

Rule 1: a marker file in the cache names the folder of the compiled kernels. A process that finds
the marker does not compile.
Rule 2: a process that compiles holds a lock. Otherwise, two processes would spend 40 CPU seconds
each on the same code.
"""

import os
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from platform import machine

from fleetpulse.columnar.jit.sources import SOURCES_DIGEST
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.locks import exclusive_lock
from fleetpulse.paths import PACKAGE, cache_dir


def kernels_are_kept() -> bool:
    """Return whether the kernels of the current sources are compiled and available.

    This does not import numba.
    """
    try:
        folder = _mark().read_text()
    except OSError:
        return False
    return bool(folder) and Path(folder).is_dir()


def ensure_kernels_compiled() -> None:
    """Compile all kernels unless cached; wait if another process compiles them."""
    if kernels_are_kept():
        return
    try:
        _mark().parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(_mark().with_suffix(".lock")):
            if not kernels_are_kept():
                atomic_write(_mark(), str(_compile()))
    except OSError:  # the cache is not writable: each process compiles for itself
        _compile()


def compile_in_background() -> "subprocess.Popen[bytes] | None":
    """Start a process that compiles the kernels; None if they are cached.

    This process does not import numba.
    """
    if kernels_are_kept():
        return None
    return subprocess.Popen([sys.executable, "-P", "-m", __name__], stdin=subprocess.DEVNULL)


def _compile() -> Path:
    from fleetpulse.columnar.jit.cache import kept_in
    from fleetpulse.columnar.jit.kernel import apply_rows
    from fleetpulse.columnar.warmup import warm

    warm()
    return kept_in(apply_rows)


def _mark() -> Path:
    folders = f"{PACKAGE}\0{os.environ.get('NUMBA_CACHE_DIR')}"
    compiler = f"{version('numba')}\0{sys.implementation.cache_tag}\0{machine()}"
    place = sha256(f"{folders}\0{compiler}".encode()).hexdigest()[:8]
    return cache_dir() / "kernels" / f"{SOURCES_DIGEST}-{place}.kept"


if __name__ == "__main__":
    ensure_kernels_compiled()
