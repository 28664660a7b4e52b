"""Installation of the virtual environment that a lock file describes.

Rule 1: only the standard library is used, because this runs before anything is installed.
Rule 2: each failure is one sentence that ends with what to do, and exit code 1.
Rule 3: a *stamp* (a copy of the lock, stored in the environment) is removed before a change and
written after it. An interrupted installation is therefore never mistaken for a complete one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MINIMUM_PYTHON = (3, 11)
LOCK_WAIT_S = 900.0  # other starts wait for a first installation, which takes minutes over a slow network
KINDS = ("runtime", "operations", "dev")  # each contains the packages of the previous one, at the same versions

# Sources that are built at installation, because their projects publish no wheel.
BUILT = ("pyspark",)

TAKES = {"runtime": "about a minute", "operations": "Airflow and related packages; a few minutes", "dev": "a few minutes"}


class EnvironmentFault(Exception):
    """Failure to install the environment, with a message that ends with what to do.

    Attributes:
        broken_off: whether the installing program was killed, or the disk became full.
    """

    def __init__(self, message: str, *, broken_off: bool = False) -> None:
        super().__init__(message)
        self.broken_off = broken_off


def is_ready(root: Path, venv: Path, kind: str) -> bool:
    """Return whether the stamp of a virtual environment equals the lock of ``kind``."""
    lock, stamp = root / "requirements" / f"{kind}.txt", venv / ".fleet" / f"{kind}.txt"
    try:
        return os.access(venv / "bin" / "python", os.X_OK) and lock.read_bytes() == stamp.read_bytes()
    except OSError:
        return False


def kind_to_install(venv: Path, kind: str) -> str:
    """Return the larger of ``kind`` and the installed kinds.

    A start that needs only the runtime must not remove a contributor's tools.
    """
    stamped = [each for each in KINDS if (venv / ".fleet" / f"{each}.txt").exists()]
    return max([kind, *stamped], key=KINDS.index)


def ensure(root: Path, venv: Path, cache: Path, kind: str) -> None:
    """Install the lock of ``kind`` into ``venv``, once for all concurrent starts.

    Raises:
        EnvironmentFault: Python is too old, or the installation failed.
    """
    if sys.version_info < MINIMUM_PYTHON:
        raise EnvironmentFault(wrong_python(sys.version_info[:3]))
    cache.mkdir(parents=True, exist_ok=True)
    with only_one(cache / "environment.lock", LOCK_WAIT_S):
        if is_ready(root, venv, kind):
            return  # another start installed it while this one waited
        kind = kind_to_install(venv, kind)
        print_message(f"installing the {kind} environment into {venv} (once; {TAKES[kind]})")
        uv = find_uv(root, cache)
        create_venv(uv, venv)
        sync(uv, root, venv, kind)


def wrong_python(version: Sequence[int]) -> str:
    """Return the error message for a Python that is too old."""
    got = ".".join(map(str, version))
    return f"Python 3.11 or newer is needed; got {got}; install one, or name it, as in FLEET_PYTHON=python3.12 ./fleet."


@contextlib.contextmanager
def only_one(path: Path, wait_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel releases it if this process dies.

    Raises:
        EnvironmentFault: another process has held it for ``wait_s`` seconds.
    """
    with path.open("a+") as held:
        deadline = time.monotonic() + wait_s
        reported = False
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EnvironmentFault(
                        f"another ./fleet is still installing after {wait_s:.0f} s (it holds {path}); stop it and try again."
                    ) from None
                if not reported:
                    print_message("another ./fleet is installing; waiting for it")
                    reported = True
                time.sleep(0.2)
        yield


def find_uv(root: Path, cache: Path, *, pinned: bool = False) -> Path:
    """Return the uv of PATH, or the pinned one in the cache, installed if absent.

    Args:
        root: folder of the project.
        cache: cache folder of the project.
        pinned: whether to use the pinned uv only, so that locks are the same on all machines.

    Raises:
        EnvironmentFault: there is no uv, and pip cannot install it.
    """
    on_path = shutil.which("uv")
    if on_path and not pinned:
        return Path(on_path)
    home = cache / "uv"
    lock, stamp, uv = root / "requirements" / "uv.txt", home / "fleet.txt", home / "bin" / "uv"
    if uv.exists() and stamp.exists() and stamp.read_bytes() == lock.read_bytes():
        return uv
    print_message("installing uv into the project's cache")
    shutil.rmtree(home, ignore_errors=True)
    call([sys.executable, "-m", "venv", str(home)], "cannot create a virtual environment for uv", VENV_CURE)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--require-hashes", "--only-binary=:all:", "--requirement", str(lock)]
    call(pip, "pip cannot install uv", NETWORK_CURE)
    shutil.copyfile(lock, stamp)
    return uv


VENV_CURE = "install Python's venv module (on Debian and Ubuntu: apt install python3-venv), or install uv, and try again."
NETWORK_CURE = "check the network, the proxy (HTTPS_PROXY) and the free disk space, and try again; it resumes where it stopped."


def create_venv(uv: Path, venv: Path) -> None:
    """Create the virtual environment, unless one with a supported Python exists."""
    works = "import sys; sys.exit(sys.version_info < (3, 11))"
    python = venv / "bin" / "python"
    if python.exists() and subprocess.run([python, "-I", "-c", works], check=False).returncode == 0:
        return
    command = [str(uv), "venv", "--quiet", "--python", sys.executable]
    if (venv / "pyvenv.cfg").exists():
        command.append("--clear")  # a broken virtual environment; any other folder is left alone
    advice = "remove that folder if you need nothing in it, or set FLEET_VENV to another one."
    call([*command, str(venv)], f"cannot create the virtual environment {venv}", advice)


def sync(uv: Path, root: Path, venv: Path, kind: str) -> None:
    """Install exactly the packages of a lock, checked by hash, and write its stamps.

    Only the packages of `BUILT` are built; the tool that builds them is checked by hash, too.

    A smaller kind that is ready stays ready: larger locks pin the same versions, so its packages do
    not change.
    """
    stamps, marker = venv / ".fleet", venv / ".fleet-begun"
    ready = [each for each in KINDS if is_ready(root, venv, each)]
    reinstalled: list[str] = []
    if marker.exists():  # after an interruption, a partly installed package may be reported as installed
        whole = {name for each in ready for name in _packages(root, each)}
        reinstalled = [name for name in _packages(root, kind) if name not in whole]
    marker.touch()
    for each in KINDS:
        if each not in ready:
            (stamps / f"{each}.txt").unlink(missing_ok=True)
    lock = root / "requirements" / f"{kind}.txt"
    command = [
        str(uv),
        "pip",
        "sync",
        "--quiet",
        "--require-hashes",
        *("--only-binary", ":all:"),  # a build runs code of packages that no lock pins, except for those of build.txt
        *(argument for name in BUILT for argument in ("--no-binary", name)),
        *("--build-constraints", str(root / "requirements" / "build.txt")),
        "--compile-bytecode",  # if Python writes no bytecode, each start would compile Spark and numba again
        "--python",
        str(venv / "bin" / "python"),
        *(argument for name in reinstalled for argument in ("--reinstall-package", name)),
        str(lock),
    ]
    try:
        call(command, f"cannot install {lock.relative_to(root)}", NETWORK_CURE)
    except EnvironmentFault as fault:
        if not fault.broken_off and not reinstalled:
            marker.unlink()
        raise
    stamps.mkdir(exist_ok=True)
    for each in KINDS[: KINDS.index(kind) + 1]:
        shutil.copyfile(root / "requirements" / f"{each}.txt", stamps / f"{each}.txt")
    marker.unlink()


def _packages(root: Path, kind: str) -> list[str]:
    """Return the names of the packages in a lock."""
    lines = (root / "requirements" / f"{kind}.txt").read_text().splitlines()
    return [line.partition("==")[0] for line in lines if "==" in line and not line.startswith((" ", "#"))]


def call(command: Sequence[str], failure: str, advice: str) -> None:
    """Run a command.

    Raises:
        EnvironmentFault: the command failed; the message has ``failure``, its main error line, and the
            ``advice``.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        broken_off = done.returncode < 0 or "os error 28" in done.stdout
        raise EnvironmentFault(f"{failure} ({gist(done.stdout)}); {advice}", broken_off=broken_off)


def gist(output: str) -> str:
    """Return the main error line of an output: uv's deepest cause, or the last line."""
    lines = [line.strip(" \t×╰─▶│├") for line in output.splitlines() if line.strip(" \t×╰─▶│├")]
    causes = [line for line in lines if line.lower().startswith(("caused by:", "error:"))]
    return (causes or lines or ["no output"])[-1][:300].rstrip(".")


def print_message(text: str) -> None:
    """Print a message to standard error; standard output belongs to the command."""
    print(f"fleet: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run as ``bootstrap.py ROOT KIND``, as ``./fleet`` does.

    ``./fleet`` sets FLEET_VENV and FLEET_CACHE to absolute paths.
    """
    root, kind = Path(arguments[0]), arguments[1]
    venv = Path(os.environ.get("FLEET_VENV", root / ".venv"))
    cache = Path(os.environ.get("FLEET_CACHE", root / ".cache"))
    try:
        ensure(root, venv, cache, kind)
    except EnvironmentFault as fault:
        print_message(str(fault))
        return 1
    except OSError as fault:
        print_message(f"cannot write the environment ({fault}); check permissions and free disk space, and try again.")
        return 1
    except KeyboardInterrupt:
        print_message("stopped; the next start resumes where this one stopped.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
