"""The environment is what the lock says, or nothing is started.

Rule 1: only the standard library, since this runs before anything is installed.
Rule 2: each thing that cannot be had is one sentence with what to do, and exit code 1.
Rule 3: the stamp (a copy of the lock, kept in the environment) is removed before a change and
written after it, so that an installation that broke off is never taken for a finished one.
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
LOCK_WAIT_S = 900.0  # a first installation over a slow line takes minutes; another start waits for it
KINDS = ("runtime", "operations", "dev")  # each contains the one before, at the same versions

TAKES = {"runtime": "about a minute", "operations": "Airflow and its like; a few minutes", "dev": "a few minutes"}


class EnvironmentFault(Exception):
    """A sentence that says what could not be had, and what to do.

    Attributes:
        broken_off: whether a program was ended, or found no room, in the middle of its work.
    """

    def __init__(self, words: str, *, broken_off: bool = False) -> None:
        super().__init__(words)
        self.broken_off = broken_off


def is_ready(root: Path, venv: Path, kind: str) -> bool:
    """Whether ``venv`` holds what the lock ``requirements/<kind>.txt`` says, by its stamp."""
    lock, stamp = root / "requirements" / f"{kind}.txt", venv / ".fleet" / f"{kind}.txt"
    try:
        return os.access(venv / "bin" / "python", os.X_OK) and lock.read_bytes() == stamp.read_bytes()
    except OSError:
        return False


def kind_to_install(venv: Path, kind: str) -> str:
    """The largest that was there: a runtime start must not throw away the tools of someone who develops."""
    stamped = [each for each in KINDS if (venv / ".fleet" / f"{each}.txt").exists()]
    return max([kind, *stamped], key=KINDS.index)


def ensure(root: Path, venv: Path, cache: Path, kind: str) -> None:
    """Make ``venv`` hold the lock of ``kind``, once, however many starts ask at the same time.

    Raises:
        EnvironmentFault: what could not be had.
    """
    if sys.version_info < MINIMUM_PYTHON:
        raise EnvironmentFault(wrong_python(sys.version_info[:3]))
    cache.mkdir(parents=True, exist_ok=True)
    with only_one(cache / "environment.lock", LOCK_WAIT_S):
        if is_ready(root, venv, kind):
            return  # another start did it while this one waited
        kind = kind_to_install(venv, kind)
        say(f"installing the {kind} environment into {venv} (once; {TAKES[kind]})")
        uv = find_uv(root, cache)
        create_venv(uv, venv)
        sync(uv, root, venv, kind)


def wrong_python(version: Sequence[int]) -> str:
    """The sentence for a Python that is too old."""
    got = ".".join(map(str, version))
    return f"Python 3.11 or newer is needed; got {got}; install one, or name it, as in FLEET_PYTHON=python3.12 ./fleet."


@contextlib.contextmanager
def only_one(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file ``path``; the operating system lets go of it whatever way this process dies.

    Raises:
        EnvironmentFault: another process has held it for ``wait_s`` seconds.
    """
    with path.open("a+") as held:
        deadline = time.monotonic() + wait_s
        told = False
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EnvironmentFault(
                        f"another ./fleet has been installing for {wait_s:.0f} s (it holds {path}); stop it and try again."
                    ) from None
                if not told:
                    say("another ./fleet is installing; waiting for it")
                    told = True
                time.sleep(0.2)
        yield


def find_uv(root: Path, cache: Path, *, pinned: bool = False) -> Path:
    """The uv of PATH, or the pinned one in the project's cache, installed there if need be.

    Args:
        root: the project's folder.
        cache: the project's cache folder.
        pinned: take the pinned one only, so that everyone's locks come out alike.

    Raises:
        EnvironmentFault: neither is there, and pip cannot install it.
    """
    on_path = shutil.which("uv")
    if on_path and not pinned:
        return Path(on_path)
    home = cache / "uv"
    lock, stamp, uv = root / "requirements" / "uv.txt", home / "fleet.txt", home / "bin" / "uv"
    if uv.exists() and stamp.exists() and stamp.read_bytes() == lock.read_bytes():
        return uv
    say("installing uv into the project's cache")
    shutil.rmtree(home, ignore_errors=True)
    call([sys.executable, "-m", "venv", str(home)], "cannot make a virtual environment for uv", VENV_CURE)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--require-hashes", "--only-binary=:all:", "--requirement", str(lock)]
    call(pip, "pip cannot install uv", NETWORK_CURE)
    shutil.copyfile(lock, stamp)
    return uv


VENV_CURE = "install Python's venv module (on Debian and Ubuntu: apt install python3-venv), or install uv, and try again."
NETWORK_CURE = "check the network, the proxy (HTTPS_PROXY) and the free disk space, and try again; it goes on where it stopped."


def create_venv(uv: Path, venv: Path) -> None:
    """Make the virtual environment, unless a working one of a fitting Python is there."""
    works = "import sys; sys.exit(sys.version_info < (3, 11))"
    python = venv / "bin" / "python"
    if python.exists() and subprocess.run([python, "-I", "-c", works], check=False).returncode == 0:
        return
    command = [str(uv), "venv", "--quiet", "--python", sys.executable]
    if (venv / "pyvenv.cfg").exists():
        command.append("--clear")  # ours, and broken; any other folder is left alone
    cure = "remove that folder if nothing in it is needed, or set FLEET_VENV to another one."
    call([*command, str(venv)], f"cannot make the virtual environment {venv}", cure)


def sync(uv: Path, root: Path, venv: Path, kind: str) -> None:
    """Install exactly the lock of ``kind``, by hash, and stamp it.

    A smaller kind that is ready stays so meanwhile: larger locks hold the same versions, so that its packages are not touched.
    """
    stamps, begun = venv / ".fleet", venv / ".fleet-begun"
    ready = [each for each in KINDS if is_ready(root, venv, each)]
    anew: list[str] = []
    if begun.exists():  # a package that was half there then says of itself that it is installed
        whole = {name for each in ready for name in _packages(root, each)}
        anew = [name for name in _packages(root, kind) if name not in whole]
    begun.touch()
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
        "--compile-bytecode",  # where Python is told to write none, each start would compile Spark and numba anew
        "--python",
        str(venv / "bin" / "python"),
        *(word for name in anew for word in ("--reinstall-package", name)),
        str(lock),
    ]
    try:
        call(command, f"cannot install {lock.relative_to(root)}", NETWORK_CURE)
    except EnvironmentFault as fault:
        if not fault.broken_off and not anew:
            begun.unlink()
        raise
    stamps.mkdir(exist_ok=True)
    for each in KINDS[: KINDS.index(kind) + 1]:
        shutil.copyfile(root / "requirements" / f"{each}.txt", stamps / f"{each}.txt")
    begun.unlink()


def _packages(root: Path, kind: str) -> list[str]:
    """The names in a lock."""
    lines = (root / "requirements" / f"{kind}.txt").read_text().splitlines()
    return [line.partition("==")[0] for line in lines if "==" in line and not line.startswith((" ", "#"))]


def call(command: Sequence[str], what: str, cure: str) -> None:
    """Run ``command``; on failure say ``what`` failed, the program's own last line, and the ``cure``."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        broken_off = done.returncode < 0 or "os error 28" in done.stdout
        raise EnvironmentFault(f"{what} ({gist(done.stdout)}); {cure}", broken_off=broken_off)


def gist(output: str) -> str:
    """The line of ``output`` that tells most: the deepest cause that uv gives, or the last line of anyone else."""
    lines = [line.strip(" \t×╰─▶│├") for line in output.splitlines() if line.strip(" \t×╰─▶│├")]
    causes = [line for line in lines if line.lower().startswith(("caused by:", "error:"))]
    return (causes or lines or ["it said nothing"])[-1][:300].rstrip(".")


def say(text: str) -> None:
    """Tell the person at the terminal; standard output belongs to the command."""
    print(f"fleet: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Called by ``./fleet`` as ``bootstrap.py ROOT KIND``; FLEET_VENV and FLEET_CACHE are absolute by then."""
    root, kind = Path(arguments[0]), arguments[1]
    venv = Path(os.environ.get("FLEET_VENV", root / ".venv"))
    cache = Path(os.environ.get("FLEET_CACHE", root / ".cache"))
    try:
        ensure(root, venv, cache, kind)
    except EnvironmentFault as fault:
        say(str(fault))
        return 1
    except OSError as fault:
        say(f"cannot write the environment ({fault}); check permissions and free disk space, and try again.")
        return 1
    except KeyboardInterrupt:
        say("stopped; the next start goes on where this one stopped.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
