"""Third-party components that an installation uses, from the lock files and the pins in the sources.

Packages that Spark, Airflow and others contain (JARs of pyspark, libraries within wheels) are parts of
those packages; they are not listed one by one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, Jar
from fleetpulse.paths import ROOT

UNKNOWN: Final = "unknown"
_APACHE: Final = "Apache-2.0"
# Group of a JAR -> license of its POM
LICENSES_OF_JARS: Final = {
    "com.fasterxml.jackson.datatype": _APACHE,
    "io.delta": _APACHE,
    "io.unitycatalog": _APACHE,
    "javax.annotation": "CDDL-1.1 OR GPL-2.0-only WITH Classpath-exception-2.0",
    "org.apache.commons": _APACHE,
    "org.apache.kafka": _APACHE,
    "org.apache.spark": _APACHE,
}
LICENSE_OF_NATS: Final = _APACHE
LICENSE_OF_TEMURIN: Final = "GPL-2.0-only WITH Classpath-exception-2.0"
_MAX_LICENSE: Final = 60  # characters; longer texts are the license itself
_ENTRY: Final = re.compile(r"\n(?=\S)")
_PINNED: Final = re.compile(r"(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; (?P<marker>[^\\]+?))? \\")


@dataclass(frozen=True, slots=True)
class Package:
    """Entry of a lock file.

    Attributes:
        name: normalized name.
        version: pinned version.
        marker: environment marker; empty if the package is for all.
        hashes: SHA-256 of the accepted files, in hexadecimal digits.
        used_by: names of the locked packages that require it.
        direct: whether pyproject.toml requires it.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    used_by: tuple[str, ...]
    direct: bool


def packages(kind: str) -> Iterator[Package]:
    """Yield the packages of a lock that some platform installs, in its order.

    A package that pyproject.toml overrides has a marker that is never true.

    Args:
        kind: lock file: runtime, operations or dev.
    """
    return (one for one in locked_packages(ROOT / "requirements" / f"{kind}.txt") if "'never'" not in one.marker)


def locked_packages(path: Path) -> Iterator[Package]:
    """Yield all packages of a lock file, in its order."""
    for entry in _ENTRY.split(path.read_text()):
        if (pinned := _PINNED.match(entry)) is None:
            continue  # a comment
        users = re.findall(r"^ +#(?:   | via )(\S.*)$", entry, re.MULTILINE)
        yield Package(
            pinned["name"],
            pinned["version"],
            pinned["marker"] or "",
            tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)),
            tuple(user for user in users if re.fullmatch(r"[\w.-]+", user)),
            any(user.endswith("(pyproject.toml)") for user in users),
        )


def jars() -> tuple[Jar, ...]:
    """Return the JARs that ``./fleet fetch`` downloads."""
    return (*JARS, *KAFKA_JARS)


def installed_license(name: str, version: str) -> str:
    """Return the license in the metadata of a package; `UNKNOWN` if this version is not installed."""
    try:
        stated = metadata.metadata(name).json
    except metadata.PackageNotFoundError:
        return UNKNOWN
    if stated["version"] != version:
        return UNKNOWN  # a lock can pin another version for another Python
    if expression := stated.get("license_expression"):
        return str(expression)
    text = str(stated.get("license", "")).strip()
    if text and text != "UNKNOWN" and "\n" not in text and len(text) <= _MAX_LICENSE:
        return text
    classified = [one.rpartition(" :: ")[2] for one in stated.get("classifier", ()) if one.startswith("License :: ")]
    return ", ".join(classified) or UNKNOWN
