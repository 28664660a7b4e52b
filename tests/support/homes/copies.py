"""Folders that are built once in a process, and copied for each test that changes one."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path


def copy_of(build: Callable[..., object], path: Path, *arguments: Hashable) -> None:
    """Copy the folder that a function builds; the function is called once for the same arguments.

    Args:
        build: function of a folder to create, and of the arguments. The folder must contain no
            absolute path.
        path: folder of the copy; it may exist.
        arguments: further arguments of the function.
    """
    # New file times: maintenance compares them with the present.
    shutil.copytree(_built(build, arguments), path, copy_function=shutil.copyfile, dirs_exist_ok=True)


@cache
def _built(build: Callable[..., object], arguments: tuple[Hashable, ...]) -> Path:
    parent = Path(tempfile.mkdtemp(prefix="fleet-copies-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    build(parent / "original", *arguments)
    return parent / "original"
