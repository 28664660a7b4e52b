"""Bill of materials and third-party notices: complete, valid, and with a license for each component."""

import json
import re
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from cli.dev.components import LICENSES_OF_JARS, UNKNOWN, Package, jars, packages
from cli.dev.notices import license_of
from cli.dev.sbom import sbom
from fleetpulse.io.mqtt.embedded import broker_program
from fleetpulse.io.spark import java
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit


def test_the_bill_of_materials_is_valid_and_lists_every_component_with_its_hashes() -> None:
    text = sbom("runtime", "1.2.3")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = json.loads(text)
    found = {one["purl"]: one for one in bom["components"]}
    locked = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
    expected = {f"pkg:pypi/{name}@{version}" for name, version in locked}
    assert {purl for purl in found if purl.startswith("pkg:pypi/")} == expected - {
        purl for purl in expected if purl.startswith(("pkg:pypi/pyspark-client@", "pkg:pypi/zstandard@"))
    }
    assert all(one["externalReferences"][0]["hashes"] for purl, one in found.items() if purl.startswith("pkg:pypi/"))
    for jar in jars():
        assert found[f"pkg:maven/{jar.group}/{jar.artifact}@{jar.version}"]["hashes"][0]["content"] == jar.sha256
    assert {
        digest for one in found.values() for file in one.get("components", ()) for digest in [file["hashes"][0]["content"]]
    } == {
        *broker_program.SHA256.values(),
        *(sha256 for _, sha256 in java.ARCHIVES.values()),
    }
    assert sum(purl.startswith("pkg:docker/") for purl in found) == 2
    assert bom["metadata"]["component"]["version"] == "1.2.3"
    uses = {one["ref"]: one.get("dependsOn", []) for one in bom["dependencies"]}
    [rich] = [purl for purl in found if purl.startswith("pkg:pypi/rich@")]
    assert rich in uses["fleetpulse"] and any(purl.startswith("pkg:pypi/pygments@") for purl in uses[rich])


def test_every_component_has_a_license() -> None:
    assert [one.name for one in packages("operations") if license_of(one) == UNKNOWN] == []
    assert set(LICENSES_OF_JARS) == {jar.group for jar in jars()}


def test_the_license_of_a_package_for_another_platform_is_kept_for_the_same_version(tmp_path: Path) -> None:
    present = tmp_path / "notices.md"
    absent = Package("not-installed-here", "8.0", "", (), (), False)
    assert license_of(absent, present) == UNKNOWN
    present.write_text("| not-installed-here | 7.0 | MIT |\n| not-installed-here | 8.0 | MIT OR Apache-2.0 |\n")
    assert license_of(absent, present) == "MIT OR Apache-2.0"
    present.write_text("| not-installed-here | 7.0 | MIT |\n")
    assert license_of(absent, present) == UNKNOWN
