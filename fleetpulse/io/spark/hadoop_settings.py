"""JAR with Hadoop's default settings in short form, in front of Spark's class path.

Spark creates a Hadoop ``Configuration`` for each encoder of the state. Each one searches all JARs for files such as
core-site.xml, and parses core-default.xml, mapred-default.xml and yarn-default.xml: 460 KB, which is a fifth of the
JVM's time of a state operation. This JAR answers the searches, and its files have 66 KB.

Rule 1: the settings are those of Hadoop's own files, without their descriptions, and without those of YARN, on which
no job of fleetpulse runs.
Rule 2: files of the user stay in force: there is no such JAR if a folder of settings is configured.
"""

import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Final

from fleetpulse.io.system.fsync import atomic_write

_CONFIGURED_BY: Final = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")
_COPIED: Final = ("core", "mapred")
_EMPTY: Final = ("hdfs", "hdfs-rbf", "yarn")  # Spark has no default settings of HDFS
_NOTHING: Final = b"<configuration/>"
_KEPT: Final = ("name", "value", "final")  # of a property


def settings_jar(spark_home: Path, folder: Path) -> Path | None:
    """Return the JAR, and write it if it is missing; None if the user has settings, or it cannot be written.

    Several processes can call this at the same time.

    Args:
        spark_home: folder of Spark.
        folder: folder of the JAR.
    """
    if any(map(os.environ.get, _CONFIGURED_BY)) or (spark_home / "conf").exists():
        return None
    for source in (spark_home / "jars").glob("hadoop-client-api-*.jar"):
        path = folder / source.name.replace("client-api", "settings")
        with suppress(OSError):
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                atomic_write(path, _content(source), temporary=path.with_name(f".{os.getpid()}.part"))
            return path
    return None


def _content(source: Path) -> bytes:
    from zipfile import ZipFile, ZipInfo  # needed once only

    content = BytesIO()
    with ZipFile(source) as jar, ZipFile(content, "w") as short:
        for part in (*_COPIED, *_EMPTY):
            default = _without_descriptions(jar.read(f"{part}-default.xml")) if part in _COPIED else _NOTHING
            short.writestr(ZipInfo(f"{part}-default.xml"), default)
            short.writestr(ZipInfo(f"{part}-site.xml"), _NOTHING)
    return content.getvalue()


def _without_descriptions(text: bytes) -> bytes:
    from xml.etree import ElementTree as ET

    short = ET.Element("configuration")
    for declared in ET.fromstring(text).iter("property"):  # noqa: S314 - a file of the pinned Spark
        kept = ET.SubElement(short, "property")
        for one in declared:
            if one.tag in _KEPT:
                ET.SubElement(kept, one.tag).text = one.text
    return ET.tostring(short)
