"""JAR of Hadoop's default settings: the settings of Hadoop's own files, and those of the user first."""

from pathlib import Path
from xml.etree import ElementTree as ET
from zipfile import ZipFile

import pytest

from fleetpulse.io.spark.hadoop_settings import settings_jar
from fleetpulse.io.spark.jars import spark_home

pytestmark = pytest.mark.unit
DEFAULTS = ("core-default.xml", "mapred-default.xml")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)


def _properties(text: bytes) -> list[dict[str, str | None]]:
    return [
        {one.tag: one.text for one in declared if one.tag in ("name", "value", "final")}
        for declared in ET.fromstring(text).iter("property")
    ]


def test_the_settings_are_those_of_hadoop(tmp_path: Path) -> None:
    path = settings_jar(spark_home(), tmp_path / "jars")
    assert path is not None and path == settings_jar(spark_home(), tmp_path / "jars")
    [source] = (spark_home() / "jars").glob("hadoop-client-api-*.jar")
    with ZipFile(source) as jar, ZipFile(path) as short:
        found = {name for name in jar.namelist() if name.endswith(("-default.xml", "-site.xml"))}
        assert found == {*DEFAULTS, "yarn-default.xml"}
        for name in DEFAULTS:
            assert len(expected := _properties(jar.read(name))) > 100
            assert _properties(short.read(name)) == expected
            assert len(short.read(name)) < len(jar.read(name)) / 2
        others = {*short.namelist()} - {*DEFAULTS}
        assert all(_properties(short.read(name)) == [] for name in others)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR"])
def test_settings_of_the_user_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert settings_jar(spark_home(), tmp_path / "jars") is None


def test_settings_in_the_folder_of_spark_are_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "spark" / "conf").mkdir(parents=True)
    (tmp_path / "spark" / "jars").symlink_to(spark_home() / "jars")
    assert settings_jar(tmp_path / "spark", tmp_path / "jars") is None
    (tmp_path / "spark" / "conf").rmdir()
    assert settings_jar(tmp_path / "spark", tmp_path / "jars") is not None


def test_spark_starts_without_the_jar_if_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert settings_jar(spark_home(), tmp_path / "file" / "jars") is None
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
