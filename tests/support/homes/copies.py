"""Folders that are built once in a process, and copied for each test that changes one."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path


def copy_built(build: Callable[[Path], object], path: Path) -> None:
    """Copy the folder that a function builds; the function is called once in a process.

    Args:
        build: function of a folder to create. The folder must contain no absolute path.
        path: folder of the copy; it may exist.
    """
    # New file times: maintenance compares them with the present.
    shutil.copytree(_built(build), path, copy_function=shutil.copyfile, dirs_exist_ok=True)


@cache
def _built(build: Callable[[Path], object]) -> Path:
    parent = Path(tempfile.mkdtemp(prefix="fleet-copies-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    build(parent / "original")
    return parent / "original"
