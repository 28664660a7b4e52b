"""Processes as on another host: their user is another one, and sees only installation and named folders.

Each process gets a mount namespace of its own, in which the temporary folders and the home folder of
this user are empty. A worker therefore cannot open a file of the driver that is neither in the home
nor in the installation.
"""

import os
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from fleetpulse.io.spark.java import find_java
from fleetpulse.io.system.kernel_cache import ensure_kernels_compiled
from fleetpulse.paths import PACKAGE, ROOT, cache_dir
from tests.support.wait import PATIENCE_S

_USER = "nobody"
_STAGE = Path("/mnt")  # hidden in the namespace while the mounts are made
_PROGRAMS = ("unshare", "mount", "umount", "setpriv")
NO_HOME = Path("/nonexistent")
_PRELOAD = "from fleetpulse.io.lifecycle.python_daemon import preload; preload()"


@cache
def _unavailable() -> str:
    if os.geteuid() != 0:
        return "only root can start processes as another user"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed"
    if _USER not in {one.pw_name for one in pwd.getpwall()}:
        return f"no user {_USER}"
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(_STAGE)], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "no mount namespaces"


class Unavailable(Exception):
    """Processes cannot run as on another host, for the reason in the text."""


class ForeignHost:
    """Maker of command lines that run as on another host.

    Args:
        place: folder for copies of the compiled kernels, which belong to the other user.

    Raises:
        Unavailable: processes cannot be started as on another host, or cannot run the installation there.
    """

    def __init__(self, place: Path) -> None:
        if reason := _unavailable():
            raise Unavailable(reason)
        ensure_kernels_compiled()
        installed = (ROOT, Path(sys.prefix), Path(sys.base_prefix), cache_dir().absolute(), find_java())
        self._mounted = {path.resolve(): path for path in installed}
        for number, compiled in enumerate(sorted(path for path in PACKAGE.rglob("__pycache__") if any(path.glob("fold-*")))):
            own = place / f"compiled-{number}"  # numba writes to the folder of kernels that it reads
            shutil.copytree(compiled, own)
            self.give(own)
            self._mounted[own] = compiled
        self._require_imports(place)

    def _require_imports(self, place: Path) -> None:
        """Check that a process on the other host can import and load what a Python worker of Spark needs."""
        own = place / "imports"
        own.mkdir()
        self.give(own)
        environment = {
            "FLEET_CACHE": str(cache_dir().absolute()),
            "HOME": str(NO_HOME),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",
            "TMPDIR": str(own),
        }
        command = self.command([sys.executable, "-c", _PRELOAD], [own], Path("/"))
        tried = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
        if tried.returncode:
            raise Unavailable(f"user {_USER} cannot run the installation: {tried.stderr.strip().rpartition(chr(10))[2]}")

    @staticmethod
    def give(path: Path) -> None:
        """Make the other user the owner of a folder and all below it."""
        user = pwd.getpwnam(_USER)
        for one in (path, *path.rglob("*")):
            os.chown(one, user.pw_uid, user.pw_gid, follow_symlinks=False)

    def command(self, command: Sequence[str], folders: Iterable[Path], cwd: Path) -> list[str]:
        """Return the command line that runs a command on the other host; both have one process id.

        Args:
            command: the command.
            folders: folders that the process sees beside the installation, such as a shared home.
            cwd: its working folder.
        """
        mounted = {**self._mounted, **{folder.resolve(): folder for folder in folders}}
        sources = sorted(mounted, key=lambda source: len(mounted[source].parts))
        hidden = {Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home(), *filter(None, map(_closed, mounted.values()))}
        lines = ["set -e", "mask=$(umask)", "umask 022", f"mount -t tmpfs none {_STAGE}"]
        for number, source in enumerate(sources):
            lines += [f"mkdir {_STAGE}/{number}", f"mount --bind {_quoted(source)} {_STAGE}/{number}"]
        lines += [f"mount -t tmpfs -o mode=1777 none {_quoted(path)}" for path in sorted(hidden) if not hidden & {*path.parents}]
        for number, source in enumerate(sources):
            target = _quoted(mounted[source])
            lines += [f"mkdir -p {target}", f"mount --bind {_STAGE}/{number} {target}"]
        group = pwd.getpwnam(_USER).pw_gid
        privileges = f"--reuid={_USER} --regid={group} --clear-groups --no-new-privs"
        lines += [f"umount -l {_STAGE}", f"cd {_quoted(cwd)}", 'umask "$mask"', f'exec setpriv {privileges} "$@"']
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines), "sh", *command]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _closed(path: Path) -> Path | None:
    """Return the topmost folder above a path that other users cannot enter, if any."""
    return next((one for one in reversed(path.absolute().parents) if not one.stat().st_mode & stat.S_IXOTH), None)
