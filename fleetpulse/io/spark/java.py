"""Java of the machine if new enough, otherwise a pinned JDK downloaded to the cache.

The JDK is Eclipse Temurin, pinned by version and checksum. A Java of the machine is the choice of
its owner: it is used if it is new enough.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError, first_line
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.paths import cache_dir

MINIMUM: Final = 17  # required by Spark 4
VERSION: Final = "17.0.20+8"  # of the downloaded JDK
RELEASES: Final = "https://github.com/adoptium/temurin17-binaries/releases/download"
# (sys.platform, platform.machine()) -> platform in Temurin's file names, SHA-256 of the archive
ARCHIVES: Final = {
    ("linux", "x86_64"): ("x64_linux", "be7668bc030d578b83d6d5ef9221d6d6729bbbca8cf94a7d52e16ac68b5a5a35"),
    ("linux", "aarch64"): ("aarch64_linux", "d143936f473a4cb24e3b0e247d6d0775769d55ec9775c339540e753059a8d77a"),
    ("linux", "ppc64le"): ("ppc64le_linux", "a14127c5577dc12e058459549e5388fd47ebd1b3d8441fbd23c4d931bdcebee9"),
    ("linux", "riscv64"): ("riscv64_linux", "bc36e8044c88df9f4ec2967c5277d1c8fae572378c12c0bac44dcae15d3af2f7"),
    ("linux", "s390x"): ("s390x_linux", "d5bbce66faa1482adb6ddcabc51d6c14b7c35cb11174e657d84ecb2177a4f6e9"),
    ("darwin", "arm64"): ("aarch64_mac", "524850138c742324fb21fca4ff6ef68ea25f25bf59366a864e45b4a0c45ed0df"),
    ("darwin", "x86_64"): ("x64_mac", "3710c3131c5d7c090582b357f1310133a90bf701183d065223f1a0b90b9ed5ae"),
}
_REMEDY: Final = (
    "install a JDK 17 or newer (on Debian and Ubuntu: apt install openjdk-17-jre-headless; on macOS: "
    "brew install openjdk@17), or name one in JAVA_HOME, and try again"
)


def find_java() -> Path:
    """Return the home of a Java 17 or newer from JAVA_HOME, PATH or the cache.

    If there is none, download the pinned one to the cache.

    Raises:
        FleetError: no such Java is installed, and none is pinned for this platform, the download failed,
            or its checksum differs.
    """
    installed, seen = _find_installed()
    if installed is not None:
        return installed[1]
    home = _fetch(seen)
    _remember(_fetched(), home)
    return home


def installed_java() -> tuple[int, Path]:
    """Return major version and home of the Java that `find_java` returns, without a download.

    Raises:
        FleetError: no Java 17 or newer is installed or was downloaded before.
    """
    installed, seen = _find_installed()
    if installed is None:
        raise FleetError(
            f"Java {MINIMUM} or newer is required: {seen}; run ./fleet fetch, which downloads one, or {_REMEDY}",
            code="java-missing",
        )
    return installed


def _find_installed() -> tuple[tuple[int, Path] | None, str]:
    """Return version and home of an installed Java, if any, and a description of unsuitable ones."""
    seen: list[str] = []
    for java in _candidates(_fetched()):
        version, home = _version_and_home(java)
        if home is not None and version >= MINIMUM:
            return (version, home), ""
        seen.append(f"{java} is {'no working Java' if home is None else f'Java {version}'}")
    return None, "; ".join(seen) or "there is none in JAVA_HOME or on PATH"


def _fetched() -> Path:
    """Return the path of the file that names the home of the downloaded JDK."""
    return cache_dir() / "java_home"


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

    required = f"Java {MINIMUM} or newer is required: {seen}"
    if (pinned := ARCHIVES.get((sys.platform, platform.machine()))) is None:
        raise FleetError(
            f"{required}, and no JDK is pinned for {sys.platform} on {platform.machine()}; {_REMEDY}", code="java-missing"
        )
    name, sha256 = pinned
    tag, file = f"jdk-{VERSION}", f"OpenJDK17U-jdk_{name}_hotspot_{VERSION.replace('+', '_')}.tar.gz"
    url = f"tgz+{RELEASES}/{tag.replace('+', '%2B')}/{file}"
    try:
        folder = Path(str(cjdk.cache_package(f"Temurin {VERSION}", url, sha256=sha256, cache_dir=cache_dir() / "jdk")))
    except Exception as error:  # cjdk's errors (network, archive, disk) differ between releases
        raise FleetError(
            f"{required}, and the download of {file} with SHA-256 {sha256} failed ({_reason(error)}); {_REMEDY}",
            code="java-missing",
        ) from error
    home = folder / tag
    return home / "Contents" / "Home" if sys.platform == "darwin" else home


def _reason(error: BaseException) -> str:
    """Return the root cause in one line; the errors above it only repeat it."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return first_line(error)


def _remember(fetched: Path, home: Path) -> None:
    try:
        fetched.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(fetched, f"{home}\n", temporary=fetched.with_name(f"{fetched.name}.{os.getpid()}"))
    except OSError as error:
        raise FleetError(
            f"cannot write {fetched} ({error.strerror}); free some space and try again", code="cache-unwritable"
        ) from None
