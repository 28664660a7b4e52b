"""Java of the machine if new enough, otherwise a JDK downloaded to the cache."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.paths import cache_dir

MINIMUM: Final = 17  # required by Spark 4
_REMEDY: Final = (
    "install a JDK 17 or newer (on Debian and Ubuntu: apt install openjdk-17-jre-headless; on macOS: "
    "brew install openjdk@17), or name one in JAVA_HOME, and try again"
)


def find_java() -> Path:
    """Return the home of a Java 17 or newer from JAVA_HOME, PATH or the cache.

    If there is none, download one to the cache.

    Raises:
        FleetError: no such Java is installed, and the download failed.
    """
    fetched = cache_dir() / "java_home"  # remembered here, since cjdk needs the network if its index is a day old
    seen: list[str] = []
    for java in _candidates(fetched):
        version, home = _version_and_home(java)
        if home is not None and version >= MINIMUM:
            return home
        seen.append(f"{java} is {'no working Java' if home is None else f'Java {version}'}")
    home = _fetch("; ".join(seen) or "there is none in JAVA_HOME or on PATH")
    _remember(fetched, home)
    return home


def _candidates(fetched: Path) -> list[Path]:
    found: list[Path] = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        found.append(Path(on_path))
    if fetched.exists():
        found.append(Path(fetched.read_text().strip()) / "bin" / "java")
    return found


def _version_and_home(java: Path) -> tuple[int, Path | None]:
    """Return the major version and home that ``java`` reports; (0, None) if it fails.

    The path of ``java`` does not imply its home: PATH may contain the shim of a version manager.
    """
    command = [java, "-XshowSettings:properties", "-version"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0, None
    output = completed.stderr + completed.stdout
    version = re.search(r'version "(?:1\.)?(\d+)', output)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", output, re.MULTILINE)
    return (int(version[1]), Path(home[1])) if version and home else (0, None)


def _fetch(seen: str) -> Path:
    import cjdk  # imported only if needed: the import takes time

    try:
        return Path(str(cjdk.java_home(vendor="temurin", version=str(MINIMUM), cache_dir=cache_dir() / "jdk")))
    except Exception as error:  # cjdk's errors (network, archive, disk) differ between releases
        raise FleetError(
            f"Java {MINIMUM} or newer is required: {seen}, and the download failed ({_reason(error)}); {_REMEDY}",
            code="java-missing",
        ) from error


def _reason(error: BaseException) -> str:
    """Return the root cause in one line; the errors above it only repeat it."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _remember(fetched: Path, home: Path) -> None:
    try:
        fetched.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(fetched, f"{home}\n", temporary=fetched.with_name(f"{fetched.name}.{os.getpid()}"))
    except OSError as error:
        raise FleetError(
            f"cannot write {fetched} ({error.strerror}); free some space and try again", code="cache-unwritable"
        ) from None
