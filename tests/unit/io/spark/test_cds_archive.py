"""Spark's classes are kept for the Java and the JARs that they came from, and one that is cut short is never given to a JVM."""

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from cli.supervisor import cds
from fleetpulse.io.spark.cds_archive import class_archive, create_options, fresh_archive, publish_archive, use_options
from fleetpulse.io.system.process import StopSignal
from tests.support.wait import await_that

MADE = b"classes" * 100
_BEGIN = subprocess.Popen


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def java(tmp_path: Path) -> Path:
    (tmp_path / "java").mkdir()
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="17.0.15"')
    return tmp_path / "java"


def _jars(tmp_path: Path, *names: str) -> list[Path]:
    for name in names:
        (tmp_path / name).write_bytes(b"jar")
    return [tmp_path / name for name in names]


def _made(java: Path, jars: list[Path]) -> Path:
    fresh = fresh_archive()
    fresh.write_bytes(MADE)
    return publish_archive(fresh, java, jars)


def test_what_was_kept_is_found_by_the_same_java_and_jars_alone(tmp_path: Path, java: Path) -> None:
    jars = _jars(tmp_path, "one.jar", "other.jar")
    assert class_archive(java, jars) is None
    kept = _made(java, jars)
    assert class_archive(java, jars) == kept and kept.read_bytes() == MADE
    assert class_archive(java, jars[::-1]) is None, "the order of the class path is part of it"
    assert class_archive(java, jars[:1]) is None
    assert class_archive(tmp_path / "another java", jars) is None
    os.utime(jars[0], (1, 1))
    assert class_archive(java, jars) is None


def test_one_that_is_cut_short_is_not_used_for_a_jvm_would_be_killed_by_it(tmp_path: Path, java: Path) -> None:
    jars = _jars(tmp_path, "one.jar")
    kept = _made(java, jars)
    kept.write_bytes(MADE[:-1])
    assert class_archive(java, jars) is None
    assert class_archive(java, jars) != _made(java, jars) == class_archive(java, jars), "made again, it is"


def test_a_newer_one_takes_the_place_of_its_own_installations_and_of_no_others(tmp_path: Path, java: Path, cache: Path) -> None:
    jars, others = _jars(tmp_path, "one.jar"), _jars(tmp_path, "another.jar")
    first, another = _made(java, jars), _made(java, others)
    os.utime(jars[0], (1, 1))
    second = _made(java, jars)
    assert {*cache.rglob("*.jsa")} == {second, another} and first != second


def test_a_path_with_a_space_is_one_option(tmp_path: Path) -> None:
    for said in (use_options(tmp_path / "a b.jsa"), create_options(tmp_path / "a b.jsa")):
        assert f'{tmp_path}/a b.jsa"' in said and said.count('"') == 2


@pytest.fixture
def installed(tmp_path: Path, java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cds, "find_java", lambda: java)
    jars = _jars(tmp_path, "one.jar")
    monkeypatch.setattr(cds, "jars_of_spark", lambda: jars)


def _rehearsal(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let a program take the place of the rehearsal: it is given a folder and where the file is to be."""

    def other(command: list[str], **how: Any) -> Any:
        return _BEGIN([command[0], "-c", code, *command[-2:]], **how)

    monkeypatch.setattr(subprocess, "Popen", other)


@pytest.mark.usefixtures("installed")
def test_a_rehearsal_is_done_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _rehearsal(monkeypatch, "import sys, pathlib; pathlib.Path(sys.argv[2]).write_bytes(bytes(3_000_000))")
    assert not cds.archive_is_ready()
    assert cds.create_archive() == "Spark's class archive is ready: 3 MB"
    _rehearsal(monkeypatch, "raise SystemExit(1)")
    assert cds.archive_is_ready() and cds.create_archive() == "Spark's class archive is ready"
    assert len([*cache.rglob("*.*")]) == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys, pathlib; pathlib.Path(sys.argv[2]).write_bytes(b'half'); raise SystemExit('no room')", "no room"),
        ("raise SystemExit(3)", "no output"),
    ],
)
def test_where_it_comes_to_nothing_that_is_said_and_nothing_is_left(
    code: str, why: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _rehearsal(monkeypatch, code)
    said = cds.create_archive()
    assert said.startswith("Spark's class archive is not created (") and why in said and "nothing else differs" in said
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert not cds.archive_is_ready(), "the next run tries again"


@pytest.mark.usefixtures("installed")
def test_a_java_that_makes_none_is_tried_by_no_further_run_and_by_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _rehearsal(monkeypatch, "pass")
    assert "No such file" in cds.create_archive()
    assert cds.archive_is_ready()
    _rehearsal(monkeypatch, "import sys, pathlib; pathlib.Path(sys.argv[2]).write_bytes(bytes(3_000_000))")
    assert cds.create_archive() == "Spark's class archive is ready: 3 MB"
    assert cds.archive_is_ready()


@pytest.mark.usefixtures("installed")
def test_a_cache_that_cannot_be_written_is_said_and_stops_nobody(cache: Path) -> None:
    cache.write_text("no folder")
    said = cds.create_archive()
    assert said.startswith("Spark's class archive is not created (cannot write ") and "nothing else differs" in said


@pytest.mark.usefixtures("installed")
def test_it_is_left_with_all_that_it_began_when_the_run_stops(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    _rehearsal(monkeypatch, f"import pathlib, time; pathlib.Path({str(began)!r}).touch(); time.sleep(600)")
    stop = StopSignal()
    threading.Thread(target=lambda: (await_that(began.exists, what="it began"), stop.set()), daemon=True).start()
    assert "the training run was killed" in cds.create_archive(stop)
    assert not [path for path in cache.rglob("*") if path.is_file()]
